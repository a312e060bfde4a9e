# SPDX-License-Identifier: Apache-2.0
"""The localization core, loaded from the patch's own sources without verl.

Only the modules that verl's seams call import verl; the search itself is torch and this package's
relative imports. So it is loaded here under a name of its own, from the single source of truth.
"""

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SOURCE = Path(__file__).resolve().parents[1] / "verl_overrides" / "verl" / "gradloc"
_PACKAGE = "gradloc_core"


def core(module: str) -> ModuleType:
    """A module of the core, e.g. ``core("search").localize``."""
    if _PACKAGE not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            _PACKAGE, SOURCE / "__init__.py", submodule_search_locations=[str(SOURCE)]
        )
        package = importlib.util.module_from_spec(spec)
        sys.modules[_PACKAGE] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{_PACKAGE}.{module}")


def digest() -> str:
    """What was measured: sha256 over the core's sources."""
    found = hashlib.sha256()
    for path in sorted(SOURCE.rglob("*.py")):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()

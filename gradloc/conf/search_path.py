# SPDX-License-Identifier: Apache-2.0
"""Hydra's search path for ``+gradloc=observe`` and the other presets; ``hydra_plugins/gradloc.py`` in the wheel."""

from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


def _folder(package: str) -> str:
    """Find a package's folder without importing it, since few runs of Hydra use it; "" without the package."""
    spec = find_spec(package)
    return next(iter(spec.submodule_search_locations), "") if spec and spec.submodule_search_locations else ""


class GradLocSearchPath(SearchPathPlugin):
    """Adds the package's folders after verl's own, so that a user's config comes first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        is_patched = Path(_folder("verl"), "utils", "gradloc_seam.py").is_file()
        for folder in ("conf", f"adapters/{'verl07' if is_patched else 'verl09'}/conf"):
            search_path.append(provider="gradloc", path=f"file://{_folder('gradloc')}/{folder}")

# SPDX-License-Identifier: Apache-2.0
"""verl 0.9 loads this in every process (entry point group ``verl.plugins``), while verl itself is being imported.

So it imports nothing of verl. Once verl has imported its trainers, subclasses with our hook take their places; in a run
that does not ask for GradLoc these do nothing.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_TRAINERS = "verl.trainer.ppo.v1"


class _AfterTrainers(MetaPathFinder):
    """Registers our trainers as soon as verl's have been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _TRAINERS:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                importlib.import_module(f"{__package__}.trainer").watch_trainers()

            loader.exec_module = exec_module
        return spec


if _TRAINERS in sys.modules:  # a plug-in of somebody else was quicker
    importlib.import_module(f"{__package__}.trainer").watch_trainers()
else:
    sys.meta_path.insert(0, _AfterTrainers())

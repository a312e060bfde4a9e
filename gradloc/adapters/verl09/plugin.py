# SPDX-License-Identifier: Apache-2.0
"""verl 0.9 loads this in every process (entry point group ``verl.plugins``), while verl itself is being imported.

So it imports nothing of verl. Once verl has imported its trainers, subclasses with our hook take their places; in a run
that does not ask for GradLoc these do nothing.
"""

import importlib
import importlib.util
import sys

_TRAINERS = "verl.trainer.ppo.v1"


def _register() -> None:
    importlib.import_module(f"{__package__}.trainer").watch_trainers()


class _AfterTrainers:
    """Finds verl's trainers as Python does, and registers ours once they have run."""

    def find_spec(self, name, path=None, target=None):
        if name != _TRAINERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                _register()

            spec.loader.exec_module = exec_module
        return spec


if _TRAINERS in sys.modules:  # a plug-in of somebody else was quicker
    _register()
else:
    sys.meta_path.insert(0, _AfterTrainers())

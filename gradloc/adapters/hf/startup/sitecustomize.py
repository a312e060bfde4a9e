# SPDX-License-Identifier: Apache-2.0
"""Runs when Python starts in a command under ``gradloc run``: see :mod:`gradloc.adapters.hf.run`."""

import importlib
import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AtTrainer:
    """Finds ``transformers.trainer`` as Python does, and changes its Trainer once the module has run."""

    def find_spec(self, name, path=None, target=None):
        if name != "transformers.trainer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            importlib.import_module("gradloc.adapters.hf.run").watch_each(module.Trainer)

        spec.loader.exec_module = exec_module
        return spec


def _run_own():
    """Run the sitecustomize that this one hides."""
    others = [folder for folder in sys.path if os.path.abspath(folder or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _AtTrainer())
_run_own()

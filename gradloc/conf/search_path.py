# SPDX-License-Identifier: Apache-2.0
"""Tells Hydra where ``+gradloc=observe`` and its like are; the wheel has this file as ``hydra_plugins/gradloc.py``."""

from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


def _folder(package: str) -> str:
    """Where a package is; found without importing it, since most runs of Hydra have nothing to do with it."""
    spec = find_spec(package)
    return next(iter(spec.submodule_search_locations), "") if spec and spec.submodule_search_locations else ""


class GradLocSearchPath(SearchPathPlugin):
    """Behind verl's own folders, so that a config of the user's own goes first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        is_patched = Path(_folder("verl"), "utils", "gradloc_seam.py").is_file()
        for folder in ("conf", f"adapters/{'verl07' if is_patched else 'verl09'}/conf"):
            search_path.append(provider="gradloc", path=f"file://{_folder('gradloc')}/{folder}")

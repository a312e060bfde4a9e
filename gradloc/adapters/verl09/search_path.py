# SPDX-License-Identifier: Apache-2.0
"""Tells Hydra where ``+gradloc=on`` and its like are; the wheel has this file as ``hydra_plugins/gradloc.py``."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class GradLocSearchPath(SearchPathPlugin):
    """Behind verl's own folders, so that a config of the user's own goes first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="gradloc", path="pkg://gradloc.adapters.verl09.conf")

# SPDX-License-Identifier: Apache-2.0
"""The patched copies under .gradloc/ do not pile up, and none that is in use goes."""

import os
import time

from lab.experiments import environment


def test_copies_that_no_run_began_with_for_a_day_are_deleted_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "CACHE", tmp_path)
    hours = {"verl-old": 30, "verl-half-made": 25, "verl-new": 20, "material-old": 30}
    for name, age in hours.items():
        (tmp_path / name / "verl").mkdir(parents=True)
        os.utime(tmp_path / name, (time.time() - 3600 * age,) * 2)
    environment.prune_patched_copies()
    assert {path.name for path in tmp_path.iterdir()} == {"verl-new", "material-old"}


def test_a_copy_that_a_run_begins_with_is_not_old(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "CACHE", tmp_path)
    copy = environment.patched_copy().path
    copy.mkdir()
    os.utime(copy, (0, 0))
    environment.ensure_patched_copy("no Python is needed")
    environment.prune_patched_copies()
    assert copy.is_dir()

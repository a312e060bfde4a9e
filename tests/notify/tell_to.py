# SPDX-License-Identifier: Apache-2.0
"""Tells one real tracker, opened by verl's Tracking, of each model: ``tell_to.py NAME TRACKING_PY ROOT MODEL...``.

A process of its own, in an empty folder: these clients keep state, patch libraries and write where they stand.
"""

import importlib.util
import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from gradloc.notify.config import NotifyConfig
from gradloc.notify.notifier import Notifier
from gradloc.record import Event
from gradloc.record.reading import read
from tests.report.builder import make_event


def open_tracking(name: str, tracking_py: str):
    spec = importlib.util.spec_from_file_location("tracking", tracking_py)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Tracking("tests", "tell", name, config={"trainer": {"n": 1}})


def main(name: str, tracking_py: str, root: str, *models: str) -> None:
    event = read(Event, make_event())
    folder = Path(root) / event.folder
    folder.mkdir(parents=True)
    (folder / "sequences.json").write_text("{}")
    tracking = open_tracking(name, tracking_py)
    notifier = Notifier(NotifyConfig(tracker_alerts=True, timeout_s=60), Path(root))
    notifier.trackers = tracking.logger
    before = random.getstate(), np.random.get_state()[1].tolist()
    for model in models:
        notifier.announce([(replace(event, model=model), "")], 5)
    notifier.finish()
    after = random.getstate(), np.random.get_state()[1].tolist()
    if name != "trackio":  # verl 0.7.0's own call has an argument that today's trackio does not know
        tracking.log({"gradloc/spikes": 1}, step=5)
    print("RESULT " + json.dumps({"same_random_numbers": before == after}))
    del notifier, tracking  # verl's Tracking closes its clients when it goes


if __name__ == "__main__":
    main(*sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""Run a command, ``gradloc run COMMAND ...``, with a watch on each ``transformers.Trainer`` in all of its processes.

The command's ``PYTHONPATH`` gets a folder with a ``sitecustomize``, which Python runs at start. It waits until
``transformers.trainer`` is imported; then each Trainer gets a :class:`.callback.TrainerCallback` of its own.
"""

import json
import os
import shutil
import sys
from functools import wraps
from pathlib import Path
from typing import Any

from ...explain.advice import parsed

SETTINGS = "GRADLOC_RUN"
"""The environment variable with the callback's arguments, as JSON."""
_OF_WATCH = ("folder", "action", "hidden", "keep_gb", "metrics", "buckets", "quartiles")
"""Arguments that the callback and the watch take themselves."""
USAGE = """\
usage: gradloc run [NAME=VALUE ...] COMMAND [ARGUMENT ...]

Runs a training command with gradloc watching each transformers.Trainer in it:

  gradloc run llamafactory-cli train sft.yaml
  gradloc run action=mask trigger.tau=640 swift sft --model MODEL --dataset data.jsonl

NAME is folder (default: the Trainer's output_dir), action (observe, mask, skip, abort, off), or a setting of
gradloc.Watch.
"""


def main(arguments: list[str]) -> int:
    """Replace this process by the command; returns an exit code if the command cannot be run."""
    settings, command = _split(arguments)
    if not command or command[0] in ("-h", "--help"):
        print(USAGE, end="", file=sys.stdout if command else sys.stderr)
        return 0 if command else 2
    if shutil.which(command[0]) is None:
        or_folder = "; for a folder named run: gradloc ./run" if Path("run").is_dir() else ""
        why = f"there is no command {command[0]}; give the one that trains, as you call it{or_folder}"
        if Path(command[0]).is_file():
            why = f"{command[0]} may not be executed: write what runs it, such as python or bash, before it"
        print(f"gradloc: {why}", file=sys.stderr)
        return 2
    from ...watch.settings import loop_settings  # each process of the command imports this module

    blocks = {name: value for name, value in settings.items() if name not in _OF_WATCH}
    try:
        if (action := settings.get("action", "observe")) != "off":
            loop_settings(action, blocks, "")
    except ValueError as error:
        print(f"gradloc: {error}", file=sys.stderr)
        return 2
    startup = str(Path(__file__).parent / "startup")
    path = os.pathsep.join([startup, *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.stdout.flush()  # exec drops what is buffered
    os.execvpe(command[0], command, {**os.environ, "PYTHONPATH": path, SETTINGS: json.dumps(settings)})


def _split(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Split the arguments into settings, ``a.b=1`` as ``{"a": {"b": 1}}``, and the command with its own arguments."""
    settings: dict[str, Any] = {}
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if not equals:
            return settings, arguments[index:]
        *blocks, last = name.split(".")
        block = settings
        for each in blocks:
            block = block.setdefault(each, {})
        block[last] = parsed(value)
    return settings, []


def watch_each(trainer: type) -> None:
    """Give each Trainer of this class and its subclasses a callback, with the arguments in the environment."""
    init = trainer.__init__

    @wraps(init)
    def init_with_callback(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        from .callback import TrainerCallback

        if not any(isinstance(each, TrainerCallback) for each in self.callback_handler.callbacks):
            self.add_callback(TrainerCallback(**json.loads(os.environ.get(SETTINGS, "{}"))))

    trainer.__init__ = init_with_callback

# SPDX-License-Identifier: Apache-2.0
"""``gradloc run COMMAND ...``: a watch for each ``transformers.Trainer`` in a command and in the processes it starts.

The command's environment names a folder whose ``sitecustomize`` Python runs at start. That changes nothing until
``transformers.trainer`` is imported; then each Trainer gets a :class:`.callback.TrainerCallback` of its own.
"""

import json
import os
import shutil
import sys
from functools import wraps
from pathlib import Path
from typing import Any

SETTINGS = "GRADLOC_RUN"
"""The environment variable with the callback's arguments, as JSON."""
USAGE = """\
usage: gradloc run [NAME=VALUE ...] COMMAND [ARGUMENT ...]

Runs a training command with gradloc watching each transformers.Trainer in it:

  gradloc run llamafactory-cli train sft.yaml
  gradloc run action=mask trigger.tau=640 swift sft --model MODEL --dataset data.jsonl

NAME is folder (default: the Trainer's output_dir), action (observe, mask, skip, abort, off), or a setting of
gradloc.Watch.
"""


def main(words: list[str]) -> int:
    """Replace this process by the command; returns an exit code if the command cannot be run."""
    settings: dict[str, Any] = {}
    words = list(words)
    while words and "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        *blocks, last = name.split(".")
        block = settings
        for each in blocks:
            block = block.setdefault(each, {})
        block[last] = _value(value)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if words else 2
    if shutil.which(words[0]) is None:
        or_folder = "; for a folder named run: gradloc ./run" if Path("run").is_dir() else ""
        why = f"there is no command {words[0]}; give the one that trains, as you call it{or_folder}"
        print(f"gradloc run: {why}", file=sys.stderr)
        return 2
    startup = str(Path(__file__).parent / "startup")
    path = os.pathsep.join([startup, *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.stdout.flush()
    os.execvpe(words[0], words, {**os.environ, "PYTHONPATH": path, SETTINGS: json.dumps(settings)})


def _value(text: str) -> Any:
    """Return an argument's value: JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def watch_each(trainer: type) -> None:
    """Give each Trainer of this class and its subclasses a callback, with the arguments in the environment."""
    make = trainer.__init__

    @wraps(make)
    def with_callback(self: Any, *args: Any, **given: Any) -> None:
        make(self, *args, **given)
        from .callback import TrainerCallback

        if not any(isinstance(each, TrainerCallback) for each in self.callback_handler.callbacks):
            self.add_callback(TrainerCallback(**json.loads(os.environ.get(SETTINGS, "{}"))))

    trainer.__init__ = with_callback

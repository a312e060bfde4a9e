# SPDX-License-Identifier: Apache-2.0
"""The one command: ``gradloc train.log`` reports, ``gradloc SUBCOMMAND ...`` does the rest.

``gradloc-report`` and ``gradloc-patch`` are its older names.
"""

import importlib
import sys

from .report import cli
from .report.commands import EXIT_CODES

OTHERS = {
    "run": ("gradloc.adapters.hf.run",),
    "replay": ("gradloc.replay.__main__",),
    "patch": ("gradloc.patchkit.apply", "patchkit.apply"),
}
"""Subcommands with a command line of their own: installed, and in a clone."""
HELP = f"""\
usage: gradloc FILE|FOLDER [OPTION ...]
       gradloc SUBCOMMAND [OPTION ...]

What spiked in a run, which tokens did it, why, and what to do.

  gradloc train.log                         report, the default for a path: any run's log, or its folder of events
  gradloc report runs/demo-1 -o page.html   the same by its name
  gradloc run llamafactory-cli train x.yaml a training command, with each transformers.Trainer in it watched
  gradloc watch runs/demo-1                 a run that is going on
  gradloc health train.log                  healthy, warning or danger, step by step
  gradloc check run.sh                      before a run: what is on, what is refused, how long a search may take
  gradloc compare a.log b.log               two runs side by side
  gradloc mismatch columns.csv              why rollout and trainer log-probs differ
  gradloc cure runs/demo-1                  which setting heals how many of a run's spikes
  gradloc trigger train.log --set cap=6     what the trigger would have flagged
  gradloc replay EVENT --model MODEL_PATH   an event again, on one machine (needs torch and transformers)
  gradloc patch --repo VERL                 the patch for verl 0.7

gradloc SUBCOMMAND --help says more of each, gradloc --version which this is; buckets and quartiles draw figures of
gradient analyses.

{EXIT_CODES}
check ends with 1 where the run would be refused, replay where the culprits differ; patch has codes of its own.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return cli.guarded(lambda: _run(words))


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="", file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    missing = ""
    for place in OTHERS.get(words[0], ()):
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            missing = error.name or place
            continue
        return module.main(words[1:]) or 0
    if missing:
        print(f"gradloc: {words[0]} needs {missing}, which is not installed: pip install {missing}", file=sys.stderr)
        return 2
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Count verl's example scripts that can enable GradLoc, and the reasons of the others.

    git clone https://github.com/verl-project/verl && git -C verl checkout COMMIT
    python scripts/verl_examples.py verl

Reads the settings of every PPO script under `examples/`, without comments. Standard library only.
"""

import argparse
import re
from collections import defaultdict
from pathlib import Path

SUFFIXES = {".sh", ".slurm"}
_SETS = r"(?:model_engine|strategy|config-name|CONFIG_NAME)[= ]['\"]?\S*"
_MEGATRON = rf"(?s)\A(?=.*{_SETS}megatron).*"
REASONS = {
    "multi-token prediction on Megatron (`mtp.enable`)": rf"{_MEGATRON}mtp\.enable=true",
    "Megatron-FSDP (`use_megatron_fsdp`)": rf"{_MEGATRON}use_megatron_fsdp=true",
    "the rollout's routes on Megatron (`router_replay`)": rf"{_MEGATRON}router_replay\.mode=r",
    "DeepEP's dispatcher on Megatron (`moe_token_dispatcher_type=flex`)": rf"{_MEGATRON}dispatcher_type=flex",
    "LoRA on Megatron": rf"{_MEGATRON}lora\.rank=[^0]",
    "VeOmni's engine": rf"{_SETS}veomni",
    "automodel's engine": rf"{_SETS}automodel",
    "an engine that verl itself does not bring (`fsdp_turbo`, `mlite`)": rf"{_SETS}fsdp_turbo|actor=mlite_actor",
    "distillation's losses on logits (`loss_mode=forward_kl_topk`)": r"distillation_loss\.loss_mode=forward_kl_topk",
}
"""Reason against GradLoc -> the setting of a script; the first match counts."""


def expanded(text: str) -> str:
    """Replace the script's variables by their defaults, the last one given."""
    given = re.findall(r"^\s*(?:export )?(\w+)=['\"]?(?:\$\{\w+:-)?([\w.-]+)", text, re.MULTILINE)
    defaults = dict(given)
    return re.sub(r"\$\{?(\w+)\}?", lambda name: defaults.get(name[1], name[0]), text)


def reason(text: str) -> str | None:
    """Return why a script's run would be refused, or None."""
    set_here = expanded("\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")))
    return next((name for name, asks in REASONS.items() if re.search(asks, set_here, re.IGNORECASE)), None)


def count(checkout: Path) -> dict[str | None, list[str]]:
    """Return reason -> PPO scripts under a checkout's `examples/`; None for those that can."""
    found = defaultdict(list)
    for path in sorted((checkout / "examples").rglob("*")):
        if path.suffix in SUFFIXES and "main_ppo" in (text := path.read_text(encoding="utf-8")):
            found[reason(text)].append(path.relative_to(checkout).as_posix())
    return dict(found)


def table(found: dict[str | None, list[str]]) -> str:
    """Return the table of docs/compatibility.md."""
    total, can = sum(map(len, found.values())), len(found.get(None, []))
    refused = sorted(((len(scripts), name) for name, scripts in found.items() if name), reverse=True)
    lines = [f"| of {total} scripts | |", "| ---: | --- |", f"| {can} | can switch it on |"]
    return "\n".join([*lines, *(f"| {number} | refused: {name} |" for number, name in refused)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Count verl's example scripts that can switch GradLoc on.")
    parser.add_argument("checkout", type=Path, help="a checkout of verl")
    parser.add_argument("--list", action="store_true", help="name each script, too")
    given = parser.parse_args()
    if not (given.checkout / "examples").is_dir():
        parser.error(f"{given.checkout} has no examples folder: name a checkout of verl")
    found = count(given.checkout)
    print(table(found))
    for name, scripts in found.items() if given.list else ():
        print(f"\n{name or 'can'}:", *scripts, sep="\n  ")


if __name__ == "__main__":
    main()

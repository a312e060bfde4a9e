#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make from the dataclasses of settings what repeats them: ``python scripts/make_settings.py``.

These are Hydra's files under gradloc/conf and gradloc/adapters/verl09/conf, and in docs/ each table below a comment
``made by python scripts/make_settings.py NAME``, whose sentences are the docstrings below the fields. The table
``refused`` is made from gradloc/adapters/verl_common/requirements.yaml.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gradloc.analysis.config import BucketSettings, QuartileSettings  # noqa: E402
from gradloc.config import PUBLISHED, GradLocConfig  # noqa: E402
from gradloc.health.config import HealthConfig  # noqa: E402
from gradloc.reweighting.config import AdvantageReweightingConfig, LoptiConfig  # noqa: E402
from gradloc.rollout_filter.config import FilterSettings  # noqa: E402
from lab.output import table  # noqa: E402
from scripts.make_schemas import descriptions  # noqa: E402

ACTOR = "actor_rollout_ref.actor"
GRADLOC = f"{ACTOR}.gradloc"
BLOCKS: dict[str, Any] = {
    GRADLOC: GradLocConfig,
    "algorithm.advantage_reweighting": AdvantageReweightingConfig,
    "algorithm.lopti": LoptiConfig,
    "trainer.health": HealthConfig,
}
"""GradLoc's own blocks of verl's config."""
SINGLE: tuple[Any, ...] = (FilterSettings, BucketSettings, QuartileSettings)
"""Settings among verl's own."""
DUMP_DIR = "${oc.select:trainer.default_local_dir,outputs}/gradloc"
"""The default of ``dump_dir`` in a run of verl."""

PRESETS = {
    "on": ("search spikes, change nothing", {f"{GRADLOC}.action.mode": "observe"}),
    "observe": ("search spikes, change nothing", {f"{GRADLOC}.action.mode": "observe"}),
    "mask": ("search spikes, take the step without the culprits", {f"{GRADLOC}.action.mode": "mask"}),
    "heal": (
        "search spikes, take the step under the setting that was measured to heal it",
        {f"{GRADLOC}.action.mode": "heal"},
    ),
    "skip": ("search spikes, take no step that spikes", {f"{GRADLOC}.action.mode": "skip"}),
    "safe": (
        "a cautious start. No healthy step changes (but see docs/stabilizers.md for the warm-up)",
        {
            f"{GRADLOC}.stabilize.token_clip.mode": "clamp",
            f"{GRADLOC}.stabilize.token_clip.upper": 5.0,
            f"{GRADLOC}.stabilize.layer_clip.rule": "zscore",
            "actor_rollout_ref.rollout.calculate_log_probs": True,
            "trainer.health.enable": True,
        },
    ),
}
"""Preset -> its purpose, and the settings that it sets in addition to ``gradloc.enable``."""
TARGETS = {
    ACTOR: "gradloc.adapters.verl09.config.actor_config",
    "actor_rollout_ref.rollout": "gradloc.adapters.verl09.config.GradLocRolloutConfig",
}
"""The blocks of verl 0.9's own that GradLoc's classes replace."""
FEATURES = {
    "spikes": "search",
    "critic": "critic",
    "stabilize": "stabilizers",
    "ratio_clips": "`token_clip`, `seq_clip`",
    "fine_layer_clip": "`layer_clip` finer than a layer",
    "filter": "rollout filter",
    "reweighting": "reweighting",
    "lopti": "Lopti",
    "analyses": "analyses",
    "updates": "search, stabilizers, Lopti, analyses",
}
"""Names of requirements.yaml, as the docs have them."""
REFUSED = ROOT / "gradloc/adapters/verl_common/requirements.yaml"


class Row(NamedTuple):
    """One setting."""

    key: str
    default: Any
    bound: str
    meaning: str


def rows_of(kind: Any, key: str = "") -> Iterator[Row]:
    """Yield the settings of a dataclass and of the blocks within."""
    meanings = descriptions(kind)
    for each in fields(kind):
        name = each.metadata.get("key") or f"{key}.{each.name}"
        if is_dataclass(each.default_factory):
            yield from rows_of(each.default_factory, name)
        else:
            allowed = each.metadata.get("allowed")
            default = DUMP_DIR if name == f"{GRADLOC}.dump_dir" else each.default
            yield Row(name, default, allowed.expected if allowed else "", meanings[each.name])


def all_rows() -> list[Row]:
    """Return every setting."""
    aliases = [
        Row(f"{ACTOR}.{name}", None, each.expected, f"``gradloc.{alias}``") for name, (alias, each) in PUBLISHED.items()
    ]
    return [
        *aliases,
        *(row for key, kind in BLOCKS.items() for row in rows_of(kind, key)),
        *(row for kind in SINGLE for row in rows_of(kind)),
    ]


# ---- Hydra's files


class _Dumper(yaml.SafeDumper):
    """Writes a list in one line."""


_Dumper.add_representer(tuple, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, True))
_Dumper.add_representer(list, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value))


def _tree(settings: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *blocks, name = key.split(".")
        inner = tree
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner[name] = value
    return tree


def _yaml(comment: str, settings: dict[str, Any], defaults: Iterable[str] = ()) -> str:
    made = "Made by python scripts/make_settings.py."
    parts: list[Any] = [{"defaults": [*defaults]}] if defaults else []
    parts += [_tree(settings)] if settings else []
    body = "\n".join(yaml.dump(part, Dumper=_Dumper, sort_keys=False, width=120) for part in parts)
    return f"# @package _global_\n# SPDX-License-Identifier: Apache-2.0\n# {comment} {made}\n{body}"


def _targets() -> dict[str, str]:
    def within(key: str, kind: Any) -> Iterator[tuple[str, str]]:
        yield key, f"{kind.__module__}.{kind.__name__}"
        for each in fields(kind):
            if is_dataclass(each.default_factory):
                yield from within(f"{key}.{each.name}", each.default_factory)

    ours = (pair for key, kind in BLOCKS.items() if key != "trainer.health" for pair in within(key, kind))
    return {f"{key}._target_": target for key, target in [*TARGETS.items(), *ours]}


def hydra_files() -> dict[Path, str]:
    """Return the text of each file that Hydra reads."""
    conf, preset = ROOT / "gradloc/conf", ("/gradloc_defaults", "_self_")
    made = {
        conf / "gradloc_settings/all.yaml": _yaml(
            "All of GradLoc's settings at their defaults; docs/configuration.md explains each.",
            {row.key: row.default for row in all_rows()},
        ),
        ROOT / "gradloc/adapters/verl09/conf/gradloc_defaults.yaml": _yaml(
            "The dataclasses of GradLoc's settings on verl 0.9.", _targets(), ("/gradloc_settings/all", "_self_")
        ),
        conf / "gradloc/off.yaml": _yaml(
            "+gradloc=off: search nothing; brings the keys, for health, Lopti or an analysis alone.", {}, preset[:1]
        ),
    }
    for name, (purpose, settings) in PRESETS.items():
        on = {f"{GRADLOC}.enable": True, **settings}
        made[conf / f"gradloc/{name}.yaml"] = _yaml(f"+gradloc={name}: {purpose}.", on, preset)
    return made


# ---- the tables of the docs


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _markdown(text: str) -> str:
    return re.sub(r"\bnull\b(?!`)", "`null`", text.replace("``", "`")).removesuffix(".").replace("|", "\\|")


def _settings_table(prefix: str, rows: Iterable[Row]) -> str:
    def default(row: Row) -> str:
        return "<trainer.default_local_dir>/gradloc" if row.default == DUMP_DIR else _shown(row.default)

    cells = [
        (f"`{row.key.removeprefix(prefix)}`", f"`{default(row)}`", _markdown(row.bound), _markdown(row.meaning))
        for row in rows
    ]
    return table([("key", "default", "may be", "meaning"), *cells])


def _refused() -> str:
    def when(where: dict[str, str]) -> Iterator[str]:
        for verl, names in where.items():
            version = {"all": "", "megatron": "0.9, Megatron: "}.get(verl, f"{verl}: ")
            yield version + ", ".join(FEATURES[name] for name in names.split())

    cells = []
    for row in yaml.safe_load(REFUSED.read_text(encoding="utf-8")):
        wanted = row.get("keys", {row.get("key"): row.get("said", row.get("is"))})
        only = f", if `{row['only with'].removeprefix('actor_rollout_ref.')}`" if "only with" in row else ""
        said = [f"`{key.removeprefix('actor_rollout_ref.')}`: {_shown(value)}" for key, value in wanted.items()]
        cells.append(("<br>".join(said) + only, "; ".join(when(row["where"])), row["because"]))
    return table([("setting, and what it must be", "for what", "because"), *cells])


def tables() -> dict[str, str]:
    """Return the tables of the docs, by name."""
    rows, made = all_rows(), {"refused": _refused()}
    names = rows[: len(PUBLISHED)]
    cells = [(f"`{row.key.removeprefix(f'{ACTOR}.')}`", "`null`", _markdown(row.meaning)) for row in names]
    made["published"] = table([("key", "default", "another name of"), *cells])
    own = [row for row in rows if row.key.startswith(f"{GRADLOC}.")]
    blocks = dict.fromkeys(row.key.removeprefix(f"{GRADLOC}.").rpartition(".")[0].partition(".")[0] for row in own)
    for block in blocks:
        prefix = f"{GRADLOC}.{block}." if block else f"{GRADLOC}."
        inside = [
            row for row in own if row.key.startswith(prefix) and (block or "." not in row.key.removeprefix(prefix))
        ]
        made[f"gradloc.{block}".rstrip(".")] = _settings_table(f"{ACTOR}.", inside)
    made["algorithm"] = _settings_table("", (row for row in rows if row.key.startswith("algorithm.")))
    general = [row for row in rows if row.key.startswith("trainer.health.") and row.bound]
    made["health"] = _settings_table("trainer.health.", general)
    made["quartiles"] = _settings_table("", rows_of(QuartileSettings))
    made["buckets"] = _settings_table("", [*rows_of(BucketSettings), *rows_of(FilterSettings)])
    return made


_BEGIN = "<!-- made by python scripts/make_settings.py {} -->"
_PLACE = re.compile(rf"({re.escape(_BEGIN).replace(re.escape('{}'), '([a-z.]+)')}\n).*?(?=^<!-- end -->$)", re.S | re.M)


def pages() -> dict[Path, str]:
    """Return the docs with their tables made anew."""
    made, found = tables(), {}
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if _PLACE.search(text):
            found[page] = _PLACE.sub(lambda place: f"{place[1]}\n{made[place[2]]}\n\n", text)
    return found


def main() -> None:
    """Write the files."""
    for path, text in {**hydra_files(), **pages()}.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

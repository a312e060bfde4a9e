# SPDX-License-Identifier: Apache-2.0
"""What docs/mismatch.md says of the held-out batches is what was recorded, and is good enough."""

import json
from pathlib import Path

from gradloc.mismatch import KINDS
from gradloc.mismatch.verdict import SMALL_KL
from lab.benchmarks.mismatch.__main__ import kinds_table, markdown, outcome

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "lab" / "benchmarks" / "results"
RECORD = json.loads((RESULTS / "mismatch.json").read_text("utf-8"))
PAGE = (ROOT / "docs" / "mismatch.md").read_text("utf-8")


def test_the_page_has_the_recorded_table():
    assert markdown(RECORD) in PAGE
    counts = outcome(RECORD["pairs"])
    assert counts == RECORD["outcome_of_pairs"]
    said = (
        f'{counts["two"]} are named as the two, {counts["cannot tell"]} "cannot tell". {counts["one of the two"]} are'
    )
    assert said in PAGE and f"and {counts['another']} otherwise" in PAGE
    small = outcome(json.loads((RESULTS / "mismatch-small.json").read_text("utf-8"))["pairs"])
    assert f"of pairs {small['one of the two']} are named as one" in PAGE
    assert counts["two"] + counts["cannot tell"] >= 0.95 * sum(counts.values())


def test_nine_kinds_are_named_right_and_clean_batches_are_noise():
    shares = {kind: names.get(kind, 0) / sum(names.values()) for kind, names in RECORD["kinds"].items()}
    assert shares.keys() == KINDS.keys()
    assert sum(share >= 0.95 for share in shares.values()) >= 9
    for found in RECORD["clean"].values():
        named = [name for names in found.values() for name, count in names.items() for _ in range(count)]
        assert len(named) == 500 and named.count("noise") >= 495


def test_the_page_has_the_kinds_as_the_package_tells_them():
    assert kinds_table() in PAGE
    assert f"Above a KL of {SMALL_KL} a token" in PAGE

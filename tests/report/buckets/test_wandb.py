# SPDX-License-Identifier: Apache-2.0
"""Reading from Weights & Biases, with a stand-in for its API."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradloc.report.errors import ReportError
from gradloc.report.runs.buckets import read_wandb
from tests.report.buckets.builder import DEVIATIONS, metrics

PATH = "team/project/abc123"


class Api:
    """``wandb.Api()`` over rows kept in memory; tables are files, as W&B keeps them."""

    def __init__(self, rows, has_tables=True):
        self.rows = rows
        self.has_tables = has_tables

    def run(self, path):
        assert path == PATH
        return SimpleNamespace(name="my run", id="abc123", scan_history=lambda: iter(self.rows), file=self.file)

    def file(self, path):
        return SimpleNamespace(download=lambda root, replace: self.download(path, root))

    def download(self, path, root):
        if not self.has_tables:
            raise OSError("gone")
        bucket = Path(path).stem
        data = [[bucket, 3, deviation] for deviation in DEVIATIONS[bucket]]
        file = Path(root) / "table.json"
        file.write_text(json.dumps({"columns": ["bucket", "group_id", "reward_std"], "data": data}))
        return SimpleNamespace(name=str(file))


def row(step):
    tables = {
        f"grad_norm/{bucket}/group_rv_table": {"_type": "table-file", "path": f"media/{bucket}.json"}
        for bucket in DEVIATIONS
    }
    return {"_step": step, "training/global_step": step, "actor/lr": None, **metrics(), **tables}


def test_analyses_and_tables_are_read_through_the_api():
    rows = [row(1), {"_step": 2, "actor/grad_norm": 1.0}, row(51)]
    analyses, notes, name = read_wandb(PATH, api=Api(rows))
    assert list(analyses) == [1, 51] and name == "my-run_abc123" and not notes
    assert analyses[1].buckets == ["bucket_1", "bucket_2", "bucket_10"]
    assert analyses[51].table == [(b, d) for b, ds in DEVIATIONS.items() for d in ds]
    analyses, _, _ = read_wandb(PATH, steps=[51], api=Api(rows))
    assert analyses[1].table == [] and len(analyses[51].table) == 6, "fetched only for the step that was asked for"


def test_a_missing_table_is_a_note_and_not_the_end():
    analyses, notes, _ = read_wandb(PATH, api=Api([row(1)], has_tables=False))
    assert analyses[1].table == []
    assert notes == ["step 1: its group_rv_table cannot be had (gone); mean and range are drawn."]
    plain = {"_step": 1, **metrics()}
    assert read_wandb(PATH, api=Api([plain]))[1] == ["step 1: it has no group_rv_table; mean and range are drawn."]


@pytest.mark.parametrize(
    ("api", "said"),
    [
        (Api([{"_step": 1, "actor/grad_norm": 1.0}]), "has no grad_norm/bucket_"),
        (Api(None), "no run team/project/abc123 .* object is not iterable"),
    ],
)
def test_a_run_without_analyses_and_one_that_cannot_be_read_are_refused(api, said):
    with pytest.raises(ReportError, match=said):
        read_wandb(PATH, api=api)


def test_a_user_who_has_not_logged_in_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Api=lambda: 1 / 0))
    with pytest.raises(ReportError, match="no run team/project/abc123 that can be read here: division by zero"):
        read_wandb(PATH)


def test_the_package_is_asked_for_only_when_it_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ReportError, match="pip install wandb, or name the run's folder"):
        read_wandb(PATH)

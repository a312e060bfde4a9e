# SPDX-License-Identifier: Apache-2.0
"""What people name besides a log: an archive of one, a page of a tracker, a form of their own; and what they write."""

import gzip
import sys
import tarfile

import pytest

from tests.report.builder import REPO
from tests.report.hostile import tar_of, zip_of
from tests.report.logs.made import CONSOLE, NORMS, ROWS

LOG = "\n".join(CONSOLE) + "\n"


def archived(path, name="logs/train.log"):
    """An archive with the log in it, under this name."""
    content = LOG.encode()
    made = zip_of({name: content}) if path.suffix == ".zip" else tar_of([(name, tarfile.REGTYPE, content)])
    path.write_bytes(gzip.compress(made) if path.suffix == ".gz" else made)
    return path


@pytest.mark.parametrize("ending", ["zip", "tar.gz", "tar"])
def test_an_archives_log_is_read(ending, tmp_path, shown):
    said = shown(archived(tmp_path / f"run.{ending}"))
    assert f"run.{ending}, logs/train.log (verl's console log)" in said and "Step 73: gradient norm 903" in said


def sheet(path):
    """A parquet file or a spreadsheet with the run in it; the spreadsheet has a sheet of remarks, too."""
    import pandas

    if path.suffix == ".parquet":
        pandas.DataFrame(ROWS).to_parquet(path)
        return path
    with pandas.ExcelWriter(path) as book:
        pandas.DataFrame({"remark": ["mine"]}).to_excel(book, sheet_name="remarks", index=False)
        pandas.DataFrame(ROWS).to_excel(book, sheet_name="run", index=False)
    return path


@pytest.mark.parametrize(("ending", "package"), [("parquet", "pyarrow.parquet"), ("xlsx", "openpyxl")])
def test_a_table_that_is_no_text_is_read_or_says_what_it_needs(ending, package, tmp_path, shown, refused, monkeypatch):
    path = sheet(tmp_path / f"run.{ending}")
    assert "Step 73: gradient norm 903" in shown(path) and "Step 73" in shown(tmp_path)
    path.rename(tmp_path / "renamed")
    assert "120 of 120 rows read" in shown(tmp_path / "renamed")
    monkeypatch.setitem(sys.modules, package, None)
    assert f"pip install {package.partition('.')[0]}" in refused(tmp_path / "renamed")


OWN = "\n".join(f"<{step}> gn~{norm:.4f}; r~0.5;" for step, norm in NORMS.items())


def test_a_pattern_reads_a_form_of_ones_own(tmp_path, shown):
    (tmp_path / "own.txt").write_text(OWN)
    said = shown(tmp_path / "own.txt", "--pattern", r"<(?P<step>\d+)> gn~(?P<value>\S+) r~(?P<reward>\S+)")
    assert "Step 73: gradient norm 903" in said and "120 of 120 lines" in said and "2 metrics" in said
    assert "Row 73: gradient norm 903" in shown(tmp_path / "own.txt", "--pattern", r"gn~(?P<value>\S+)")
    own = str(tmp_path / "own.txt")
    for command in (["trigger", own], ["health", own], ["compare", own, own], ["watch", own, "--once"]):
        assert shown(*command, "--pattern", r"<(?P<step>\d+)> gn~(?P<value>\S+) r~(?P<reward>\S+)")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("a.tar", "cannot be unpacked"),
        (f"{REPO}/examples/report.html", "is a page that gradloc wrote"),
        ("https://wandb.ai/me/grpo/runs/ab12?nw=x", "scan_history()]' me/grpo/ab12 > run.jsonl"),
        ("https://mlflow.corp/#/experiments/1", "mlruns/"),
        ("https://example.com/a.log", "Save the file first"),
        ("own.txt --pattern gn~(?P<value>", "no regular expression"),
        ("own.txt --pattern gn~(.*)", "no group for the norm"),
        ("own.txt --pattern x(?P<value>y)", "no number"),
        *((f"train.log -o x.{kind}", "would hold HTML") for kind in ("pdf", "png", "csv")),
    ],
)
def test_what_cannot_be_read_or_written_is_refused(words, said, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    archived(tmp_path / "a.tar", "../evil.log")
    (tmp_path / "own.txt").write_text(OWN)
    (tmp_path / "train.log").write_text(LOG)
    assert said in refused(*words.split()) and not list(tmp_path.glob("x.*"))

# SPDX-License-Identifier: Apache-2.0
"""The command line: what it writes, what it refuses, and that it finds bad rows."""

import pytest

parquet = pytest.importorskip("pyarrow.parquet")

import pyarrow  # noqa: E402

from lab.experiments.kk import generate  # noqa: E402


def run(capsys, *args):
    code = generate.main([str(arg) for arg in args])
    return code, capsys.readouterr()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kk") / "data"
    arguments = ["--people", "2", "3", "--train", "8", "--test", "3", "--out", str(folder)]
    assert generate.main(arguments) == 0
    return folder


def rows_of(path):
    return parquet.read_table(path).to_pylist()


def test_it_writes_training_and_test_files_that_share_no_puzzle(data):
    parts = {path.name: rows_of(path) for path in data.iterdir()}
    assert {name: len(rows) for name, rows in parts.items()} == {
        "train.parquet": 16,
        "test-2ppl.parquet": 3,
        "test-3ppl.parquet": 3,
    }
    questions = [row["prompt"][1]["content"] for rows in parts.values() for row in rows]
    assert len(set(questions)) == len(questions)


def test_the_same_seed_writes_the_same_files_and_says_which(capsys, data, tmp_path):
    code, said = run(capsys, "--people", 2, 3, "--train", 8, "--test", 3, "--out", tmp_path / "again")
    assert code == 0 and "test-3ppl.parquet: 3 puzzles" in said.out
    for path in data.iterdir():
        assert rows_of(path) == rows_of(tmp_path / "again" / path.name)


def test_a_good_file_passes_the_check(capsys, data):
    code, said = run(capsys, "--check", data / "train.parquet")
    assert code == 0 and "16 puzzles, each with exactly one solution" in said.out


def swapped(text):
    return text.replace("knight", "?").replace("knave", "knight").replace("?", "knave")


@pytest.mark.parametrize(
    ("key", "damage", "said"),
    [
        ("statements", lambda _: "(('telling-truth', 1), ('telling-truth', 0))", "has more than one solution"),
        ("statements", lambda _: "(('lying', 0), ('lying', 0))", "has no solution"),
        ("statements", lambda _: "hm", "is not a tuple of statements"),
        ("solution_text_format", swapped, "its solution is not the one that its statements have"),
    ],
    ids=["ambiguous", "paradox", "garbled", "mislabelled"],
)
def test_a_row_without_the_unique_solution_that_it_states_is_refused(capsys, data, tmp_path, key, damage, said):
    rows = rows_of(data / "test-2ppl.parquet")
    truth = rows[1]["reward_model"]["ground_truth"]
    truth[key] = damage(truth[key])
    path = tmp_path / "bad.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    code, output = run(capsys, "--check", path)
    assert code == 1
    assert output.err.startswith(f"generate: 1 of the 3 rows of {path} cannot be trained on: row 1")
    assert said in output.err and "Traceback" not in output.err


def test_another_data_sets_file_is_refused_row_by_row_but_briefly(capsys, tmp_path):
    path = tmp_path / "math.parquet"
    rows = [{"reward_model": {"style": "rule", "ground_truth": "4"}}] * 20
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    code, output = run(capsys, "--check", path)
    assert code == 1
    assert "20 of the 20 rows" in output.err and "and 15 more" in output.err


@pytest.mark.parametrize(
    "args, said",
    [
        ([], "--people and --out are needed"),
        (["--people", 8, "--out", "x"], "invalid choice: 8"),
        (["--people", 3, "--train", 0, "--out", "x"], "--train is at least 1"),
        (["--people", 3, "--test", -1, "--out", "x"], "--test at least 0"),
    ],
)
def test_a_wrong_call_is_refused(capsys, tmp_path, monkeypatch, args, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        run(capsys, *args)
    assert said in capsys.readouterr().err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "args, said",
    [
        (["--check", "absent.parquet"], "absent.parquet is not a file"),
        (["--check", __file__], "cannot be read as parquet"),
        (["--people", 2, "--train", 2, "--out", "file/data"], "can be written to"),
    ],
)
def test_what_cannot_be_read_or_written_is_one_sentence(capsys, tmp_path, monkeypatch, args, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    code, output = run(capsys, *args)
    assert code == 1 and len(output.err.splitlines()) == 1
    assert output.err.startswith("generate: ") and said in output.err


def test_an_existing_file_is_not_written_over(capsys, data):
    code, output = run(capsys, "--people", 2, "--train", 2, "--out", data)
    assert code == 1 and "exists: name another folder" in output.err

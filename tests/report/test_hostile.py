# SPDX-License-Identifier: Apache-2.0
"""What a stranger's file may ask for: an answer or a sentence in a second or two; nothing outside of the run."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradloc.explain.text import printable
from gradloc.record.files import parse_json, read_bytes, write_whole
from gradloc.report.pages import page
from gradloc.report.runs.run import read_run
from tests.report import hostile
from tests.report.builder import REPO

pytestmark = pytest.mark.full  # each is a process of its own

QUICK = """
deep.jsonl deep.json deep900.jsonl opened.log minus.log escapes.log exponents.jsonl many.zip slip.zip long.zip
escape.zip slip.tar links.tar escape.tar cut.log.gz view.db computed.db bytes.db settings.db parts.wandb
length.tfevents.1 cut.parquet far.xlsx lol.xlsx linked pipes equal nested words outside numbers one-name linked-
parts large-metric names-of-few.jsonl digit-keys.json folder-of-5000.log sparse.tar empty-parts.log.gz
nested.xlsx nested-in-2-mb.jsonl series-in-2-mb.json long-names.csv long-head.csv tags.ipynb computed-unseen.db
view-behind-others.db nested-in-1-mb.db name.log.gz fixed.parquet lists.parquet window.log.xz lzma.zip
""".split()
ALL = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full, pytest.mark.slow])
    for name in [*hostile.FILES, *hostile.RUNS]
]


@pytest.fixture(scope="module")
def server():
    command = [sys.executable, "-m", hostile.__name__]
    given = {"cwd": REPO, "text": True, "env": os.environ | {"COLUMNS": "200"}}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **given) as process:
        yield process
        process.stdin.close()


@pytest.mark.parametrize("name", ALL)
def test_a_hostile_file_costs_ten_seconds_and_500_mb_at_most(server, name):
    print(name, file=server.stdin, flush=True)
    found = json.loads(server.stdout.readline())
    code, said, wrong = found["code"], found["said"], found["wrong"].rstrip()
    assert code in (0, 2) and found["seconds"] < 10 and found["peak_kb"] < 500e3, found
    assert said or wrong.startswith("gradloc: ") and wrong.count("\n") == 0, wrong
    assert len(said) + len(wrong) < 50_000, "an answer is short, however long the names are"
    assert printable(said) == said and printable(wrong) == wrong and "root:" not in said + wrong
    assert not Path("/tmp/PWN").exists() and found["left"] == [name]


@pytest.mark.parametrize("name", [name for name in hostile.STORES if name.startswith(("view", "computed"))])
def test_no_view_and_no_computed_column_is_run(name, tmp_path, refused):
    assert "views or computed columns in place of tables: none is run" in refused(hostile.make(name, tmp_path))


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("words", ["report", "--list"]),
        ("words", ["report"]),
        ("words", ["report", "--event", "\x1b]0;x\x07none"]),
        ("words", ["watch", "--once"]),
        ("words", ["report", "--format", "md"]),
        ("escape.tar", ["report"]),
        ("escape.tar", ["watch", "--once"]),
        ("escape.zip", ["health"]),
        ("bytes.db", ["health"]),
        ("bytes.db", ["trigger"]),
    ],
)
def test_no_escape_reaches_a_terminal(name, command, tmp_path, capsys):
    from gradloc.command import main

    path = hostile.make(name, tmp_path)
    main([command[0], str(path), *command[1:]])
    said = "".join(capsys.readouterr())
    assert said and printable(said) == said


def test_no_control_or_bidi_character_is_in_a_page(tmp_path):
    run = read_run(hostile.make("words", tmp_path))
    run.notes.append("a\x1b[2J\u202eb\ud800")
    made = page.render(run)
    assert printable(made) == made and "⟨U+202E⟩" in made


def test_what_a_link_leads_to_outside_of_a_run_is_not_read(tmp_path):
    (secret := tmp_path / "secret.log").write_text("step:1 - actor/grad_norm:1\n" * 40)
    (run := tmp_path / "run").mkdir()
    (run / "train.log").symlink_to(secret)
    done = _gradloc(run)
    assert done.returncode == 2 and "train.log leads out of it, and is not followed" in done.stderr
    (run / "inside.txt").write_text("".join(f"step:{at} - actor/grad_norm:1\n" for at in range(40)))
    (run / "train.log").unlink()
    (run / "train.log").symlink_to(run / "inside.txt")
    assert _gradloc(run).returncode == 0
    with pytest.raises(OSError, match="leads out"):
        read_bytes(tmp_path / "run" / ".." / "secret.log", run)


def _gradloc(*words, **options):
    command = [sys.executable, "-m", "gradloc.command", *words]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, **options)


def test_an_output_goes_through_no_link_and_keeps_the_mode_that_was_there(tmp_path):
    (tmp_path / "a.log").write_text("".join(f"step:{at} - actor/grad_norm:1.{at}\n" for at in range(40)))
    (kept := tmp_path / "kept").write_text("mine")
    (tmp_path / "page.html").symlink_to(kept)
    done = _gradloc(tmp_path / "a.log", "-o", tmp_path / "page.html")
    assert done.returncode == 2 and f"name {kept} itself" in done.stderr and kept.read_text() == "mine"
    kept.chmod(0o600)
    write_whole(kept, "yours")
    assert kept.stat().st_mode & 0o777 == 0o600 and kept.read_text() == "yours"
    with pytest.raises(OSError, match="through one"):
        write_whole(tmp_path / "page.html", "x")
    done = _gradloc(tmp_path / "a.log", "-o", "/dev/stdout")
    assert done.returncode == 0 and done.stdout.startswith("<!DOCTYPE html>")


def test_a_disk_that_is_full_leaves_the_old_file_and_nothing_of_the_new_one(tmp_path):
    (tmp_path / "a.log").write_text("".join(f"step:{at} - actor/grad_norm:1.{at}\n" for at in range(40)))
    (tmp_path / "page.html").write_text("old")
    full = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))  # noqa: E731
    done = _gradloc(tmp_path / "a.log", "-o", tmp_path / "page.html", preexec_fn=full)
    assert done.returncode == 2 and "File too large" in done.stderr
    assert (tmp_path / "page.html").read_text() == "old" and len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize("what", ["fd", "named"])
def test_a_pipe_is_read(what, tmp_path):
    (tmp_path / "a.log").write_text("".join(f"step:{at} - actor/grad_norm:1.{at}\n" for at in range(40)))
    if what == "named":
        os.mkfifo(tmp_path / "pipe")
        line = f"cat {tmp_path}/a.log > {tmp_path}/pipe & {sys.executable} -m gradloc.command {tmp_path}/pipe"
    else:
        line = f"{sys.executable} -m gradloc.command <(cat {tmp_path}/a.log)"
    done = subprocess.run(["bash", "-c", line], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0 and "1 metric, 40 rows" in done.stdout and "Next:" not in done.stdout


ENDLESS = {"log": "step:{} - actor/grad_norm:1.5\n", "json": '{{"step": {}, "grad_norm": 1.5}}\n'}


@pytest.mark.parametrize("kind", [*ENDLESS, "database"])
def test_ctrl_c_ends_a_command_within_a_second(kind, tmp_path):
    path = tmp_path / "a"
    if kind == "database":
        path.write_bytes(hostile._database(hostile._TRACKIO, rows=[(at, "r", "r", at, "{}") for at in range(300_000)]))
    else:
        path.write_text("".join(ENDLESS[kind].format(at) for at in range(400_000)))
    began = "import sys; from gradloc.command import main; print(flush=True); sys.exit(main(sys.argv[1:]))"
    command = subprocess.Popen([sys.executable, "-c", began, path], cwd=REPO, stdout=-1, stderr=-1)
    command.stdout.readline()
    time.sleep(0.5)
    before = _cpu_seconds(command.pid)
    command.send_signal(signal.SIGINT)
    _, status, used = os.wait4(command.pid, 0)
    command.returncode = os.waitstatus_to_exitcode(status)
    assert command.returncode == 130 and used.ru_utime + used.ru_stime - before < 1.0


def test_ctrl_c_inside_of_a_query_is_no_damaged_file(tmp_path, monkeypatch, capsys):
    from gradloc.command import main
    from gradloc.report.logs.stores import _Clock

    rows = [(at, "r", "r", at, '{"grad_norm": 1}') for at in range(50_000)]
    (tmp_path / "a.db").write_bytes(hostile._database(hostile._TRACKIO, rows=rows))
    monkeypatch.setattr(_Clock, "tick", lambda _: signal.raise_signal(signal.SIGINT))  # SQLite swallows what it raises
    assert main([str(tmp_path / "a.db")]) == 130 and capsys.readouterr().err == "Stopped.\n"


def _cpu_seconds(pid: int) -> float:
    spent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, spent)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 70 + "]" * 70, "[]," * 1_100_000, '{"a":' * 66 + "1" + "}" * 66])
def test_json_beyond_a_limit_is_a_value_error(text):
    with pytest.raises(ValueError):
        parse_json(text)
    with pytest.raises(ValueError):
        parse_json(text.encode())
    assert parse_json("[" * 60 + "]" * 60)

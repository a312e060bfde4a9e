# SPDX-License-Identifier: Apache-2.0
"""An event is told at once and shortly; alerts are rare, keep secrets, and never hold anybody up."""

import json
import logging
import shlex
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from gradloc.notify import notifier as teller_module
from gradloc.notify import trackers
from gradloc.notify.background import Background
from gradloc.notify.config import NotifyConfig
from gradloc.notify.lines import COLUMNS, announcement, opening_command, table_rows
from gradloc.notify.notifier import Notifier
from gradloc.record import Event
from gradloc.record.reading import read
from gradloc.record.store import EventStore
from tests.explain import event
from tests.report.builder import HOSTILE, REPO, UNTRUSTED, make_culprit

# ---- the line and the command


def test_the_line_is_the_headline_and_names_token_rank_share_both_norms_and_the_action():
    said = 'One token made the step-5 spike: " is" (rank 1) carries 75%, norm 748 (0.77 without it); step taken'
    assert announcement(event()) == said


def test_a_row_has_the_share_s_error_and_no_share_that_is_not_trusted():
    def row(**changes) -> dict:
        culprit = make_culprit(is_exact=False, share_error=0.004)
        return dict(zip(COLUMNS, *table_rows([event(culprits=[culprit], **changes)]), strict=True))

    assert (row()["share"], row()["share_error"]) == (0.75, 0.004)
    assert (row(shares=UNTRUSTED)["share"], row(shares=UNTRUSTED)["share_error"]) == (None, None)


def test_a_hostile_token_stays_on_the_line_and_in_its_row():
    for found in (event(culprits=[make_culprit(token=token)]) for token in HOSTILE):
        assert announcement(found).isprintable() and table_rows([found])[0][2].isprintable()


def test_the_command_opens_the_event_as_it_is_printed(tmp_path, capsys):
    root = tmp_path / "a run's folder"
    found = event()
    EventStore(str(root)).append(found)
    Notifier(NotifyConfig(), root).announce([(found, "")], 5)
    command = capsys.readouterr().out.splitlines()[1].removeprefix("gradloc: ")
    assert command == opening_command(found, root) and str(root) in shlex.split(command)
    arguments = [sys.executable, "-m", "gradloc.report", *shlex.split(command)[1:]]
    shown = subprocess.run(arguments, cwd=REPO, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert found.event_id in shown.stdout


# ---- trackers, as far as the notifier knows them; test_trackers.py has the real ones


def test_one_tracker_that_raises_is_one_line_and_the_others_are_told(tmp_path, capsys, caplog):
    class Full:
        def log(self, data, step):
            raise OSError(28, "No space left on device")

    class Kept:
        told: list = []

        def log(self, data, step):
            self.told.append((json.dumps(data), step))

    notifier = Notifier(NotifyConfig(), tmp_path)
    notifier.trackers = {"tensorboard": object(), "file": Full(), "rl_insight": object()}
    notifier.announce([(event(), "")], 5)
    notifier.trackers = {"file": Kept()}
    notifier.announce([(event(), "")], 6)
    lines = [record.getMessage() for record in caplog.records]
    told = [line.partition("(")[0] for line in lines]
    assert told == [f"gradloc: notifying {name} failed " for name in ("tensorboard", "file")]
    assert "No space left on device" in lines[1] and not caplog.records[1].exc_info
    ((data, step),) = Kept.told
    assert step == 6 and "One token made the step-5 spike." in data
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.parametrize("keeps_text", [True, False])
def test_without_text_a_verdict_has_the_token_s_number_and_w_and_b_gets_no_file(keeps_text, tmp_path, capsys):
    text = {} if keeps_text else dict.fromkeys(("tokens", "text_before", "text_after", "prompt"))
    found, jobs = event(culprits=[make_culprit(**{"tokens": (" zebra",)} | text)]), []
    client = SimpleNamespace(run=object(), Html=str, Table=lambda head, rows: rows)
    client.log = lambda sent, step: jobs.append(str(sent))
    notifier = Notifier(NotifyConfig(), tmp_path, keeps_text=keeps_text)
    notifier._slow_trackers = SimpleNamespace(submit=lambda what, job: jobs.append(what))
    notifier.trackers = {"wandb": client}
    notifier.announce([(found, "")], 5)
    *uploads, sent = jobs
    assert uploads == ["the upload to wandb"] * keeps_text
    assert all(
        ("zebra" in said, "<1003>" in said) == (keeps_text, not keeps_text) for said in (sent, capsys.readouterr().out)
    )


# ---- alerts


@pytest.fixture
def server(monkeypatch):
    """A webhook on this machine, at ``env:HOOK``: keeps what it is sent; answers by path, not at all on /hang."""
    received, release = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, json.loads(body)))
            if "hang" in self.path:
                release.wait(20)
            code = 500 if "broken" in self.path else 302 if "moved" in self.path else 200
            self.send_response(code)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *args):
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    found.received, found.url = received, f"http://127.0.0.1:{found.server_port}"
    monkeypatch.setenv("HOOK", found.url)
    yield found
    release.set()
    found.shutdown()
    found.server_close()


def hooked(tmp_path, **settings):
    return Notifier(NotifyConfig(webhook="env:HOOK", **settings), tmp_path)


def tell(tmp_path, *events, **settings):
    notifier = Notifier(NotifyConfig(**settings), tmp_path)
    notifier.announce([(one, "") for one in events or [event()]], 5)
    notifier.finish()


@pytest.mark.parametrize("place", ["env:HOOK", "file:{}/hook"])
def test_the_webhook_gets_a_short_message(tmp_path, server, monkeypatch, place):
    monkeypatch.setenv("HOOK", f"{server.url}/T0/secret\n")
    (tmp_path / "hook").write_text(f"{server.url}/T0/secret\n")
    tell(tmp_path, event(), event(), webhook=place.format(tmp_path))
    ((path, message),) = server.received
    assert path == "/T0/secret"
    assert message["text"] == message["content"]
    assert announcement(event()) in message["text"] and "(and 1 more since the last alert)" in message["text"]
    assert message["path"].startswith(str(tmp_path)) and message["global_step"] == 5


def test_after_an_alert_that_failed_the_next_event_is_told_at_once(tmp_path, server, monkeypatch):
    monkeypatch.setenv("HOOK", f"{server.url}/broken")
    notifier = hooked(tmp_path)
    notifier.announce([(event(), "")], 5)
    notifier.finish()
    monkeypatch.setenv("HOOK", f"{server.url}/whole")
    notifier.announce([(event(), "")], 6)
    notifier._alerts.finish()
    assert server.received[-1][0] == "/whole"


def test_an_event_that_could_not_be_written_is_told_all_the_same_and_why(tmp_path, server, capsys):
    notifier = hooked(tmp_path)
    notifier.announce([(event(), "OSError: [Errno 28] No space left on device")], 5)
    notifier.finish()
    first, second = capsys.readouterr().out.splitlines()
    why = f"this event could not be written to {tmp_path}: OSError: [Errno 28] No space left on device"
    assert (first, second) == (f"gradloc: {announcement(event())}", f"gradloc: {why}")
    ((_, message),) = server.received
    assert message["text"].endswith(f"{announcement(event())}; {why}") and message["path"] is None


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("{}/broken/secret", "it answered 500"),
        ("{}/moved/secret", "it answered 302"),
        ("{}/hang/secret", "ReadTimeout"),
        ("http://127.0.0.1:9/secret", "ConnectionError"),
        ("secret-and-no-url", "MissingSchema"),
        (None, "the environment variable HOOK is not set"),
    ],
)
def test_a_webhook_that_fails_is_one_line_without_its_url(tmp_path, server, monkeypatch, caplog, capfd, url, words):
    caplog.set_level(logging.DEBUG)  # as chatty as it gets
    monkeypatch.delenv("HOOK", raising=False)
    if url is not None:
        monkeypatch.setenv("HOOK", url.format(server.url))
    tell(tmp_path, webhook="env:HOOK", timeout_s=1.0)
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("gradloc")]
    assert "gradloc.notify.webhook failed" in line and words in line
    said = capfd.readouterr()
    assert "secret" not in caplog.text + said.out + said.err
    assert "/elsewhere" not in [path for path, _ in server.received]


def test_a_webhook_that_hangs_holds_nobody_up(tmp_path, server, monkeypatch):
    monkeypatch.setenv("HOOK", f"{server.url}/hang")
    notifier = hooked(tmp_path, min_interval_s=0, timeout_s=15)
    started = time.monotonic()
    for step in range(40):  # more than may wait
        notifier.announce([(event(), "")], step)
    assert time.monotonic() - started < 14


def test_the_command_reads_the_event_and_sees_no_shell(tmp_path):
    script = tmp_path / "page me.py"
    script.write_text(
        "import json, os, sys; told = [sys.argv[1:], json.load(sys.stdin), os.environ['GRADLOC_TEXT'], "
        f"os.environ['GRADLOC_EVENT_DIR']]; open({str(tmp_path / 'told')!r}, 'w').write(json.dumps(told))"
    )
    tell(tmp_path, command=shlex.join([sys.executable, str(script), "$HOME; true"]))
    arguments, document, text, folder = json.loads((tmp_path / "told").read_text())
    assert arguments == ["$HOME; true"]
    assert read(Event, document) == event()
    assert text == announcement(event()) and folder.startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("false", "exit status 1"),
        ("/no/such/command", "it did not start: No such file or directory"),
        ("sh -c 'sleep 30 & echo $! > pids; wait'", "it took longer than 1 s and was killed"),
    ],
)
def test_a_command_that_fails_is_one_line(tmp_path, monkeypatch, caplog, command, words):
    monkeypatch.chdir(tmp_path)
    tell(tmp_path, command=command, timeout_s=1.0)
    (record,) = caplog.records
    assert "gradloc.notify.command failed" in record.getMessage() and words in record.getMessage()
    assert not record.exc_info
    if (tmp_path / "pids").exists():  # what the command started ended with it
        wait_for_the_end_of(int((tmp_path / "pids").read_text()))


def wait_for_the_end_of(pid: int) -> None:
    """Fails where the process lives on; one that nobody has waited for is dead, too."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the command's child lives on")


def test_alerts_are_rare_and_say_what_they_stand_for_at_the_run_s_end_too(tmp_path, server, monkeypatch):
    notifier = hooked(tmp_path)
    for seconds, number in ((0, 1), (10, 2), (299, 1), (301, 1), (302, 2)):
        monkeypatch.setattr(teller_module, "time", SimpleNamespace(monotonic=lambda seconds=seconds: seconds))
        notifier.announce([(event(), "")] * number, 5)
    notifier.finish()
    first, second, last = (message["text"] for _, message in server.received)
    assert "more since" not in first
    assert second.endswith("(and 3 more since the last alert)") and "(and 1 more" in last


def test_nothing_goes_out_unless_asked_for(tmp_path, monkeypatch):
    submit = Mock()
    monkeypatch.setattr(Background, "submit", submit)
    Notifier(NotifyConfig(), tmp_path).announce([(event(), "")], 5)
    Notifier(NotifyConfig(), tmp_path).announce([], 5)
    submit.assert_not_called()


# ---- the thread


def test_what_does_not_fit_is_left_out_in_one_line(caplog):
    begun, gate, done = threading.Event(), threading.Event(), []
    background = Background("test", patience_s=60, size=2)
    background.submit("the first", lambda: begun.set() or gate.wait())
    begun.wait()
    for number in range(4):
        background.submit(f"job {number}", lambda number=number: done.append(number))
    gate.set()
    background.finish()
    assert done == [0, 1]
    said = [record.getMessage().split(":")[1] for record in caplog.records]
    assert said == [" job 2 is left out", " job 3 is left out"]


def test_finish_waits_no_longer_than_it_may():
    gate = threading.Event()
    background = Background("test", patience_s=0.3)
    background.submit("never", gate.wait)
    started = time.monotonic()
    background.finish()
    assert time.monotonic() - started < 60
    gate.set()


@pytest.mark.parametrize("uploads", [True, False])
def test_mlflow_gets_the_record_only_where_it_may_leave_the_machine(uploads):
    sent: list[str] = []
    client = SimpleNamespace(
        **dict.fromkeys(("log_text", "log_dict", "log_table"), lambda run, what, name: sent.append(Path(name).name))
    )
    trackers._mlflow(client, "run", [event()], uploads)
    assert sent == ["verdict.txt", *["event.json"] * uploads, "culprits.json"]

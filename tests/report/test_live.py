# SPDX-License-Identifier: Apache-2.0
"""Following a run that is going on: what is new is shown, what is not there yet is waited for."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest
from rich.console import Console

from gradloc.report.commands.watch import Follower, Site, news, view
from tests.report.builder import REPO, make_event, make_metrics, write_run


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "run", [make_event(5)], metrics=make_metrics(20))


def grow(folder, step: int, **changes) -> None:
    """The trainer writes another event."""
    event = make_event(step, **changes)
    with (folder / "gradloc" / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


def followed(folder) -> Follower:
    follower = Follower(folder)
    assert follower.poll()
    return follower


def seen(follower: Follower, width: int = 120) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(view(follower, width))
    return capture.get()


def test_a_run_that_is_not_there_yet_is_waited_for(tmp_path):
    follower = Follower(tmp_path / "run")
    assert not follower.poll()
    assert "Waiting: " in seen(follower)
    (tmp_path / "run").mkdir()
    assert not follower.poll()
    write_run(tmp_path / "run", metrics=make_metrics(3))
    assert follower.poll()
    assert "step 3" in seen(follower)
    assert "Too short to judge: 3 steps" in seen(follower)


def test_the_view_tells_norm_threshold_health_and_the_last_events(folder):
    follower = followed(folder)
    out = seen(follower)
    assert re.search(r"tests / report +step 20 +norm 1.29 +threshold 52.3 +(healthy|warning|danger)", out)
    assert "step000005-epoch0-mini0" in out and "explained" in out
    top, *others = out.splitlines()[1:13]
    assert top.index("◆") == 4 and not any("◆" in line for line in others), "the event's step is the highest"


def test_once_prints_the_view_and_refuses_what_is_not_there_or_a_port_that_is_taken(folder, tmp_path, shown, refused):
    assert "step000005-epoch0-mini0" in shown("watch", folder, "--once")
    assert "does not exist" in refused("watch", tmp_path / "no", "--once")
    assert "--interval must be more than 0 seconds" in refused("watch", folder, "--interval", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "--port names another" in refused("watch", folder, "--serve", "--port", taken.getsockname()[1])


@pytest.fixture
def site(folder):
    follower = followed(folder)
    with Site(follower, 0) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield made
        made.shutdown()


def fetch(site: Site, path: str = "", **headers: str) -> tuple[str, dict]:
    request = urllib.request.Request(site.url + path, headers=headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read().decode(), dict(answer.headers)


def test_the_site_shows_the_report_as_it_grows(site, folder):
    text, headers = fetch(site)
    assert '<iframe src="/report.html"' in text
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "step-5 spike" in fetch(site, "report.html")[0]
    assert json.loads(fetch(site, "version")[0]) == {"version": 1}
    grow(folder, 9, trigger={"grad_norm": 1e6})
    site.follower.poll()
    assert json.loads(fetch(site, "version")[0]) == {"version": 2}
    text = fetch(site, "report.html")[0]
    assert "step-9 spike" in text
    assert fetch(site, "report.html")[0] == text


@pytest.mark.parametrize(("path", "host", "code"), [("", "evil.example:80", 403), ("etc/passwd", None, 404)])
def test_the_site_answers_this_machine_about_the_report_alone(site, path, host, code):
    with pytest.raises(urllib.error.HTTPError) as caught:
        fetch(site, path, **({"Host": host} if host else {}))
    assert caught.value.code == code
    assert site.server_address[0] == "127.0.0.1"


def test_the_site_waits_for_a_run_that_has_not_begun(tmp_path):
    with Site(Follower(tmp_path / "<b>run"), 0) as site:
        assert b"Waiting: " in site.report()
        assert b"<b>" not in site.report()


@contextlib.contextmanager
def watching(*words):
    """`watch` in a process that Ctrl-C reaches, though a shell that began this one in the background had it ignored."""
    command = [sys.executable, "-u", "-m", "gradloc.report", "watch", *words]
    plain = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True, **plain) as process:
        try:
            yield process
        finally:
            process.kill()


def test_watch_serves_until_it_is_interrupted(folder):
    with watching(str(folder), "--serve", "--port", "0") as process:
        url = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())[0]
        with urllib.request.urlopen(url + "report.html", timeout=20) as answer:
            assert b"step-5 spike" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_without_a_terminal_watch_prints_a_line_for_each_event(folder):
    with watching(str(folder), "--interval", "0.1") as process:
        assert "step-5 spike: 748 → 0.77" in process.stdout.readline()
        grow(folder, 9)
        assert "step-9 spike: 748 → 0.77" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_only_what_changed_is_read_again_and_a_run_that_begins_anew_is_followed_on(folder):
    follower, known = followed(folder), set()
    assert len(news(follower.run, known)) == 1
    assert not follower.poll() and news(follower.run, known) == []
    write_run(folder, metrics=make_metrics(8, ()))  # restarted from the beginning, into the same file
    grow(folder, 6)
    (line,) = news(follower.run, known) if follower.poll() else ()
    assert "step-6 spike: 748 → 0.77" in line and "step 8" in seen(follower)

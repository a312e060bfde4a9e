# SPDX-License-Identifier: Apache-2.0
"""Alerts that go out of the run: a command and a webhook."""

import json
import logging
import os
import shlex
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any


class AlertFailed(RuntimeError):
    """An alert did not get through; the message holds no secret."""


def run_command(command: str, stdin: str, environment: dict[str, str], timeout_s: float) -> None:
    """Run a command line without a shell; its output is thrown away.

    Args:
        command: split like a shell would, without globbing or variables.
        stdin: what it reads.
        environment: variables in addition to those of this process.
        timeout_s: seconds after which the command and what it has started are killed.

    Raises:
        AlertFailed: it did not start, took too long or did not exit with 0.
    """
    try:
        process = subprocess.Popen(
            shlex.split(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    except OSError as error:
        raise AlertFailed(f"it did not start: {error.strerror}") from None
    try:
        process.communicate(stdin.encode("utf-8", "backslashreplace"), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise AlertFailed(f"it took longer than {timeout_s:g} s and was killed") from None
    if process.returncode:
        raise AlertFailed(f"exit status {process.returncode}")


def post(source: str, message: dict[str, Any], timeout_s: float) -> None:
    """Send a message to a webhook; the response's body is not read, redirects are not followed.

    Args:
        source: of the URL: ``env:NAME`` or ``file:PATH``. It is read anew each time and shown nowhere.
        message: JSON-ready.
        timeout_s: seconds to connect, and between two bytes of the response.

    Raises:
        AlertFailed: without the URL, which is a secret.
    """
    import requests

    url = _read(source)
    this_thread = threading.get_ident()

    def is_other_thread(record: logging.LogRecord) -> bool:
        return record.thread != this_thread

    http_logger = logging.getLogger("urllib3.connectionpool")  # which would log the secret path of the URL at DEBUG
    http_logger.addFilter(is_other_thread)
    try:
        body = json.dumps(message).encode("utf-8")
        headers = {"Content-Type": "application/json"}
        response = requests.post(url, data=body, headers=headers, timeout=timeout_s, allow_redirects=False, stream=True)
        response.close()
    except Exception as error:  # requests' messages name the URL
        raise AlertFailed(type(error).__name__) from None
    finally:
        http_logger.removeFilter(is_other_thread)
    if not 200 <= response.status_code < 300:
        raise AlertFailed(f"it answered {response.status_code}")


def _read(source: str) -> str:
    kind, _, name = source.partition(":")
    try:
        url = os.environ[name] if kind == "env" else Path(name).expanduser().read_text(encoding="utf-8")
    except KeyError:
        raise AlertFailed(f"the environment variable {name} is not set where the trainer runs") from None
    except (OSError, UnicodeDecodeError) as error:
        raise AlertFailed(f"{name} could not be read ({type(error).__name__})") from None
    return url.strip()

# SPDX-License-Identifier: Apache-2.0
"""Take a picture of a report with a headless Chromium, for the README.

    python scripts/screenshot_report.py report.html picture.png [--dark] [--width 390]

Needs selenium, chromium and chromedriver; the browser tests install the latter two where they may
(Debian: apt-get install chromium chromium-driver).
"""

import argparse
import base64
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ARGUMENTS = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking".split()
ARGUMENTS += "disable-component-update disable-sync hide-scrollbars".split()
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def missing() -> str | None:
    """Return a sentence on what this machine lacks for a browser session, or None."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed (pip install selenium)"
    for names in (BROWSERS, ("chromedriver",)):
        if not any(map(shutil.which, names)):
            return f"there is no {names[0]} (Debian: apt-get install chromium chromium-driver)"
    return None


def install() -> None:
    """Install the browser with apt, if this is root on a system with apt.

    Otherwise, or if it fails, do nothing; `missing` returns what is lacking.
    """
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    packages = ["-y", "-qq", "--no-install-recommends", "chromium", "chromium-driver"]
    for command in (["update", "-qq"], ["install", *packages]):
        subprocess.run(["apt-get", *command], env=environment, capture_output=True, timeout=600)


@contextlib.contextmanager
def browser() -> Iterator:
    """Start a headless Chromium with a separate profile, and with its console and network logs."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, BROWSERS)))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for argument in (*ARGUMENTS, f"user-data-dir={profile}"):
            options.add_argument(f"--{argument}")
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()


def show(driver, page: Path, width: int, height: int, is_dark: bool, fragment: str = "", scale: float = 1.5) -> None:
    """Open a report at a size in CSS pixels of ``scale`` x ``scale`` screen pixels, in a theme."""
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600},
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
    motion = {"name": "prefers-reduced-motion", "value": "reduce"}  # a picture does not wait for it
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, motion]})
    driver.get(page.resolve().as_uri() + fragment)


def capture(driver, out: Path) -> None:
    """Save the browser's view as PNG."""
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    out.write_bytes(base64.b64decode(shot["data"]))


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=1000)
    parser.add_argument("--dark", action="store_true", help="the dark theme; else the light one")
    args = parser.parse_args(argv)
    problem = missing()
    if problem is None and not args.report.is_file():
        problem = f"{args.report} does not exist: name a report"
    if problem:
        print(f"screenshot_report: {problem}.", file=sys.stderr)
        return 2
    with browser() as driver:
        show(driver, args.report, args.width, args.height, args.dark)
        capture(driver, args.picture)
    print(args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())

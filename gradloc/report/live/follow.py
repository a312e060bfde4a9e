# SPDX-License-Identifier: Apache-2.0
"""Reads a run again whenever its files have changed; a run that has not begun yet is no error."""

from pathlib import Path

from ..errors import ReportError
from ..logs import files_of
from ..runs.run import RunFolder, read_run


class Follower:
    """A run's folder as it is at the moment."""

    def __init__(self, path: Path, metrics_path: Path | None = None):
        self.path = path
        self.version = 0
        """Counts how often something new was read."""
        self.run: RunFolder | None = None
        """None until there is an event or a metric."""
        self.waiting = f"{path} is not there yet."
        """Why there is nothing to show, in a sentence."""
        self._metrics_path = metrics_path
        self._seen: list[tuple[Path, int, int]] | None = None

    def poll(self) -> bool:
        """Reads the run if a file of it has changed; returns whether there is something new to show."""
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        self._seen = stamps
        try:
            self.run = read_run(self.path, self._metrics_path)
        except (ReportError, OSError) as error:  # an empty folder, or a file that just went away
            self.waiting = str(error)
            return False
        self.version += 1
        return True

    def _stamps(self) -> list[tuple[Path, int, int]]:
        """Name, size and time of every file that could hold events or metrics."""
        stamps = []
        for file in [*files_of(self.path, depth=3), self.path, *filter(None, [self._metrics_path])]:
            try:
                status = file.stat()
            except OSError:
                continue
            stamps.append((file, status.st_size, status.st_mtime_ns))
        return stamps

# SPDX-License-Identifier: Apache-2.0
"""The ranks' reports of an update, asked for through verl's own call of a function on every worker."""

from collections.abc import Callable
from typing import Any

from verl import DataProto

from ...loop.wire import RankReport

__all__ = ["answer", "reports_of"]

_KEY = "gradloc_report_"


def reports_of(group: Any, ask: Callable[[Any], DataProto]) -> list[RankReport]:
    """The reports of all processes, in their order.

    Args:
        group: verl's worker group.
        ask: a plain function that runs in each worker, and returns an :func:`answer`.
    """
    found = group.execute_with_func_generator(ask).meta_info
    reports = [value for key, value in found.items() if key.startswith(_KEY)]
    return sorted(reports, key=lambda report: report.process)


def answer(report: RankReport | None) -> DataProto:
    """A worker's report as verl brings answers together: of each meta info it keeps one. None: there is no report."""
    return DataProto() if report is None else DataProto(meta_info={f"{_KEY}{report.process}": report})

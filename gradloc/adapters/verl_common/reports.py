# SPDX-License-Identifier: Apache-2.0
"""The ranks' reports of an update, asked for through verl's own call of a function on every worker."""

from collections.abc import Callable
from typing import Any

from verl import DataProto

from ...loop.wire import RankReport

_KEY = "gradloc_report_"


def reports_of(group: Any, ask: Callable[[Any], DataProto]) -> list[Any]:
    """What all processes answer, in their order.

    Args:
        group: verl's worker group.
        ask: a plain function that runs in each worker, and returns an :func:`answer`.
    """
    found = group.execute_with_func_generator(ask).meta_info
    by_process = {int(key.removeprefix(_KEY)): value for key, value in found.items() if key.startswith(_KEY)}
    return [by_process[process] for process in sorted(by_process)]


def answer(report: RankReport | None) -> DataProto:
    """A worker's report as verl brings answers together; None: there is no report."""
    return DataProto() if report is None else answer_of(report.process, report)


def answer_of(process: int, value: Any) -> DataProto:
    """Any answer: of each meta info verl keeps one."""
    return DataProto(meta_info={f"{_KEY}{process}": value})

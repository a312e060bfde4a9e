# SPDX-License-Identifier: Apache-2.0
"""What the ranks have to say, asked for through verl's own call of a function on every worker."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from verl import DataProto

_KEY = "gradloc_report_"


def reports_of(group: Any, ask: Callable[[Any], DataProto]) -> list[Any]:
    """What all processes of verl's worker group answer, in their order.

    Args:
        group: verl's.
        ask: a plain function that runs in each worker, and returns an :func:`answer`.
    """
    answers = group.execute_with_func_generator(ask).meta_info
    by_process = {int(key.removeprefix(_KEY)): value for key, value in answers.items() if key.startswith(_KEY)}
    return [by_process[process] for process in sorted(by_process)]


def answer(value: Any) -> DataProto:
    """This process's answer, under a name of its own: of several that have the same one, verl keeps one."""
    return DataProto(meta_info={f"{_KEY}{dist.get_rank()}": value})

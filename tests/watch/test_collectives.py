# SPDX-License-Identifier: Apache-2.0
"""Every rank issues the same collectives in the same order, in healthy steps and whatever a search does.

NCCL would hang or mix messages up where two ranks differ; gloo forgives some of it. So each rank's are written down:
the operation, its group, and the shape, dtype and device of what it sends.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tests.watch.loops import SPIKE, WORTH, Loop, batches
from tests.world.events import events_in


class Written(TorchDispatchMode):
    """Writes down what passes the dispatcher on its way to a process group."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, ...]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace in ("c10d", "_c10d_functional"):
            given, _ = tree_flatten((args, kwargs or {}))
            sent = [f"{tuple(e.shape)} {e.dtype} {e.device.type}" for e in given if isinstance(e, torch.Tensor)]
            boxed = [e for e in given if isinstance(e, torch.ScriptObject) and "ProcessGroup" in str(e._type())]
            groups = [dist.ProcessGroup.unbox(e).group_name for e in boxed]
            self.lines.append((str(op), *groups[:1], *sorted(set(sent))))  # the first gets one of each rank
        return op(*args, **(kwargs or {}))


SPOILED = {
    "healthy": lambda weight: weight,
    "a token of the second rank": lambda weight: weight.index_put(
        (torch.tensor(5), torch.tensor(4)), weight.new_tensor(WORTH)
    ),
    "eight tokens of both": lambda weight: torch.where(torch.eye(8, 12).bool(), WORTH, weight),
    "all tokens": lambda weight: weight * WORTH,
    "a NaN": lambda weight: weight.index_put((torch.tensor(2), torch.tensor(3)), weight.new_tensor(torch.nan)),
}


def collectives(folder: str, layout: str, spoiled: str, action: str) -> list[tuple[str, ...]]:
    """What this rank issued in four steps, the third of them spoiled."""
    made = Loop(folder, action, layout)
    with Written() as written:
        for number, (ids, mask) in enumerate(batches(4), 1):
            weight = torch.ones_like(mask, dtype=torch.float32)
            weight = SPOILED[spoiled](weight) if number == SPIKE else weight
            made.step(*(values.chunk(made.size)[made.rank] for values in (ids, mask, weight)))
    return written.lines


@pytest.mark.parametrize("spoiled", SPOILED)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("ddp", marks=pytest.mark.slow),
        pytest.param("fsdp1", marks=pytest.mark.slow),
        pytest.param("fsdp2-once", marks=pytest.mark.full),
    ],
)
def test_all_ranks_issue_the_same(bare_world, tmp_path, layout, spoiled):
    given = {"folder": str(tmp_path), "layout": layout, "spoiled": spoiled, "action": "mask"}
    first, second = bare_world.run("tests.watch.test_collectives.collectives", **given)
    assert first == second and len(first) > 8
    assert len(events_in(tmp_path)) == (spoiled != "healthy")

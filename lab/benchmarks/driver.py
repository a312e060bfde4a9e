# SPDX-License-Identifier: Apache-2.0
"""Measure the processor time of a healthy step on verl's driver, with a batch in memory.

    python -m lab.benchmarks.driver        # 4,096 rows of up to 32k tokens: half a minute, 4 GB

verl 0.9's batch has no padding, 0.7's has. The queue is not included, since nothing more is fetched.
"""

import time
from types import SimpleNamespace

import torch

from gradloc.health.monitor import _zero_variance
from gradloc.loop.batch import BatchView, RowFacts, batch_scale
from lab.benchmarks.run import Parser, Record, about, write

ROWS, LONGEST, ROLLOUTS = 4096, 32768, 16
"""Rows of the batch, tokens of the longest, rollouts of a prompt."""


def measure(num_rows: int, longest: int) -> Record:
    """Return the driver's processor time in one step in seconds, by trainer."""
    drawn = torch.Generator().manual_seed(0)
    lengths = (torch.rand(num_rows, generator=drawn) ** 2 * (longest - 64) + 64).long()
    is_there = torch.arange(longest) < lengths.unsqueeze(1)
    mask, scores = is_there.long(), torch.zeros(num_rows, longest)
    scores.scatter_(1, lengths.unsqueeze(1) - 1, 1.0)
    advantages = torch.randn(num_rows, 1, generator=drawn) * is_there
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    nested = [torch.nested.nested_tensor_from_jagged(v[is_there], offsets) for v in (mask, advantages, scores)]
    uids = {"uid": [str(row // ROLLOUTS) for row in range(num_rows)]}
    tensors = {"response_mask": mask, "advantages": advantages, "token_level_scores": scores}
    views = {
        "verl 0.9": BatchView({}, uids, known=lambda: RowFacts.from_nested(*nested)),
        "verl 0.7": BatchView(tensors, uids),
    }
    found: Record = {"num_tokens": int(lengths.sum())}
    for trainer, view in views.items():
        start = time.process_time()
        batch_scale(view, [1.0])
        _zero_variance(SimpleNamespace(facts=view.facts, labels=uids))
        found[trainer] = time.process_time() - start
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write ``driver.json``."""
    given = Parser("driver", __doc__).parse_args(arguments)
    torch.set_num_threads(1)
    record = measure(ROWS, LONGEST)
    print({name: round(value, 3) for name, value in record.items()})
    write({**about(given), "rows": ROWS, "longest": LONGEST, **record}, given.out, "driver")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Search random worlds: a model, a loss, a layout and planted culprits, all drawn from a seed.

    python -m lab.benchmarks.worlds                  # 200 fresh worlds, about ten minutes on two cores
    python -m lab.benchmarks.worlds --worlds 400 --precision bfloat16
    python -m lab.benchmarks.worlds --seed 123 --seed 456
    python -m lab.benchmarks.worlds --again          # those that failed before

Seeds are new in each run; failed ones are kept in worlds-failed.json. The truth comes from separate backwards: every
token's norm, and the norm without the named tokens. Writes worlds.json and worlds.md.
"""

import json
import random
import statistics
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from lab.benchmarks.run import REPO, Parser, Record, finish, in_processes
from lab.output import table

PRECISIONS = ("float32", "bfloat16", "float16")
FAILED = REPO / "lab" / "benchmarks" / "results" / "worlds-failed.json"
SPIKE = 4.0  # the threshold, in healthy norms
MAX_STEPS = 4.0
_LIMIT_F = 10  # least f that an update counts as, as in search.max_steps
_BITS = 40  # of a seed
_PATIENCE_S = 900.0  # for a world of two ranks, on a busy machine
_WITHIN = 0.75  # share of a span's tokens that must be planted; the others are gaps
_MOST = 1 / 3  # maximum share of a batch's tokens to plant; with more, the batch is at fault


@dataclass(frozen=True)
class Plan:
    """The settings that a seed draws."""

    precision: str
    """Precision of the passes."""
    weights: str
    """Precision that the weights are kept in."""
    layout: str
    ranks: int
    micro_batches: int
    rows: int
    length: int
    layers: int
    width: int
    vocabulary: int
    is_tied: bool
    is_trained: bool
    aggregation: str
    kl: float
    entropy: float
    by_token: bool
    """Whether advantages are per token, not per row."""
    is_tracked: bool
    """Whether the micro-batches' norms are known."""
    plant: str
    count: int
    """Number of culprits; 0 for a scaled batch."""


PLANTS = (
    *["tokens"] * 8,
    *["row"] * 2,
    *["rows"],
    *["segment"] * 2,
    *["group"],
    *["scaled batch"] * 4,
    *["cancelling pair"] * 2,
    *["overflow"],
    *["none"],
)
"""Kinds of plant; repeated entries are drawn more often."""


def plan_of(seed: int, precision: str | None = None) -> Plan:
    """Draw a world's plan."""
    draw = random.Random(seed)
    chosen = draw.choice(PRECISIONS)
    precision = precision or chosen
    ranks, micro_batches = draw.choice((1, 1, 2)), draw.choice((1, 2, 2, 2, 4, 8))
    is_kept_half = precision == "bfloat16" and draw.random() < 0.3
    layout = draw.choice(("fsdp2", "fsdp2", "fsdp1"))
    if is_kept_half or (precision == "float32" and ranks == 1):
        layout = "plain" if ranks == 1 and draw.random() < 0.7 else "fsdp2"
    plant = draw.choice(PLANTS)
    most = {"tokens": 12, "rows": 3, "row": 1, "segment": 3, "group": 1, "cancelling pair": 2}.get(plant, 0)
    each = draw.choice((1, 2, 2, 4))
    heads = draw.choice((2, 4))
    return Plan(
        precision=precision,
        weights=precision if is_kept_half else "float32",
        layout=layout,
        ranks=ranks,
        micro_batches=micro_batches,
        rows=max(ranks * micro_batches * each, 8),
        length=draw.choice((8, 12, 24, 48)),
        layers=draw.randint(1, 5),
        width=heads * draw.choice((8, 12, 16)),
        vocabulary=draw.choice((48, 96, 320, 1024)),
        is_tied=draw.random() < 0.4,
        is_trained=draw.random() < 0.5,
        aggregation=draw.choice(("token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-mean")),
        kl=draw.choice((0.0, 0.0, 0.05)),
        entropy=draw.choice((0.0, 0.0, 0.01)),
        by_token=draw.random() < 0.3,
        is_tracked=draw.random() < 0.5,
        plant=plant,
        count=draw.randint(1, most) if most else 0,
    )


def world(seed: int, precision: str | None = None) -> Record:
    """Make the world of a seed, search it, and compare the result with the truth; all its ranks call this together.

    Args:
        seed: seed of everything.
        precision: precision of the passes, in place of the drawn one.
    """
    from gradloc.core.gradients import GradientSpace
    from gradloc.core.ranks import Ranks
    from gradloc.core.sharding import local_shard
    from gradloc.core.tracker import NormTracker
    from gradloc.search.find import localize
    from gradloc.trigger import Spike
    from tests.toy_model import Loss, Oracle, ToyStep, shard

    plan, draw = plan_of(seed, precision), random.Random(seed + 1)
    passes, kept_in = getattr(torch, plan.precision), getattr(torch, plan.weights)
    loss, ranks = Loss(aggregation=plan.aggregation, kl=plan.kl, entropy=plan.entropy), Ranks()
    plain = _model(plan, seed).to(kept_in).float()
    healthy = _batch(plan, plain, seed)

    def step_of(batch: Any) -> tuple[Any, Any, Any]:
        model = _model(plan, seed, plain).to(kept_in)
        step = ToyStep(shard(model, plan.layout, passes), batch, plan.micro_batches, passes, loss)
        tracker = NormTracker(0)
        tracker.begin_mini_batch()
        space = GradientSpace(step.model)
        step.train(lambda: tracker.after_backward(space))
        return step, space, tracker

    usual = step_of(healthy)[1].norm()
    batch, planted = _planted(plan, healthy, Oracle(plain, healthy, loss), usual, draw)
    step, space, tracker = step_of(batch)
    norm, threshold = space.norm(), SPIKE * usual
    row: Record = {"seed": seed, **vars(plan), "planted": len(planted), "norm": norm / usual}
    if norm <= threshold:
        return row | {"named": 0, "cost": 0, "status": "no spike", "verdict": "", "problems": []}
    before = [local_shard(grad).clone() for grad in space.current() if grad is not None]
    spike = Spike("fixed", norm, threshold, threshold * batch.num_tokens**0.5, batch.num_tokens)
    increments = tracker.read(space, ranks).increments if plan.is_tracked else None
    found = localize(step, space, ranks, spike, 1.0, increments, max_steps=MAX_STEPS)
    after = [local_shard(grad) for grad in space.current() if grad is not None]
    as_bytes = ([each.contiguous().view(torch.uint8) for each in grads] for grads in (before, after))
    is_restored = all(map(torch.equal, *as_bytes)) and len(before) == len(after)
    certificate, cost = found.certificate, found.num_forwards + 2 * found.num_backwards
    spans = [{batch.place(token, ranks.size, plan.micro_batches) for token in each.tokens} for each in found.culprits]
    named = set().union(*spans)
    searched = space.take()
    truth = step.norm_of(space, named, without=True) if named else norm
    space.put(searched)
    innocent = {place for span in spans if len(planted & span) < _WITHIN * len(span) for place in span - planted}
    if plan.plant != "scaled batch":
        norms = Oracle(plain, batch, loss).norms(innocent)
        innocent = {place for place in innocent if norms[place] < threshold / 10}
    is_full = found.status == "max_culprits" and len(found.culprits) == 8
    wrong = {
        "names an innocent": innocent,
        "does not explain it": planted and certificate.verdict != "explained" and not is_full,
        "is off by more than its bound": certificate.norm_after is not None
        and abs(certificate.norm_after - truth) > certificate.error_bound + 1e-6 * truth,
        "costs more than max_steps": cost > MAX_STEPS * max(3 * plan.micro_batches, _LIMIT_F),
        "changes the gradient": not is_restored,
    }
    row |= {"named": len(named), "cost": cost, "status": found.status, "why": found.stop_reason}
    return row | {"verdict": certificate.verdict, "problems": [problem for problem, is_so in wrong.items() if is_so]}


# ---- how a world is made


def _model(plan: Plan, seed: int, like: torch.nn.Module | None = None) -> Any:
    from tests.toy_model.model import Decoder, ModelSize

    torch.manual_seed(seed % 2**31)
    model = Decoder(ModelSize(plan.vocabulary, plan.width, plan.layers, heads=2))
    if plan.is_tied:
        model.head.weight = model.embedding.weight
    if like is not None:
        model.load_state_dict(like.state_dict())
    elif plan.is_trained:
        _train(model, plan, seed)
    return model


def _train(model: torch.nn.Module, plan: Plan, seed: int) -> None:
    """Train the model on a random walk whose next word is one of two."""
    generator = torch.Generator().manual_seed(seed % 2**31 + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        text = _walk(plan, 16, 24, generator)
        logits = model(text[:, :-1], 23)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _walk(plan: Plan, rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    text = [torch.randint(plan.vocabulary, (rows,), generator=generator)]
    for _ in range(length - 1):
        turn = torch.randint(2, (rows,), generator=generator)
        text.append((text[-1] * (3 + 2 * turn) + 1 + turn) % plan.vocabulary)
    return torch.stack(text, 1)


def _batch(plan: Plan, model: Any, seed: int) -> Any:
    from tests.toy_model.batch import _answered

    generator = torch.Generator().manual_seed(seed % 2**31 + 2)
    tokens = _walk(plan, plan.rows, 5 + plan.length - 1, generator)
    batch = _answered(model, tokens, plan.length, generator)
    lengths = torch.randint(max(plan.length // 4, 1), plan.length + 1, (plan.rows, 1), generator=generator)
    batch = batch.edited(mask=torch.arange(plan.length) < lengths)
    if plan.by_token:
        batch = batch.edited(advantages=torch.randn(batch.advantages.shape, generator=generator))
    return batch


def _planted(
    plan: Plan, batch: Any, oracle: Any, usual: float, draw: random.Random
) -> tuple[Any, set[tuple[int, int]]]:
    """Return the batch with its culprits, and their places; none for a scaled batch."""
    places = [tuple(place) for place in batch.mask.nonzero().tolist()]
    if plan.plant == "none":
        return batch, set()
    if plan.plant == "scaled batch":
        return batch.edited(advantages=batch.advantages * SPIKE * 10 ** draw.uniform(0.5, 4)), set()
    if plan.plant == "overflow":
        place = draw.choice(places)
        return batch.planted({place: draw.choice((-1, 1)) * 10.0 ** draw.randint(22, 36)}), {place}
    if plan.plant == "cancelling pair":
        return _pair(plan, batch, oracle, usual, draw, places)
    found: dict[tuple[int, int], float] = {}
    for _ in range(plan.count):
        row, position = draw.choice(places)
        group = {
            "tokens": [(row, position)],
            "segment": [place for place in places if place[0] == row and position <= place[1] < position + 4],
            "group": [place for place in places if place[0] // 2 == row // 2],
        }.get(plan.plant, [place for place in places if place[0] == row])
        if len({*found, *group}) > _MOST * len(places):
            continue
        size = usual * SPIKE * 10 ** draw.uniform(0.2, 4) * draw.choice((-1, 1))
        own = float(oracle.gradient(group).norm())
        if own > 1e-9 * usual:
            found |= {place: size / own * float(batch.advantages[place]) for place in group}
    return batch.planted(found), set(found)


def _pair(plan: Plan, batch: Any, oracle: Any, usual: float, draw: random.Random, places: list) -> tuple[Any, set]:
    """Return a batch with two equal rows, in which two planted tokens' gradients partly cancel."""
    row, position = draw.choice(places)
    other = (row + 1 + draw.randrange(plan.rows - 1)) % plan.rows
    changed = {
        name: getattr(batch, name).clone()
        for name in ("tokens", "labels", "mask", "old_log_probs", "reference_log_probs")
    }
    for value in changed.values():
        value[other] = value[row]
    batch = batch.edited(**changed)
    own = oracle.norm((row, position))
    if own <= 1e-9 * usual:
        return batch, set()
    size = usual * SPIKE * 10 ** draw.uniform(0.5, 3) / own * float(batch.advantages[row, position])
    pair = {(row, position): size, (other, position): -size * draw.uniform(0.2, 0.8)}
    return batch.planted(pair), set(pair)


# ---- running them


def _alone(*given: Any) -> Record:
    """Search a world of one rank in this process; see :func:`tried`."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        store = tempfile.mkdtemp()
        dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)
    return tried(*given)


def tried(seed: int, precision: str | None = None) -> Record:
    """Call :func:`world`; an error becomes a problem of the row."""
    try:
        return world(seed, precision)
    except Exception as error:
        row: Record = {"seed": seed, **vars(plan_of(seed, precision)), "named": 0, "cost": 0, "verdict": ""}
        where = traceback.format_exc().splitlines()[-3:]
        return row | {"status": "raised", "problems": [f"raises {error!r}"], "why": " ".join(where)}


def measure(seeds: Sequence[int], precision: str | None = None) -> list[Record]:
    """Search the worlds of these seeds; those of one rank run two at a time."""
    from tests.world import World

    alone = [seed for seed in seeds if plan_of(seed, precision).ranks == 1]
    rows = [*in_processes(_alone, [(seed, precision) for seed in alone])]
    with World(2, preloaded=()) as ranks:
        for seed in tqdm([seed for seed in seeds if seed not in set(alone)], "two ranks"):
            given = {"seed": seed, "precision": precision, "timeout_s": _PATIENCE_S}
            first, other = ranks.run("lab.benchmarks.worlds.tried", **given)
            if any(first[name] != other[name] for name in ("named", "verdict", "cost")):
                first["problems"] = [*first["problems"], "the ranks do not agree"]
            rows.append(first)
    return rows


def markdown(rows: Sequence[Record]) -> str:
    """Return a table with a row for each precision and each kind of plant."""

    def line(name: str, group: Sequence[Record]) -> list[object]:
        spiked = [row for row in group if row["status"] != "no spike"]
        right = sum(not row["problems"] for row in spiked)
        costs = [row["cost"] for row in spiked if row["micro_batches"] == 2]
        innocent = sum("names an innocent" in row["problems"] for row in spiked)
        off = sum("is off by more than its bound" in row["problems"] for row in spiked)
        part = f"{right / len(spiked):.1%}" if spiked else ""
        return [name, len(spiked), right, part, innocent, off, statistics.median(costs) if costs else ""]

    head = ["worlds", "spiked", "right", "part", "with an innocent", "over the bound", "median f at M = 2"]
    groups = [(name, [row for row in rows if row["precision"] == name]) for name in PRECISIONS]
    groups += [(name, [row for row in rows if row["plant"] == name]) for name in dict.fromkeys(PLANTS)]
    return table([head, *(line(name, group) for name, group in [*groups, ("all", rows)] if group)])


def main(arguments: list[str] | None = None) -> int:
    """Draw seeds, search their worlds, print a table, and keep the failed seeds; return the exit code."""
    options = Parser("worlds", __doc__)
    options.add_argument("--worlds", type=int, default=200)
    options.add_argument("--precision", choices=PRECISIONS, help="of all worlds (default: drawn)")
    options.add_argument("--seed", type=int, action="append", help="this world (repeatable)")
    options.add_argument("--again", action="store_true", help="the worlds that failed before")
    parsed = options.parse_args(arguments)
    fresh = random.SystemRandom()
    seeds = parsed.seed or [fresh.getrandbits(_BITS) for _ in range(parsed.worlds)]
    known = json.loads(FAILED.read_text()) if FAILED.exists() else []
    if parsed.again:
        seeds = [each["seed"] for each in known]
    rows = measure(seeds, parsed.precision)
    finish(parsed, {"rows": rows}, markdown(rows))
    failed = [row for row in rows if row["problems"]]
    for row in failed:
        print({name: row[name] for name in ("seed", "precision", "plant", "count", "problems")}, file=sys.stderr)
    own = [{name: row[name] for name in ("seed", "precision")} for row in failed]
    if failed:
        FAILED.write_text(json.dumps([*known, *(each for each in own if each not in known)], indent=1) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

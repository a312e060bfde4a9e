# SPDX-License-Identifier: Apache-2.0
"""Plant faults in each link of a step, in runs drawn from a seed: does the event name the right link?

    python -m lab.benchmarks.links                       # ten fresh seeds of each, about 25 minutes on two cores
    python -m lab.benchmarks.links --seeds 2 --model gpt
    python -m lab.benchmarks.links --seed 123 --fault second_moments
    python -m lab.benchmarks.links --healthy 10000       # early warnings in that many steps without a fault
    python -m lab.benchmarks.links --keep DIR --fault learning_rate   # one run, for its report

A run trains on Python's help pages. After some healthy steps a fault is planted, at once or spread over ten steps. The
first event whose step is ordinary in the same run without the fault is judged. Runs that never spike are counted
separately. Writes links.json.
"""

import contextlib
import copy
import io
import itertools
import logging
import multiprocessing
import random
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from logging.handlers import MemoryHandler
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import gradloc
from lab.benchmarks.run import Parser, Record, finish, in_processes, seeds_of
from lab.experiments.verdict import read_events
from lab.output import figure, table

MODELS = ("gpt", "llama")
FAULTS = {
    "token": "batch",
    "row": "batch",
    "batch": "batch",
    "one_gradient": "after_backward",
    "all_gradients": "after_backward",
    "learning_rate": "last_update",
    "weight_decay": "last_update",
    "second_moments": "last_update",
    "lost_moments": "last_update",
    "flipped_weight": "weights",
    "norm_scale": "weights",
    "head_scale": "weights",
}
"""Planted fault -> the link that it breaks."""
HEALTHY = 48  # steps before the fault
_SPREAD = 10  # steps that a gradual fault takes
_AFTER = 4  # steps after it
_LENGTH = 48
STRENGTHS = (1.0, 3.0, 10.0, 30.0, 100.0)
"""How much stronger a fault is planted, until the run spikes."""
_PLACE = 1_000_003  # of a flipped weight, by the sizes of its parameter
_LONG = 1e8  # steps of a training whose optimizer needs no bias correction any more
ENDS = ("model.norm.weight", "lm_head.weight")  # of transformers' models
_TEXT = torch.tensor(list("\n".join(topics.topics.values()).encode()))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.first(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    """A byte-level GPT in plain torch."""

    def __init__(self, width: int, depth: int, heads: int):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(_LENGTH, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _from(*choices: float) -> Any:
    """Declare a field of :class:`Plan` that is one of these."""
    return field(metadata={"choices": choices})


@dataclass(frozen=True)
class Plan:
    """The settings that a seed draws."""

    model: str
    seed: int
    width: int = _from(32, 64, 96)
    depth: int = _from(2, 3, 4)
    rate: float = _from(5e-4, 1e-3, 2e-3)
    decay: float = _from(0.0, 0.01, 0.1)
    second_beta: float = _from(0.95, 0.99, 0.999)
    micro_batches: int = _from(1, 2, 4)
    rows: int = _from(2, 4, 8)

    @classmethod
    def of(cls, model: str, seed: int) -> "Plan":
        """Draw the plan of a seed."""
        rng = random.Random(f"{model} {seed}")
        return cls(model, seed, *(rng.choice(each.metadata["choices"]) for each in fields(cls)[2:]))


class Plant:
    """Plant a fault after the loss, in a model or its optimizer, sharded or not.

    Args:
        model: the model whose weights or gradients are changed.
        optimizer: an optimizer with one parameter group.
        name: one of :data:`FAULTS`; "" for none.
        is_gradual: whether the fault is spread over ten steps.
        seed: draws the parameter.
        ends: suffixes of the names of the final norm's and of the head's weight.
        attempt: number of the entry of :data:`STRENGTHS`; each picks other weights.
    """

    weight_factor, moment_factor = 20.0, 1e-6

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        name: str,
        is_gradual: bool,
        seed: int,
        ends: tuple[str, str],
        attempt: int = 0,
    ):
        self.optimizer, self.name, self.steps = optimizer, name, _SPREAD if is_gradual else 1
        self.attempt, self.strength = attempt, STRENGTHS[attempt]
        self.weights, picked = dict(model.named_parameters()), random.Random(seed + 1000 * attempt)
        named = [each for each, param in self.weights.items() if param.dim() == 2 and "head" not in each]
        inner = [each for each in named if "blocks" in each or "layers" in each]
        gradient, flipped = (picked.choice(each or [""]) for each in (named, inner))  # FSDP1 has only flat ones
        norm, head = (next((each for each in self.weights if each.endswith(end)), "") for end in ends)
        faulty = {"one_gradient": gradient, "flipped_weight": flipped, "norm_scale": norm, "head_scale": head}
        self.parameter = faulty.get(name, "")
        """Name of the faulty parameter; "" if it is not a single one."""

    def part(self, step: int) -> float:
        """Return the fraction of the fault in a step counted from its first, in (0, 1]; 0 without a fault."""
        return (step + 1) / self.steps if self.name and 0 <= step < self.steps else 0.0

    @torch.no_grad()
    def before_forward(self) -> None:
        """Change weights, if the fault is in them."""
        if self.name in ("norm_scale", "head_scale"):
            self.weights[self.parameter].mul_((self.weight_factor * self.strength) ** (1 / self.steps))
        if self.name == "flipped_weight":
            weight = getattr(self.weights[self.parameter], "_local_tensor", self.weights[self.parameter])
            weight[tuple(_PLACE % size for size in weight.shape)] += 300.0 * self.strength / self.steps

    @torch.no_grad()
    def after_backward(self, part: float) -> None:
        """Change gradients, if the fault is in them."""
        if self.name == "one_gradient":
            self.weights[self.parameter].grad.mul_((200.0 * self.strength) ** part)
        if self.name == "all_gradients":
            for param in self.weights.values():
                param.grad.mul_((50.0 * self.strength) ** part)

    @contextlib.contextmanager
    def optimizer_at_fault(self) -> Iterator[None]:
        """Plant a fault in the optimizer step in here, which the next norm shows."""
        (group,), each = self.optimizer.param_groups, 1 / self.steps
        rate, decay = group["lr"], group["weight_decay"]
        if self.name == "learning_rate":
            group["lr"] = rate * (1 + 300.0 * self.strength * each)
        if self.name == "weight_decay":
            group["weight_decay"] = (3.0 if self.steps == 1 else 2.3) / rate  # weights change sign and grow
        if self.name == "lost_moments":
            group["betas"] = (0.9, 1 - 1e-3 / self.strength**2)  # a step after the loss is 3 strength rate large
        for state in self.optimizer.state.values():
            if self.name == "second_moments":
                state["exp_avg_sq"].mul_((self.moment_factor / self.strength**2) ** each)
            if self.name == "lost_moments":  # a resume after long training that restores the count of steps alone
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()
                state["step"].fill_(_LONG)
        yield
        group["lr"], group["weight_decay"] = rate, decay


class Run:
    """A run: a model, its optimizer and its batches, with a fault from some step on."""

    def __init__(self, plan: Plan, fault: str = "", is_gradual: bool = False, folder: str = "", **given: Any):
        torch.manual_seed(plan.seed)
        self.plan = plan
        self.model = self.wrapped(_model(plan))
        betas = (0.9, plan.second_beta)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), plan.rate, betas, weight_decay=plan.decay)
        self.watch = gradloc.Watch(self.model, self.optimizer, folder, **given) if folder else None
        self.rng = torch.Generator().manual_seed(plan.seed + 1)
        self.step = 0
        self.plant(fault, is_gradual)

    def plant(self, fault: str, is_gradual: bool, attempt: int = 0) -> None:
        """Plant a fault that starts after the healthy steps; "" for none."""
        plan, ends = self.plan, ("norm.weight", "head.weight") if self.plan.model == "gpt" else ENDS
        self.fault = Plant(self.model, self.optimizer, fault, is_gradual, plan.seed + 2, ends, attempt)

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Return the model to train; a subclass may wrap it, for instance in DDP."""
        return model

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the step's micro-batches: ids and the weights of their tokens."""
        part, plan = self._part(), self.plan
        for number in range(plan.micro_batches):
            starts = torch.randint(len(_TEXT) - _LENGTH - 1, (plan.rows,), generator=self.rng)
            ids = torch.stack([_TEXT[start : start + _LENGTH + 1] for start in starts])
            weights = torch.ones(plan.rows, _LENGTH)
            if part and number == plan.micro_batches - 1:
                if self.fault.name == "token":
                    weights[0, 7] = (3e3 * self.fault.strength) ** part
                if self.fault.name == "row":
                    weights[0] = (300.0 * self.fault.strength) ** part
            if part and self.fault.name == "batch":
                weights *= (40.0 * self.fault.strength) ** part
            yield ids, weights

    def _part(self) -> float:
        return self.fault.part(self.step - HEALTHY)

    def backward(self, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Compute the gradient of these micro-batches into ``.grad``."""
        self.optimizer.zero_grad()
        for number, (ids, weights) in enumerate(batches):
            losses = self.losses_of(self.model(ids[:, :-1]), ids, weights, number == self.plan.micro_batches - 1)
            losses.mean().div(self.plan.micro_batches).backward()

    def losses_of(self, given: Any, ids: torch.Tensor, weights: torch.Tensor, is_last: bool) -> torch.Tensor:
        """Return the token losses (B, T) of a micro-batch, given the model's output. A subclass may."""
        return losses_of(given, ids) * weights

    def norm(self) -> float:
        """Return the gradient's norm, computed in float64."""
        squares = [each.grad.double().square().sum() for each in self.model.parameters() if each.grad is not None]
        return float(torch.stack(squares).sum().sqrt())

    def before_clip(self) -> None:
        """Look at the step's gradient. A subclass may."""

    def clip(self) -> torch.Tensor:
        """Clip the step's gradient; return its norm. A subclass may call its wrapper's method."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def take(self) -> float:
        """Take one step; return its gradient norm."""
        part, fault = self._part(), self.fault
        if part:
            fault.before_forward()
        self.backward(self.batches())
        if part:
            fault.after_backward(part)
        self.before_clip()
        norm = self.clip()
        with fault.optimizer_at_fault() if part else contextlib.nullcontext():
            self.optimizer.step()
        self.step += 1
        return float(norm)


def losses_of(given: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy (B, T) of ids (B, T + 1) under a model's output: logits, or an object with them."""
    logits = given if isinstance(given, torch.Tensor) else given.logits
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.view(len(ids), -1)


def _model(plan: Plan) -> nn.Module:
    if plan.model == "gpt":
        return Gpt(plan.width, plan.depth, 4)
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": plan.width, "intermediate_size": 3 * plan.width, "num_hidden_layers": plan.depth}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=256, max_position_embeddings=2 * _LENGTH, pad_token_id=0, **sizes, **heads)
    return LlamaForCausalLM(config)


def measure(model: str, seed: int, kinds: Sequence[tuple[str, bool]]) -> list[Record]:
    """Return the judged first event of each kind of fault.

    The healthy steps run once; each fault continues from there in a child process, as does the run without a fault. A
    fault that makes no spike is planted again, stronger. An
    event is natural, and not judged, if the same step without the fault has a norm over the geometric mean of the usual
    norm and the event's.

    Args:
        model: one of :data:`MODELS`.
        seed: draws the run.
        kinds: faults, and whether they are spread over ten steps.
    """
    torch.set_num_threads(1)
    logging.getLogger("gradloc").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        run = Run(Plan.of(model, seed), folder=f"{folder}/run")
        usual = statistics.median([run.take() for _ in range(HEALTHY)])
        shutil.copytree(f"{folder}/run", f"{folder}/before", dirs_exist_ok=True)

        healthy: list[float] = []

        def is_natural(event: Record) -> bool:
            norm = event["trigger"]["grad_norm"]  # None where not finite
            return norm is not None and healthy[event["step"]["global_step"] - HEALTHY - 1] ** 2 >= usual * norm

        def ended(fault: str, is_gradual: bool, attempt: int) -> tuple[list[float], list[Record]]:
            run.plant(fault, is_gradual, attempt)
            norms, events = list[float](), list[Record]()
            for _ in range((_SPREAD if is_gradual else 1) + _AFTER):
                norms.append(run.take())
                events = [each for each in read_events(Path(folder, "run")) if each["step"]["global_step"] > HEALTHY]
                if fault and not all(map(is_natural, events)):
                    break
            return norms, events

        def forked(fault: str, is_gradual: bool, attempt: int = 0) -> tuple[list[float], list[Record]]:
            found = in_a_child(lambda: ended(fault, is_gradual, attempt))
            shutil.rmtree(f"{folder}/run")
            shutil.copytree(f"{folder}/before", f"{folder}/run")
            return found

        healthy += forked("", True)[0]
        rows = []
        for fault, is_gradual in kinds:
            for attempt in range(len(STRENGTHS)):
                events = forked(fault, is_gradual, attempt)[1]
                own = [event for event in events if not is_natural(event)]
                if own:
                    break
            row = {"model": model, "seed": seed, "fault": fault, "gradual": is_gradual, "strength": STRENGTHS[attempt]}
            run.plant(fault, is_gradual, attempt)
            natural = [event["fault"]["at"] for event in events if is_natural(event)]
            rows.append(row | {"natural": natural} | judged(run.fault, own))
        return rows


def keep(folder: Path, fault: str, model: str, seed: int) -> None:
    """Leave a run with a fault in a folder, for its report."""
    run = Run(Plan.of(model, seed), fault, folder=str(folder))
    for _ in range(HEALTHY + _SPREAD):
        run.take()
    run.watch.close()


def in_a_child(function: Callable[[], Any]) -> Any:
    """Call a function in a forked process and return its result."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=lambda: theirs.send(function()))
    child.start()
    theirs.close()  # else a child that fails would be waited for
    found = ours.recv()
    child.join()
    return found


def judged(fault: Plant, events: list[Record], healthy: int = HEALTHY) -> Record:
    """Return whether the first of these events names the planted fault."""
    first = next(iter(events), None)
    if first is None:
        return {"at": "no spike", "right": None}
    found, truth = first["fault"], FAULTS[fault.name]
    is_later = first["step"]["global_step"] > healthy + 2  # another update was in between
    right = {truth, "weights"} if truth == "last_update" and (fault.steps > 1 or is_later) else {truth}
    return {
        "at": found["at"],
        "label": found["label"],
        "right": found["at"] in right,
        "named": fault.parameter in found["parameters"][:3] if fault.parameter else None,
        "accused": len(first["culprits"]) if truth != "batch" else 0,
        "step": first["step"]["global_step"],
        "cost": first["search"]["forwards"] + 2 * first["search"]["backwards"],
    }


def warnings(model: str, seed: int, steps: int) -> list[Record]:
    """Return the early warnings of a run without a fault."""
    torch.set_num_threads(1)
    logger, heard = logging.getLogger("gradloc"), MemoryHandler(10**6, flushLevel=logging.CRITICAL + 1)
    logger.handlers, logger.propagate = [heard], False
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        run = Run(Plan.of(model, seed), folder=folder)
        for _ in range(steps):
            run.take()
        run.watch.close()
    lines = [entry.getMessage() for entry in heard.buffer]
    early = [line for line in lines if "as usual" in line or "outside of the optimizer" in line]
    return [{"model": model, "seed": seed, "steps": steps, "warnings": early}]


def matrix(rows: list[Record]) -> str:
    """Return the confusion matrix as a table; a cell counts runs with the fault at once, then with a gradual one."""
    ats = ("batch", "last_update", "weights", "after_backward", "undecided", "no spike")
    counts: dict[tuple[str, bool], Counter[str]] = {}
    for row in rows:
        counts.setdefault((row["fault"], row["gradual"]), Counter())[row["at"]] += 1
    ats = tuple(at for at in ats if any(count[at] for count in counts.values()))

    def cell(fault: str, at: str) -> str:
        return " / ".join(
            str(counts[fault, is_gradual][at]) for is_gradual in (False, True) if (fault, is_gradual) in counts
        )

    faults = sorted({fault for fault, _ in counts}, key=[*FAULTS].index)
    return table([("planted", *ats), *((fault, *(cell(fault, at) for at in ats)) for fault in faults)])


def two_by_two(model: str, seed: int, fault: str) -> list[list[float]]:
    """Return the norms of an earlier and of the spiking batch, before and after the last update."""
    run = Run(Plan.of(model, seed))
    is_late = FAULTS[fault] == "last_update"  # the step after the fault spikes
    for _ in range(HEALTHY - 1 + is_late):
        run.take()
    earlier, states = [*run.batches()], [copy.deepcopy(run.model.state_dict())]
    run.plant(fault if is_late else "", False)
    run.take()
    run.plant(fault, False)
    if FAULTS[fault] == "weights":
        run.fault.before_forward()
    states.append(copy.deepcopy(run.model.state_dict()))
    norms = []
    for batch in (earlier, [*run.batches()]):
        norms.append([])
        for state in states:
            run.model.load_state_dict(state)
            run.backward(batch)
            norms[-1].append(run.norm())
    return norms


def picture(path: Path, seed: int = 11) -> None:
    """Draw :func:`two_by_two` of a fault of each link."""
    torch.set_num_threads(1)
    faults = {"token": "batch", "learning_rate": "last update", "head_scale": "weights"}
    with figure(path, 9, len(faults), height=2.9) as (_, panels):
        for panel, (fault, link) in zip(panels, faults.items(), strict=True):
            norms = torch.tensor(two_by_two("gpt", seed, fault))
            panel.imshow(norms.log10(), cmap="OrRd", vmin=-0.6, vmax=2.8)
            for row, column in itertools.product((0, 1), (0, 1)):
                ink = "white" if norms[row, column] > 30 else "black"
                panel.text(column, row, f"{norms[row, column]:.3g}", ha="center", va="center", fontsize=13, color=ink)
            panel.set_xticks((0, 1), ("before the\nlast update", "at these\nweights"))
            panel.set_yticks((0, 1), ("earlier\nbatch", "this\nbatch") if panel is panels[0] else ("", ""))
            panel.set_title(f"{link}: {fault.replace('_', ' ')}", fontsize=11)
            panel.tick_params(length=0)


def sentence(rows: list[Record]) -> str:
    """Return a sentence on how many events are right."""
    judged = [row for row in rows if row["right"] is not None]
    named = [row for row in judged if row["named"] is not None]
    return (
        f"{sum(row['right'] for row in judged)} of {len(judged)} spikes have the right link; the parameter is among "
        f"the first three in {sum(row['named'] for row in named)} of {len(named)}; a token is accused in "
        f"{sum(row['accused'] > 0 for row in judged)} of those whose batch is not at fault."
    )


def report(rows: list[Record]) -> str:
    """Return the confusion matrix, and how many events are right."""
    return f"{matrix(rows)}\n\n{sentence(rows)}"


def warned(rows: list[Record]) -> str:
    """Return how many early warnings healthy steps gave."""
    total, steps = sum(len(row["warnings"]) for row in rows), sum(row["steps"] for row in rows)
    return f"{total} early warnings in {steps:,} healthy steps"


def main() -> int:
    made = Parser("links", __doc__)
    made.add_seeds(10, "fresh seeds of each fault and model")
    made.add_argument("--model", choices=MODELS, action="append")
    made.add_argument("--fault", choices=FAULTS, action="append")
    made.add_argument("--healthy", type=int, help="steps without a fault, in place of faults")
    made.add_argument("--picture", type=Path, help="draw the norms of both batches at both weights, and end")
    made.add_argument("--keep", type=Path, metavar="DIR", help="leave one run with a fault there, and end")
    made.add_argument("--processes", type=int, default=2)
    args = made.parse_args()
    if args.picture:
        picture(args.picture)
        return 0
    if args.keep:
        keep(args.keep, *(args.fault or ["token"])[:1], *(args.model or MODELS)[:1], *(args.seed or [3])[:1])
        return 0
    models = args.model or MODELS
    if args.healthy:
        args.seeds = max(args.healthy // (500 * len(models)), 1)
        work, given, said = warnings, 500, warned
    else:
        work, given, said = measure, list(itertools.product(args.fault or FAULTS, (False, True))), report
    cells = [(model, seed, given) for model, seed in itertools.product(models, seeds_of(args))]
    rows = [row for found in in_processes(work, cells, args.processes) for row in found]
    finish(args, {"rows": rows}, said(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""The tools that the collection compares, each as its own documentation attaches it to a loop.

A tool watches one run and answers with what it says about the spike: whether it noticed, the link, rows or tokens,
parameters. Packages are run as installed, at their defaults or at the settings named here, where these do better. Rules
without a package are a few lines of ours, from their papers; they are asked at the spike's step, which they need not
find. To add a tool, write a subclass of :class:`Tool` and list it in :data:`TOOLS`.
"""

import math
import statistics
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch

from lab.benchmarks.links import HEALTHY
from lab.benchmarks.spikes.collection import Kind, Row
from lab.experiments.verdict import read_events


@dataclass
class Answer:
    """A tool's answer about a spike."""

    step: int | None = None
    """The step at which it noticed something, counted from 0; None for never."""
    link: str = ""
    """The link that it names; empty where it names none."""
    rows: list[Row] = field(default_factory=list)
    """Rows that it names, the surest first."""
    tokens: list[tuple[int, int, int]] = field(default_factory=list)
    """Tokens that it names: micro-batch, row, position."""
    parameters: list[str] = field(default_factory=list)
    """Parameters that it names, the surest first."""
    num_accused: int | None = None
    """How many of the rows it accuses, the first ones, where it ranks more; None for all."""


class Tool:
    """A tool on one run; this one says nothing.

    Args:
        folder: an empty folder, for what the tool writes.
    """

    name = ""
    package = ""
    """The distribution to install; empty for a rule of a few lines."""
    settings = ""
    """Settings that are not its defaults."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.norms: list[float] = []

    @classmethod
    def version(cls) -> str:
        """Return the installed version; empty for a rule, "absent" where the package is not installed."""
        try:
            return metadata.version(cls.package) if cls.package else ""
        except metadata.PackageNotFoundError:
            return "absent"

    def given(self) -> dict[str, object]:
        """Return the arguments of :class:`Kind` that attach the tool."""
        return {}

    def attach(self, run: Kind) -> None:
        """Attach the tool to a run that begins."""

    def after_backward(self, run: Kind, norm: float) -> None:
        """Note a step, between its backward and its clipping."""
        self.norms.append(norm)

    def answer(self, run: Kind, spike: int) -> Answer:
        """Return the tool's answer, once the run has ended or the spike's step is over."""
        return Answer()


class GradLoc(Tool):
    """GradLoc, observing."""

    name, package = "GradLoc", "gradloc"

    def given(self) -> dict[str, object]:
        return {"folder": str(self.folder)}

    def answer(self, run: Kind, spike: int) -> Answer:
        steps = {event["step"]["global_step"] - 1: event for event in reversed(read_events(self.folder))}
        step = next((step for step in (spike, spike + 1) if step in steps), None)
        if step is None:
            return Answer()
        event = steps[step]
        link, culprits = event["fault"]["at"], event["culprits"]
        rows = [(each["micro_batch"], each["micro_batch_row"]) for each in culprits]
        tokens = [(*row, at) for row, each in zip(rows, culprits, strict=True) for at in each["positions"]]
        parameters = event["fault"]["parameters"] or ((event["cause"] or {}).get("names") or [])
        return Answer(step, link, [*dict.fromkeys(rows)], tokens, parameters)


class Bisection(GradLoc):
    """The published bisection: halves of the batch by their norm, under the published fixed budget."""

    name, settings = "published bisection", "search.strategy=bisect"

    def given(self) -> dict[str, object]:
        return {**super().given(), "search": {"strategy": "bisect"}}

    def answer(self, run: Kind, spike: int) -> Answer:
        found = super().answer(run, spike)
        return Answer(found.step, "batch" if found.tokens else "", found.rows, found.tokens)


class TrainScope(Tool):
    """trainscope: the layers whose gradient grew most, as its page ranks them."""

    name, package = "trainscope", "trainscope"

    def attach(self, run: Kind) -> None:
        from trainscope import TrainScope as Scope
        from trainscope.core.config import TrainScopeConfig

        self.alarms: list[int] = []
        self.layers: list[dict[str, float]] = []
        config = TrainScopeConfig(run_dir=str(self.folder), run_name="run")
        self.scope = Scope(run.model, run.optimizer, config).attach()

    def after_backward(self, run: Kind, norm: float) -> None:
        super().after_backward(run, norm)
        loss = sum(float(each.mean()) for each in run.losses) / len(run.losses)
        if self.scope.step(loss, batch_index=run.step):
            self.alarms.append(run.step)
        grads = {name: each.grad for name, each in run.model.named_parameters() if each.grad is not None}
        self.layers.append({name: float(grad.norm()) for name, grad in grads.items()})

    def answer(self, run: Kind, spike: int) -> Answer:
        usual = {name: statistics.median(each[name] for each in self.layers[:spike]) for name in self.layers[0]}
        growth = {name: norm / max(usual[name], 1e-12) for name, norm in self.layers[spike].items()}
        alarm = next((step for step in self.alarms if step >= HEALTHY), None)
        return Answer(alarm, parameters=sorted(growth, key=lambda name: -growth[name])[:3])


class RlDoctor(Tool):
    """rldoctor, on the metrics that a loop logs: whether the spike's step adds to what it reports."""

    name, package = "rldoctor", "rldoctor"

    def answer(self, run: Kind, spike: int) -> Answer:
        return Answer(spike if self._count(spike + 1) > self._count(spike) else None)

    def _count(self, num_steps: int) -> int:
        """Return how many spikes and norms that are not finite it reports in the first steps."""
        from rl_doctor import diagnose, run_from_records

        records = [{"step": step, "grad_norm": norm} for step, norm in enumerate(self.norms[:num_steps])]
        findings = diagnose(run_from_records(records)).findings
        metrics = next(each for each in findings if each.detector == "gradient_pathology").metrics
        return metrics.get("n_spikes", 0) + metrics.get("n_nonfinite", 0)


class RlProbe(Tool):
    """rlprobe, on metrics and rows; what drove a step are the rows with the largest advantages."""

    name, package = "rlprobe", "rlprobe"
    settings = "grad_pathology.min_spikes=1"

    def attach(self, run: Kind) -> None:
        from rlprobe import Recorder, SamplingConfig

        sampling = SamplingConfig(top_k=64, bottom_k=64, random_k=64)
        self.recorder = Recorder(self.folder / "run", algorithm="grpo", sampling=sampling)

    def after_backward(self, run: Kind, norm: float) -> None:
        super().after_backward(run, norm)
        loss = float(torch.cat(run.losses).mean())
        self.recorder.log_step(run.step, grad_norm=norm, loss=loss, nan_count=int(not math.isfinite(norm)))
        samples = [
            {"sample_id": f"{number}-{row}", "advantage": float(weights[row].mean())}
            for number, weights in enumerate(run.weights)
            for row in range(len(weights))
        ]
        self.recorder.log_samples(run.step, samples)

    def answer(self, run: Kind, spike: int) -> Answer:
        from rlprobe.doctor import diagnose, spike_drivers

        self.recorder.close()
        findings = diagnose(self.folder / "run", config={"grad_pathology": {"min_spikes": 1}})
        alarms = [each.first_step for each in findings if each.signature_id == "GRAD_PATHOLOGY"]
        alarm = next((step for step in alarms if step is not None and step >= HEALTHY), None)
        drivers = [each.sample_id.split("-") for each in spike_drivers(self.folder / "run", spike, window=0, k=3)]
        return Answer(alarm, "batch", [(int(number), int(row)) for number, row in drivers], num_accused=1)


class ZClip(Tool):
    """ZClip's test (arXiv 2504.02507), as its package computes it: it clips the step, and names nothing."""

    name, package = "ZClip", "zclip"

    def attach(self, run: Kind) -> None:
        from zclip import ZClip as Clip

        self.clip, self.noticed = Clip(), []

    def after_backward(self, run: Kind, norm: float) -> None:
        super().after_backward(run, norm)
        clip = self.clip
        if not clip.initialized:
            clip.buffer.append(norm)
            if len(clip.buffer) >= clip.warmup_steps:
                clip._initialize_ema()
            self.noticed.append(False)
            return
        limit = clip._compute_clip_val(norm)
        clip._update_ema(norm if limit is None else limit)
        self.noticed.append(limit is not None)

    def answer(self, run: Kind, spike: int) -> Answer:
        return Answer(spike if self.noticed[spike] else None)


class SkipStep(Tool):
    """OLMo-core's rule: six standard deviations above the mean of the last 128 norms skips the step."""

    name = "OLMo's skip"

    def answer(self, run: Kind, spike: int) -> Answer:
        past = self.norms[max(0, spike - 128) : spike]
        limit = statistics.mean(past) + 6 * statistics.stdev(past)
        return Answer(None if self.norms[spike] <= limit else spike)


class _Ranked(Tool):
    """A rule that ranks the tokens by some number, and accuses the first."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.scored: list[list[torch.Tensor]] = []

    def after_backward(self, run: Kind, norm: float) -> None:
        super().after_backward(run, norm)
        pairs = zip(run.losses, run.weights, strict=True)
        self.scored.append([self.scores(*each).nan_to_num(math.inf, math.inf) for each in pairs])

    def scores(self, losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return a number of each token (B, T), or of each row (B, 1)."""
        raise NotImplementedError

    def answer(self, run: Kind, spike: int) -> Answer:
        scored = torch.stack(self.scored[spike])
        first = scored.flatten().topk(min(3, scored.numel())).indices
        tokens = [*map(tuple, torch.stack(torch.unravel_index(first, scored.shape), 1).tolist())]
        rows = [*dict.fromkeys((number, row) for number, row, _ in tokens)]
        return Answer(spike, "batch", rows, tokens, num_accused=1)


class LargestLoss(_Ranked):
    """The tokens with the largest loss."""

    name = "largest loss"

    def scores(self, losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return losses.abs()


class LargestAdvantage(_Ranked):
    """The tokens with the largest absolute advantage."""

    name = "largest advantage"

    def scores(self, losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return weights.abs()


class RowShare(_Ranked):
    """The rows with the largest share of the loss, as Soup's ``rewind`` ranks them."""

    name = "row's loss share"

    def scores(self, losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return losses.abs().sum(1, keepdim=True)

    def answer(self, run: Kind, spike: int) -> Answer:
        found = super().answer(run, spike)
        return Answer(found.step, found.link, found.rows, num_accused=1)


TOOLS: dict[str, type[Tool]] = {
    each.name: each
    for each in (
        GradLoc,
        Bisection,
        TrainScope,
        RlDoctor,
        RlProbe,
        ZClip,
        SkipStep,
        LargestLoss,
        LargestAdvantage,
        RowShare,
    )
}
"""Every tool, by name."""

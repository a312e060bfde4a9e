# SPDX-License-Identifier: Apache-2.0
"""Training loops of every kind of loss, with planted tokens: does ``gradloc.Watch(model, folder=...)`` name them?

A kind is a training loop as people write it. The seed draws a tiny Llama, its data, and one or two tokens whose loss
weighs hundreds to thousands of times as much as another's in the third step. The loop runs three times: plain, with
the planted tokens' loss at 0, which gives the truth, and with a watch. Each kind runs with dL/dlogits kept, and without
(``keep_gb=0``), as with a vocabulary too large to keep them.

Shapes: B rows of a micro-batch, T positions, V vocabulary.
"""

import contextlib
import io
import math
import random
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel

import gradloc
from tests.world.events import events_in

VOCABULARY, HIDDEN, ROWS = 96, 32, 2
"""ROWS of a micro-batch."""
Place = tuple[int, int, int]
"""Micro-batch over all ranks, row in it, position."""


@dataclass
class MicroBatch:
    """Hold the tensors that a loop has for one micro-batch."""

    ids: torch.Tensor
    """(B, T)"""
    weight: torch.Tensor
    """(B, T), how much each position's loss weighs: 0 where nothing is trained on."""
    noise: torch.Tensor
    """(B, T), normal: each kind makes of it what it needs besides."""
    teacher: torch.Tensor
    """(B, T, V), normal."""


class Loop:
    """Cross-entropy of the next token; other kinds change one thing.

    Args:
        seed: of the model, the data and the planted tokens.
        without: planted tokens whose loss weighs nothing; None: all of them.
        layout: ``plain``, ``ddp``, ``fsdp2`` or ``fsdp1``.
    """

    num_steps = 3
    """The last is spoiled."""
    is_tied = False
    dtype = torch.float32
    autocast: torch.dtype | None = None
    is_one_term = False
    """True where each row has a single loss term, so that no token has a weight of its own."""

    def __init__(self, seed: int, without: Collection[Place] | None = (), layout: str = "plain"):
        draw = self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.seed, self.layout = seed, layout
        self.rank, self.size = (0, 1) if layout == "plain" else (dist.get_rank(), dist.get_world_size())
        self.count, self.width = draw.choice((3, 4)), draw.randint(8, 14)
        spread, sharpness = draw.choice((0.02, 0.05, 0.1)), draw.choice((1.0, 3.0, 6.0))
        self.config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=spread,
            tie_word_embeddings=self.is_tied,
            pad_token_id=None,
            use_cache=False,
        )
        self.bare = self.build().to(self.dtype)
        with torch.no_grad():
            self.head().weight.mul_(sharpness)
        self.bare.train()
        self.planted = self.plant()
        self.without = set(self.planted) if without is None else set(without)
        self.model: Any = wrapped(self.bare, layout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.norm, self.taken = math.nan, torch.empty(0)
        """The last step's norm before clipping, and the flat gradient that the optimizer got."""

    def build(self) -> Any:
        return LlamaForCausalLM(self.config)

    def head(self) -> torch.nn.Module:
        return self.bare.lm_head

    def plant(self) -> dict[Place, float]:
        """The planted positions, and what each weighs."""
        worth = 10 ** self.draw.uniform(2.7, 4.0)
        found: dict[Place, float] = {}
        while len(found) < self.num_planted():
            place = (self.draw.randrange(self.count * self.size), self.draw.randrange(ROWS), self.place())
            found[place] = worth * self.draw.uniform(1.0, 2.0)
        return found

    def num_planted(self) -> int:
        return self.draw.choice((1, 2))

    def place(self) -> int:
        return self.draw.randrange(self.width - 1)

    def batch(self, step: int) -> Iterator[MicroBatch]:
        """This rank's micro-batches."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        for index in range(self.count * self.size):
            ids = torch.randint(VOCABULARY, (ROWS, self.width), generator=generator)
            noise = torch.randn(ROWS, self.width, generator=generator)
            teacher = 2 * torch.randn(ROWS, self.width, VOCABULARY, generator=generator)
            weight = self.usual(torch.rand(ROWS, self.width, generator=generator))
            weight[:, -1] = 0.0  # has no next token
            for (of, row, position), worth in self.planted.items():
                if step == self.num_steps and of == index:
                    is_left = (of, row, position) not in self.without
                    weight[row, position] = worth if is_left or self.is_one_term else 0.0
            if index // self.count == self.rank:
                yield MicroBatch(ids, weight, noise, teacher)

    def usual(self, drawn: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(drawn)

    def run(self) -> "Loop":
        for step in range(1, self.num_steps + 1):
            self.optimizer.zero_grad()
            for micro_batch in self.batch(step):
                with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
                    loss = self.loss(micro_batch) / (ROWS * self.width * self.count)
                self.backward(loss)
            self.before_step()
            self.norm = self.norm_now()
            self.clip()
            self.step()
        return self

    def logits(self, micro_batch: MicroBatch) -> torch.Tensor:
        return self.model(input_ids=micro_batch.ids).logits

    def loss(self, micro_batch: MicroBatch) -> torch.Tensor:
        return (self.each(self.logits(micro_batch).float(), micro_batch) * micro_batch.weight).sum()

    def each(self, logits: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        """Each position's loss, (B, T)."""
        return -log_probs(logits, micro_batch.ids)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def before_step(self) -> None:
        """Between the last backward and the clip."""

    def clip(self) -> None:
        """By the loop's own call."""

    def step(self) -> None:
        self.optimizer.register_step_pre_hook(self.take) if self.taken.numel() == 0 else None
        self.optimizer.step()

    def take(self, *_: Any) -> None:
        self.taken = torch.cat([whole(param.grad).flatten().float() for param in self.given()] or [torch.zeros(1)])

    def given(self) -> list[torch.nn.Parameter]:
        return [param for param in self.model.parameters() if param.grad is not None]

    def norm_now(self) -> float:
        squares = [whole(param.grad).double().square().sum() for param in self.given()]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        if self.layout == "fsdp1":
            dist.all_reduce(total)
        return float(total.sqrt())

    def named(self, culprit: dict[str, Any]) -> list[Place]:
        """The places of a named culprit's tokens: rows count over all ranks."""
        row = int(culprit["row"])
        return [(row // ROWS, row % ROWS, position) for position in culprit["positions"]]

    def is_planted(self) -> set[Place]:
        return set(self.planted)


def log_probs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-prob of the next token at each position, (B, T); 0 at the last."""
    found = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return functional.pad(found, (0, 1))


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()


def wrapped(model: Any, layout: str) -> Any:
    if layout == "ddp":
        return DDP(model)
    layers = getattr(model, "model", model).layers
    if layout == "fsdp2":
        for layer in layers:
            fully_shard(layer)
        return fully_shard(model)
    if layout == "fsdp1":
        policy = ModuleWrapPolicy({type(layers[0])})
        return FSDP1(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True)
    return model


# ---- losses


class Weighted(Loop):
    """Each token has a weight, a fifth of them 0; the model gets no last token."""

    def usual(self, drawn):
        return torch.where(drawn < 0.2, 0.0, 2 * drawn)

    def logits(self, micro_batch):
        return functional.pad(self.model(input_ids=micro_batch.ids[:, :-1]).logits, (0, 0, 0, 1))


class Tied(Loop):
    """Embeddings tied to the head."""

    is_tied = True


class Smoothed(Loop):
    """Label smoothing by torch's cross_entropy."""

    def each(self, logits, micro_batch):
        labels = functional.pad(micro_batch.ids[:, 1:], (0, 1), value=-100).flatten()
        found = functional.cross_entropy(logits.flatten(0, 1), labels, reduction="none", label_smoothing=0.1)
        return found.view(micro_batch.ids.shape)


class ZLoss(Loop):
    """A z-loss: the square of the log-sum-exp."""

    def each(self, logits, micro_batch):
        return -log_probs(logits, micro_batch.ids) + 1e-2 * logits.logsumexp(-1).square()


class WithValues(LlamaForCausalLM):
    """Returns logits and values."""

    def __init__(self, config):
        super().__init__(config)
        self.value = torch.nn.Linear(HIDDEN, 1)

    def forward(self, input_ids):
        found = super().forward(input_ids=input_ids, output_hidden_states=True)
        return found.logits, self.value(found.hidden_states[-1]).squeeze(-1)


class Valued(Loop):
    """A value head on the same hidden state, of which nothing is said."""

    def build(self):
        return WithValues(self.config)

    def loss(self, micro_batch):
        logits, values = self.model(input_ids=micro_batch.ids)
        value_losses = functional.mse_loss(values.float(), micro_batch.noise, reduction="none")
        return ((0.1 * value_losses - log_probs(logits.float(), micro_batch.ids)) * micro_batch.weight).sum()


class ValueOutlier(Valued):
    """The planted position's return is far off; its log-prob is as others."""

    def loss(self, micro_batch):
        logits, values = self.model(input_ids=micro_batch.ids)
        far = torch.where(micro_batch.weight > 1, micro_batch.weight, micro_batch.noise)
        value_losses = functional.mse_loss(values.float(), far, reduction="none")
        return ((value_losses - log_probs(logits.float(), micro_batch.ids)) * (micro_batch.weight > 0)).sum()


class DeepValued(Valued):
    """A value head of two layers behind dropout, as trl's."""

    def build(self):
        model = WithValues(self.config)
        first, last = torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, 1)
        model.value = torch.nn.Sequential(torch.nn.Dropout(0.1), first, torch.nn.Tanh(), last)
        return model


class EmbeddedOutside(Loop):
    """Embeddings made before the model is called, so that its input comes with a graph."""

    def logits(self, micro_batch):
        return self.model(inputs_embeds=self.bare.model.embed_tokens(micro_batch.ids)).logits


class Entropy(Loop):
    """An entropy bonus."""

    def each(self, logits, micro_batch):
        every = logits.log_softmax(-1)
        return -log_probs(logits, micro_batch.ids) + 0.05 * (every.exp() * every).sum(-1)


class Ppo(Loop):
    """The clipped surrogate at the first update: each ratio is 1."""

    ratio = 1.0

    def each(self, logits, micro_batch):
        found = log_probs(logits, micro_batch.ids)
        is_planted = micro_batch.weight > 100
        old = found.detach() - torch.where(is_planted, math.log(self.ratio), self.drift(micro_batch))
        ratio = (found - old).exp()
        advantages = torch.where(is_planted, -1.0, micro_batch.noise)
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)

    def drift(self, micro_batch):
        return torch.zeros_like(micro_batch.noise)


class PpoFar(Ppo):
    """A later one: ratios differ, some are clipped, and the planted token's is 3 under a negative advantage."""

    ratio = 3.0

    def drift(self, micro_batch):
        return 0.2 * micro_batch.noise.roll(1, 1)


class Dpo(Loop):
    """Preference pairs, the policy called once for each half; a planted token's log-prob counts for many."""

    is_one_term = True

    def batch(self, step):
        self.is_planted_step = step == self.num_steps
        for index, micro_batch in enumerate(super().batch(step)):
            self.index = self.rank * self.count + index
            yield micro_batch

    def plant(self):
        return {place: worth / 10 for place, worth in super().plant().items()}

    def loss(self, micro_batch):
        kept = torch.ones_like(micro_batch.weight, dtype=torch.bool)
        for index, row, position in self.without if self.is_planted_step else ():
            kept[row, position] &= index != self.index
        sums = []
        for half in range(2):
            ids = micro_batch.ids[half : half + 1]
            found = log_probs(self.model(input_ids=ids).logits.float(), ids)
            found = torch.where(kept[half], found, found.detach())
            reference = found.detach() + 0.1 * micro_batch.noise[half] / micro_batch.weight[half].clamp(min=1.0)
            sums.append(((found - reference) * micro_batch.weight[half]).sum())
        return -functional.logsigmoid(0.1 * (sums[0] - sums[1])) * self.width

    def named(self, culprit):
        row = int(culprit["row"])
        return [(row // 2, row % 2, position) for position in culprit["positions"]]


class Distilled(Loop):
    """The divergence from a teacher, over all words."""

    def each(self, logits, micro_batch):
        given = micro_batch.teacher.log_softmax(-1)
        return (given.exp() * (given - logits.log_softmax(-1))).sum(-1)


class RewardPair(Loop):
    """Bradley and Terry's loss of two answers' scores; a planted pair counts for many.

    The lower score is the chosen one's, so that no pair is without a gradient.
    """

    def build(self):
        self.config.num_labels, self.config.pad_token_id = 1, None
        return LlamaForSequenceClassification(self.config)

    def head(self):
        return self.bare.score

    def plant(self):
        return {(index, 0, self.width - 2): worth for (index, _, _), worth in super().plant().items()}

    def num_planted(self):
        return 1

    def loss(self, micro_batch):
        scores = [self.model(input_ids=micro_batch.ids[row : row + 1]).logits.float().squeeze() for row in range(2)]
        weight = micro_batch.weight[0, self.width - 2]
        return -functional.logsigmoid(-(scores[0] - scores[1]).abs()) * weight * self.width

    def is_planted(self):
        return {(index, row, self.width - 1) for index, _, _ in self.planted for row in range(2)}


class Chunked(Loop):
    """The body is called by itself, and the head on some rows at a time."""

    def loss(self, micro_batch):
        hidden = self.model.model(input_ids=micro_batch.ids).last_hidden_state
        labels = functional.pad(micro_batch.ids[:, 1:], (0, 1)).flatten()
        total = hidden.new_zeros(())
        flat = zip(hidden.flatten(0, 1).split(5), labels.split(5), micro_batch.weight.flatten().split(5), strict=True)
        for rows, wanted, weight in flat:
            logits = self.model.lm_head(rows).float()
            total = total + (functional.cross_entropy(logits, wanted, reduction="none") * weight).sum()
        return total


class Fused(Loop):
    """The head's weight is multiplied by a function, in pieces; the head is not called."""

    def loss(self, micro_batch):
        hidden = self.model.model(input_ids=micro_batch.ids).last_hidden_state
        labels = functional.pad(micro_batch.ids[:, 1:], (0, 1)).flatten()
        logits = functional.linear(hidden.flatten(0, 1), self.model.lm_head.weight).float()
        return (functional.cross_entropy(logits, labels, reduction="none") * micro_batch.weight.flatten()).sum()


class FusedModel(LlamaForCausalLM):
    """Returns each position's loss, and calls no head."""

    def forward(self, input_ids, labels):
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = functional.linear(hidden.flatten(0, 1), self.lm_head.weight).float()
        return functional.cross_entropy(logits, labels.flatten(), reduction="none").view(labels.shape)


class FusedInside(Loop):
    """As liger's: the model's own forward does so."""

    def build(self):
        return FusedModel(self.config)

    def loss(self, micro_batch):
        labels = functional.pad(micro_batch.ids[:, 1:], (0, 1))
        return (self.model(input_ids=micro_batch.ids, labels=labels) * micro_batch.weight).sum()


class Checkpointed(Chunked):
    """The head and the loss of some rows at a time, computed again in the backward."""

    def loss(self, micro_batch):
        hidden = self.model.model(input_ids=micro_batch.ids).last_hidden_state
        labels = functional.pad(micro_batch.ids[:, 1:], (0, 1)).flatten()
        parts = zip(hidden.flatten(0, 1).split(5), labels.split(5), micro_batch.weight.flatten().split(5), strict=True)

        def part(rows, wanted, weight):
            return (functional.cross_entropy(self.model.lm_head(rows), wanted, reduction="none") * weight).sum()

        return sum(checkpoint(part, *each, use_reentrant=False) for each in parts)


class Contrastive(Loop):
    """No head: a row's mean hidden state is to be near another's; a planted position counts for more in its mean."""

    is_one_term = True

    def build(self):
        return LlamaModel(self.config)

    def head(self):
        return self.bare.embed_tokens

    def batch(self, step):
        self.is_planted_step = step == self.num_steps
        for index, micro_batch in enumerate(super().batch(step)):
            self.index = self.rank * self.count + index
            yield micro_batch

    def loss(self, micro_batch):
        hidden = self.model(input_ids=micro_batch.ids).last_hidden_state.float()
        for index, row, position in self.without if self.is_planted_step else ():
            if index == self.index:
                keep = torch.ones_like(micro_batch.weight, dtype=torch.bool)
                keep[row, position] = False
                hidden = torch.where(keep.unsqueeze(-1), hidden, hidden.detach())
        means = (hidden * micro_batch.weight.unsqueeze(-1)).mean(1)
        return (means - micro_batch.teacher.mean(1)[:, :HIDDEN]).abs().sum()


# ---- what happens to the gradient


class Times8(Loop):
    """Gradients are multiplied by 8 after the backward."""

    def before_step(self):
        for param in self.given():
            param.grad.mul_(8.0)


class Clipped(Loop):
    """The loop clips by torch's function."""

    def clip(self):
        if isinstance(self.model, FSDP1):
            self.model.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


class ByLargest(Loop):
    """The loop's limit is on the gradient's largest element."""

    def clip(self):
        if isinstance(self.model, FSDP1):
            self.model.clip_grad_norm_(0.05, math.inf)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05, norm_type=math.inf)


class Groups(Loop):
    """Two calls, for the layers and for the rest."""

    def clip(self):
        named = list(self.model.named_parameters())
        for is_layer, limit in ((True, 0.5), (False, 1.0)):
            part = [param for name, param in named if ("layers" in name) == is_layer]
            torch.nn.utils.clip_grad_norm_(part, limit)


class ByValue(Loop):
    """Each element is clipped."""

    def clip(self):
        torch.nn.utils.clip_grad_value_(self.model.parameters(), 0.01)


# ---- precision


class Half(Clipped):
    """float16 under autocast, with a scaler."""

    autocast = torch.float16

    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # a larger one overflows, and the step is skipped

    def plant(self):
        return {place: worth / 4 for place, worth in super().plant().items()}

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def before_step(self):
        self.scaler.unscale_(self.optimizer)

    def step(self):
        self.optimizer.register_step_pre_hook(self.take) if self.taken.numel() == 0 else None
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Bfloat16Weights(Loop):
    """Weights and gradients in bfloat16."""

    dtype = torch.bfloat16


class Bfloat16Autocast(Clipped):
    """bfloat16 under autocast."""

    autocast = torch.bfloat16


KINDS: dict[str, type[Loop]] = {
    "cross-entropy": Loop,
    "weighted": Weighted,
    "tied": Tied,
    "smoothed": Smoothed,
    "z-loss": ZLoss,
    "value-head": Valued,
    "value-outlier": ValueOutlier,
    "value-of-two-layers": DeepValued,
    "embedded-outside": EmbeddedOutside,
    "entropy-bonus": Entropy,
    "ppo-ratio-1": Ppo,
    "ppo-ratio-3": PpoFar,
    "dpo": Dpo,
    "distilled": Distilled,
    "reward-pair": RewardPair,
    "chunked": Chunked,
    "fused-head": Fused,
    "fused-inside": FusedInside,
    "checkpointed-chunks": Checkpointed,
    "contrastive": Contrastive,
    "times-8": Times8,
    "clipped": Clipped,
    "clipped-by-largest": ByLargest,
    "clipped-by-group": Groups,
    "clipped-by-value": ByValue,
    "fp16-scaler": Half,
    "bfloat16-weights": Bfloat16Weights,
    "bfloat16-autocast": Bfloat16Autocast,
}
KEPT = {"kept": 0.25, "not kept": 0.0}
"""``keep_gb`` of the two runs with a watch."""


@dataclass(frozen=True)
class Found:
    """Hold the watch's verdict on one seed."""

    named: int
    """Planted tokens that were named."""
    planted: int
    innocents: int
    verdict: str
    error: float
    """Relative error of the certificate's norm; NaN without a certificate."""
    is_within: bool
    """True where that error is within the certificate's own bound, plus a millionth for rounding."""
    taken: str
    apart: float
    """The gradient that the optimizer got under ``mask`` against the truth's, relative; NaN: it was not masked."""
    said: str


def measure(kind: str, seed: int, layout: str = "plain", keeps: tuple[str, ...] = tuple(KEPT)) -> dict[str, Found]:
    """One seed of a kind, for each of ``keeps``; in a layout all ranks call this together."""
    make = KINDS[kind]
    spoiled, truth = make(seed, layout=layout).run(), make(seed, None, layout).run()
    tokens = sum(int((each.weight != 0).sum()) for each in truth.batch(1)) * truth.size
    tau = math.sqrt(spoiled.norm * truth.norm * tokens)
    found = {}
    for name in keeps:
        with tempfile.TemporaryDirectory() as folder:
            folder = shared(folder, layout)
            made = make(seed, layout=layout)
            with contextlib.redirect_stdout(io.StringIO()):
                action = {"mode": "mask", "max_masked_share": 1.0}
                watch = gradloc.Watch(
                    made.model, folder=folder, action=action, keep_gb=KEPT[name], trigger={"tau": tau}
                )
                made.run()
            watch.close()
            if layout != "plain":
                dist.barrier()  # the first rank has written
            events = events_in(folder)
            if layout != "plain":
                dist.barrier()  # every rank has read; the first one deletes its folder
            found[name] = judged(made, truth, events, math.sqrt(spoiled.norm * truth.norm))
    return found


def shared(folder: str, layout: str) -> str:
    """The first rank's folder, for all."""
    if layout == "plain":
        return folder
    names = [folder]
    dist.broadcast_object_list(names)
    return names[0]


def judged(made: Loop, truth: Loop, events: list[dict[str, Any]], threshold: float) -> Found:
    """A planted token counts where the step is over the threshold without the others."""
    planted = made.is_planted()
    if len(events) != 1 or events[0]["step"]["global_step"] != made.num_steps:
        steps = [event["step"]["global_step"] for event in events]
        return Found(0, len(planted), 0, "no event", math.nan, False, "", math.nan, f"events at steps {steps}")
    event = events[0]
    certificate, action = event["certificate"], event["action"]
    named = {place for culprit in event["culprits"] for place in made.named(culprit)}
    if len(planted) == len(made.planted) and named and named < planted:
        truth = type(made)(made.seed, named, made.layout).run()
        planted = planted if truth.norm >= threshold else named
    after, bound = certificate["norm_after"], certificate.get("error_bound") or 0.0
    off = math.nan if after is None or not event["culprits"] else abs(after - truth.norm)
    apart = math.nan
    if action["taken"] == "mask":
        apart = float((made.taken - truth.taken).norm() / truth.taken.norm())
    return Found(
        len(named & planted),
        len(planted),
        len(named - planted),
        certificate["verdict"],
        off / truth.norm,
        off <= bound + 1e-6 * truth.norm,
        action["taken"],
        apart,
        f"{certificate.get('reason')}; {action.get('reason')}",
    )

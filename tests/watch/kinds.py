# SPDX-License-Identifier: Apache-2.0
"""Kinds of models, losses, optimizers and loops, each tiny, under the one line ``gradloc.Watch(model, folder=...)``.

A kind is a class. It runs as people write it, with one token's loss spoiled in one step: multiplied, or, where the
model computes the loss itself, with a label whose row of the head is a thousand times too long.

Shapes: R rows of a batch, B of a micro-batch, T positions, V vocabulary, H hidden size.
"""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import gradloc

ROWS, ROWS_EACH, T, VOCABULARY, H = 4, 2, 8, 64, 16
STEPS, SPIKE, PLANT = 3, 2, (3, 2)
"""Optimizer steps, the one that is spoiled, and in which row and at which position of all ranks' batch."""
WORTH = 4000.0
POISON, POISON_TIMES = VOCABULARY - 1, 1000.0
"""A label, and how much too long its row of the head is, where the model computes the loss."""
TAU = {"trigger": {"tau": 20.0}}
"""A fixed threshold between a healthy step and a planted one."""


def transformers_model(name: str, task: str = "CausalLM", **config: Any) -> Any:
    """Return a model of this name, made for this task."""
    import transformers

    return getattr(transformers, f"{name}For{task}")(getattr(transformers, f"{name}Config")(**config))


def llama(**given: Any) -> Any:
    return transformers_model("Llama", **sizes(**given))


def sizes(**given: Any) -> dict[str, Any]:
    """Return what the configurations of decoders share."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    small = {"vocab_size": VOCABULARY, "hidden_size": H, "intermediate_size": 24, "max_position_embeddings": 64}
    return {**small, **heads, "attn_implementation": "eager", "pad_token_id": 0, **given}


class Kind:
    """Llama with a weighted cross-entropy, in a plain loop that clips.

    Args:
        folder: of the run; empty: nothing is watched.
        action: as of ``gradloc.Watch``.
        is_planted: whether the planted token has a loss; if not, the run is what masking has to give.
    """

    rows_each = ROWS_EACH
    rows = ROWS
    is_exact = True
    """Whether the masked step is bit for bit the one without the token; else the class says why not."""
    close = 1e-6
    """Else, how far the weights of another order of sums may be apart."""
    off = 1e-4
    """How far a certificate's norm may be from the true one, relative."""
    has_norm = True
    """Whether ``norms`` are L2 norms before the clip."""
    norms_are_taken = False
    """Whether they are of the gradient that the optimizer was given, as ``Watch.clip_grad_norm_`` returns them."""
    is_searched = True
    """Whether the gradient of every parameter is; else a step that spikes is skipped, and why is said."""
    steps, spike, plant = STEPS, SPIKE, PLANT
    named = [PLANT]
    """Rows and positions that the event names."""
    num_events = 1
    limit, order = 1.0, 2.0
    """Of the norm that is clipped."""
    config: Any = {}
    """More for a Llama's configuration."""
    needs: tuple[str, ...] = ("transformers",)
    """Packages; without one the kind is left out."""
    settings: Any = {}
    """Others for ``gradloc.Watch``."""

    def __init__(self, folder: Path | str = "", action: str = "observe", is_planted: bool = True):
        self.folder, self.action, self.is_planted = folder, action, is_planted
        torch.manual_seed(7)
        self.model = self.build()
        self.watch = None
        self.norms: list[float] = []
        self.prepare()

    def build(self) -> Any:
        return llama(**self.config)

    def prepare(self) -> None:
        self.add_watch(self.model)
        self.optimizer = self.build_optimizer()

    def add_watch(self, model: Any) -> None:
        if self.folder:
            action = {"mode": self.action, "max_masked_share": 1.0}
            self.watch = gradloc.Watch(model, folder=self.folder, action=action, **(TAU | self.settings))

    def build_optimizer(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids).logits

    def loss(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return a micro-batch's loss.

        Args:
            ids: (B, T + 1).
            weight: (B, T), of the token that each position predicts.
        """
        return weighted(self.logits(ids[:, :-1]), ids[:, 1:], weight)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        loss.backward()

    def clip(self) -> Any:
        """Return the norm before."""
        return plain(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.limit, self.order))

    def take_step(self) -> None:
        self.norms.append(float(self.clip()))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, ids: torch.Tensor, weight: torch.Tensor) -> None:
        parts = torch.arange(len(ids)).split(self.rows_each)
        for part in parts:
            self.backward(self.loss(ids[part], weight[part]), part is parts[-1])
        self.take_step()

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """ids (R, T + 1) and weights (R, T)."""
        generator = torch.Generator().manual_seed(1)
        for number in range(1, self.steps + 1):
            ids = torch.randint(1, VOCABULARY - 1, (self.rows, T + 1), generator=generator)
            weight = torch.ones(self.rows, T)
            if number == self.spike:
                weight[self.plant] = WORTH if self.is_planted else 0.0
            yield ids, weight

    def run(self) -> "Kind":
        seed(11)
        self.train()
        return self

    def train(self) -> None:
        for ids, weight in self.batches():
            self.step(ids, weight)

    def result(self) -> dict[str, Any]:
        """Return everything that a watch may not move."""
        weights = {name: plain(param.detach()).clone() for name, param in self.model.named_parameters()}
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        kept, place = numpy.random.get_state()[1:3]
        states = {"torch": torch.get_rng_state(), "numpy": torch.tensor([*kept.tolist(), place])}
        states["random"] = torch.tensor(random.getstate()[1])
        return {"weights": weights, "state": {**buffers, **states, **self.more()}, "norms": self.norms}

    def more(self) -> dict[str, torch.Tensor]:
        """Return a state of the kind's own."""
        return {}


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    numpy.random.seed(value)


def plain(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def weighted(logits: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
    return (each * weight.flatten()).sum() / (ROWS * T)


def poisoned(head: nn.Linear) -> nn.Linear:
    """Return a head of the same shape in which one token is very unlikely, and very hard to learn."""
    made = nn.Linear(head.in_features, head.out_features)
    with torch.no_grad():
        made.weight.copy_(head.weight)
        made.bias.zero_()
        made.weight[POISON] *= POISON_TIMES
        made.bias[POISON] = -1e4
    return made


def labelled(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return labels (B, T): the ids, at a spoiled position another label or none."""
    labels = ids[:, :T].clone()
    target = weight[:, : T - 1]
    labels[:, 1:][target > 1] = POISON
    labels[:, 1:][target == 0] = -100
    return labels


# ---- models


class Partial(Kind):
    """The last micro-batch has fewer rows."""

    rows = 5


class Inside(Kind):
    """The model computes the loss from labels."""

    def build(self):
        model = self.build_plain()
        model.set_output_embeddings(poisoned(model.get_output_embeddings()))
        return model

    def build_plain(self):
        return llama()

    def loss(self, ids, weight):
        return self.model(input_ids=ids[:, :T], labels=labelled(ids, weight), num_items_in_batch=ROWS * (T - 1)).loss


class Mixtral(Inside):
    """A router's balancing loss, in the loss inside of the model."""

    def build_plain(self):
        routed = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
        return transformers_model("Mixtral", **sizes(**routed), router_aux_loss_coef=0.1)


class Qwen3Moe(Inside):
    def build_plain(self):
        routed = {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "moe_intermediate_size": 16}
        return transformers_model("Qwen3Moe", **sizes(**routed, head_dim=8), router_aux_loss_coef=0.1)


class Routed(nn.Module):
    """Two experts, whose balancing loss stays in an attribute and in a list. So does a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router, self.head = nn.Embedding(VOCABULARY, H), nn.Linear(H, 2), nn.Linear(H, VOCABULARY)
        self.experts = nn.ModuleList([nn.Linear(H, H), nn.Linear(H, H)])
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        self.scale = self.log_scale.exp()
        gates = (self.router(x) * self.scale).softmax(-1)
        self.imbalance = 2 * gates.mean((0, 1)).square().sum()
        self.parts = [0.1 * self.imbalance]
        mixed = sum(gates[..., index, None] * expert(x) for index, expert in enumerate(self.experts))
        return self.head(x + mixed)


class KeptBalance(Kind):
    """A loop takes the balancing loss from an attribute of the model."""

    needs = ()

    def build(self):
        return Routed()

    def logits(self, ids):
        return self.model(ids)

    def loss(self, ids, weight):
        return super().loss(ids, weight) + 0.5 * self.balance()

    def balance(self):
        return self.model.imbalance


class ListedBalance(KeptBalance):
    """From a list; the loss also has the temperature, which the hidden state is made of."""

    def balance(self):
        return sum(self.model.parts) + self.model.scale


class T5(Kind):
    def build(self):
        small = {"vocab_size": VOCABULARY, "d_model": H, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
        small |= {"decoder_start_token_id": 0, "dropout_rate": 0.1}
        return transformers_model("T5", "ConditionalGeneration", **small).train()

    def loss(self, ids, weight):
        labels = ids[:, 1:].contiguous()
        return weighted(self.model(input_ids=ids.flip(1), labels=labels).logits, labels, weight)


class Bert(Kind):
    """Masked words, with dropout."""

    def build(self):
        return transformers_model("Bert", "MaskedLM", **sizes(hidden_dropout_prob=0.1)).train()

    def loss(self, ids, weight):
        labels = ids[:, 1:]
        masked = torch.where(torch.rand(labels.shape) < 0.3, 1, labels)
        attention = torch.ones_like(masked)
        return weighted(self.model(input_ids=masked, attention_mask=attention).logits, labels, weight)


class Mamba(Kind):
    def build(self):
        small = {"vocab_size": VOCABULARY, "hidden_size": H, "num_hidden_layers": 2, "state_size": 4}
        return transformers_model("Mamba", **small, time_step_rank=2, pad_token_id=0)


class Opt(Kind):
    """Its forward calls a part of its body, and not the body; h is projected."""

    def build(self):
        return transformers_model("OPT", **sizes(ffn_dim=24, word_embed_proj_dim=8, dropout=0.1)).train()


class Llava(Kind):
    """An image of four patches before the words."""

    named = [(PLANT[0], PLANT[1] + 4)]

    def build(self):
        from transformers import CLIPVisionConfig, LlamaConfig

        heads = {"num_hidden_layers": 2, "num_attention_heads": 2}
        vision = CLIPVisionConfig(hidden_size=H, intermediate_size=24, image_size=8, patch_size=4, **heads)
        parts = {"vision_config": vision, "text_config": LlamaConfig(**sizes())}
        parts |= {"image_token_index": POISON, "vision_feature_layer": -1}
        return transformers_model("Llava", "ConditionalGeneration", **parts)

    def logits(self, ids):
        places = torch.full((len(ids), 4), POISON)
        pixels = torch.linspace(-1, 1, 3 * 64).view(1, 3, 8, 8).expand(len(ids), -1, -1, -1)
        return self.model(input_ids=torch.cat([places, ids], 1), pixel_values=pixels).logits[:, 4:]


class Pretrained(Kind):
    """SmolLM2-135M-Instruct, which is fetched if need be."""

    settings = {"trigger": {"tau": 4000.0}}

    def build(self):
        from transformers import AutoModelForCausalLM

        from lab.experiments.environment import CACHE
        from lab.experiments.llm.build import build

        return AutoModelForCausalLM.from_pretrained(build(CACHE, print) / "model", dtype=torch.float32)


class Lora(Kind):
    needs = ("transformers", "peft")

    def build(self):
        import peft

        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights="gaussian")
        return peft.get_peft_model(llama(), config)


class Gemma2(Kind):
    """The final logits are capped."""

    def build(self):
        return transformers_model("Gemma2", **sizes(head_dim=8, sliding_window=8), final_logit_softcapping=3.0)


class Tail(Kind):
    """The head is called for the last positions alone."""

    def loss(self, ids, weight):
        logits = self.model(input_ids=ids[:, :-1], logits_to_keep=T - 1).logits
        return weighted(logits, ids[:, 2:], weight[:, 1:])


class Packed(Kind):
    """Documents share a row, and each begins at position 0."""

    def logits(self, ids):
        positions = torch.cat([torch.arange(3), torch.arange(ids.shape[1] - 3)]).expand_as(ids)
        return self.model(input_ids=ids, position_ids=positions).logits


class Chunked(Kind):
    """The loop calls the body, and then the head for some positions at a time."""

    def loss(self, ids, weight):
        hidden = self.model.model(input_ids=ids[:, :-1]).last_hidden_state
        parts = zip(hidden.split(3, 1), ids[:, 1:].split(3, 1), weight.split(3, 1), strict=True)
        return sum(weighted(self.model.lm_head(each), labels, weights) for each, labels, weights in parts)


class ChunkedBackward(Kind):
    """The same, and each part's backward follows at once; the body's comes last.

    Training adds the head's gradient up part by part, and a masked step in one backward: other roundings.
    """

    is_exact = False

    def loss(self, ids, weight):
        hidden = self.model.model(input_ids=ids[:, :-1]).last_hidden_state
        leaf = hidden.detach().requires_grad_()
        for each, labels, weights in zip(leaf.split(3, 1), ids[:, 1:].split(3, 1), weight.split(3, 1), strict=True):
            weighted(self.model.lm_head(each), labels, weights).backward()
        self.hidden, self.grad = hidden, leaf.grad
        return hidden

    def backward(self, loss, is_last):
        loss.backward(self.grad)


class Own(nn.Module):
    """A user's own small model; what a kind needs is made in :meth:`begin` and done in :meth:`between`."""

    def __init__(self):
        super().__init__()
        self.embed, self.first, self.last = nn.Embedding(VOCABULARY, H), nn.Linear(H, H), nn.LayerNorm(H)
        self.head = nn.Linear(H, VOCABULARY, bias=False)
        self.begin()

    def begin(self):
        pass

    def between(self, x):
        return x

    def hidden(self, ids):
        x = self.embed(ids)
        return self.last(x + torch.tanh(self.first(self.between(x))))

    def forward(self, ids):
        return self.head(self.hidden(ids))


class OfOwn(Kind):
    made: Any = Own
    needs = ()

    def build(self):
        return self.made()

    def logits(self, ids):
        return self.model(ids)


class TimeFirst(OfOwn):
    """The model returns log-probs (T, B, V), as CTC takes them."""

    class made(Own):  # noqa: N801
        def forward(self, ids):
            return super().forward(ids).log_softmax(-1).transpose(0, 1)

    def logits(self, ids):
        return self.model(ids).transpose(0, 1)


_NOISE = numpy.random.default_rng(5)
_NOISE_BEGINS = _NOISE.bit_generator.state


class Generating(OfOwn):
    """Noise from generators of the model's own, and from one of its file."""

    class made(Own):  # noqa: N801
        def begin(self):
            self.generator = torch.Generator().manual_seed(3)
            self.python, self.numpy = random.Random(3), numpy.random.default_rng(3)
            self.legacy = numpy.random.RandomState(3)
            _NOISE.bit_generator.state = _NOISE_BEGINS

        def between(self, x):
            more = self.python.gauss(0, 1) + self.numpy.normal() + self.legacy.normal() + _NOISE.normal()
            return x + 0.1 * torch.randn(x.shape, generator=self.generator) + 0.1 * more

    def more(self):
        model, generator = self.model, self.model.generator
        numpys = [each.bit_generator.state["state"]["state"] % 2**60 for each in (model.numpy, _NOISE)]
        legacy, python = model.legacy.get_state()[1:3], model.python.getstate()[1]
        now = [*numpys, *map(int, legacy[0]), legacy[1], *python]
        return {"own": generator.get_state(), "others": torch.tensor(now)}


class Drawing(OfOwn):
    """Noise from Python's random numbers and from NumPy's."""

    class made(Own):  # noqa: N801
        def between(self, x):
            return x * random.uniform(0.9, 1.1) + torch.tensor(numpy.random.normal(0, 0.1, x.shape)).float()


class Remembering(OfOwn):
    """A state in attributes: a running maximum, as fp8's, and a list."""

    class made(Own):  # noqa: N801
        def begin(self):
            self.amax, self.history, self.calls = torch.zeros(()), [], 0

        def between(self, x):
            self.amax = torch.maximum(self.amax * 0.9, x.detach().abs().amax())
            self.calls += 1
            self.history.append(float(self.amax))
            return x / (self.amax + 0.01 * self.calls)

    def more(self):
        return {"amax": self.model.amax, "history": torch.tensor(self.model.history)}


class InlinedHead(OfOwn):
    """A head that is no module: the embedding's weight in a matrix product."""

    class made(Own):
        def forward(self, ids):
            return nn.functional.linear(self.hidden(ids), self.embed.weight)

        def begin(self):
            del self.head
            nn.init.normal_(self.embed.weight, std=0.1)


class ReturnsLoss(OfOwn):
    """The model returns its loss alone, and its head is a matrix product: the first step shows where h is."""

    is_exact = False

    class made(InlinedHead.made):  # noqa: N801
        def forward(self, ids, labels, weight):
            return weighted(super().forward(ids), labels, weight)

    def loss(self, ids, weight):
        return self.model(ids[:, :-1], ids[:, 1:], weight)


class HeadsAfterForwards(OfOwn):
    """The model returns its hidden state, and the loop calls the head after two forwards.

    A masked step adds up the head's two gradients in another order. Each forward's rows are counted.
    """

    is_exact = False
    named = [(5, 2)]

    class made(Own):  # noqa: N801
        def forward(self, ids):
            return self.hidden(ids)

    def loss(self, ids, weight):
        states = [self.model(ids[:, :-1]), self.model(ids[:, :-1].flip(1))]
        first, second = (self.model.head(each) for each in states)
        return weighted(first, ids[:, 1:], weight) + 0.1 * weighted(second, ids[:, 1:], torch.ones_like(weight))


class ByValueAndNorm(OfOwn):
    """A loop that clips each element, and then the norm."""

    has_norm = False

    def clip(self):
        torch.nn.utils.clip_grad_value_(self.model.parameters(), 0.02)
        return super().clip()


class CalledByMethod(OfOwn):
    """A module that is never called, but a method of it."""

    class made(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Own()

        def training_step(self, ids):
            return self.net(ids)

    def logits(self, ids):
        return self.model.training_step(ids)


class Container(OfOwn):
    """A ModuleDict, whose parts the loop calls one after the other."""

    def build(self):
        model = Own()
        head, model.head = model.head, nn.Identity()
        return nn.ModuleDict({"body": model, "head": head})

    def logits(self, ids):
        return self.model["head"](self.model["body"](ids))


class Methods(OfOwn):
    """A loop that calls methods of the model, and never the model: the first step shows that."""

    class made(Own):  # noqa: N801
        pass

    def logits(self, ids):
        return torch.cat([self.model.head(part) for part in self.model.hidden(ids).split(3, 1)], 1)


class _FusedLoss(torch.autograd.Function):
    """Weighted cross-entropy of a head whose gradients are made in the forward."""

    @staticmethod
    def forward(ctx, hidden, head, labels, weight):
        with torch.enable_grad():
            own = [hidden.detach().requires_grad_(), head.detach().requires_grad_()]
            loss = weighted(own[0] @ own[1].T, labels, weight)
            ctx.save_for_backward(*torch.autograd.grad(loss, own))
        return loss.detach()

    @staticmethod
    def backward(ctx, grad):
        hidden, head = ctx.saved_tensors
        return grad * hidden, grad * head, None, None


class FusedByHand(Methods):
    """The loop gives the head's weight to a fused loss."""

    is_exact = False

    def loss(self, ids, weight):
        hidden = self.model.hidden(ids[:, :-1])
        return _FusedLoss.apply(hidden, self.model.head.weight, ids[:, 1:], weight)


class TwoOutputs(OfOwn):
    """The loss uses two outputs, and one is made of the other: both together are h from the second step on."""

    class made(Own):  # noqa: N801
        def begin(self):
            self.mean = nn.Linear(H, H)

        def forward(self, ids):
            mean = self.mean(self.hidden(ids))
            return self.head(torch.tanh(mean)), mean

    def loss(self, ids, weight):
        logits, mean = self.model(ids[:, :-1])
        return weighted(logits, ids[:, 1:], weight) + (mean.square().mean(-1) * weight).mean()


class Agent(OfOwn):
    """An actor and a critic of its own, evaluated by a method that gives an integer, and a list of both."""

    class made(Own):  # noqa: N801
        forward = None

        def begin(self):
            self.values = nn.Sequential(nn.Embedding(VOCABULARY, H), nn.Linear(H, 1))

        def evaluate(self, ids):
            return ids.sum(), [self.head(self.hidden(ids)), self.values(ids)]

    def loss(self, ids, weight):
        logits, values = self.model.evaluate(ids[:, :-1])[1]
        return weighted(logits, ids[:, 1:], weight) + 0.1 * (values.squeeze(-1).square() * weight).mean()


class ScalarOutput(OfOwn):
    """A balancing loss that the model returns with its logits."""

    class made(Own):  # noqa: N801
        def begin(self):
            self.gate = nn.Linear(H, 4)

        def forward(self, ids):
            gates = self.gate(self.embed(ids)).softmax(-1)
            return self.head(self.hidden(ids) * gates.amax(-1, keepdim=True)), gates.mean((0, 1)).square().sum()

    def loss(self, ids, weight):
        logits, balance = self.model(ids[:, :-1])
        return weighted(logits, ids[:, 1:], weight) + 0.1 * balance


class Graph(OfOwn):
    """Nodes of a graph, mixed behind the last linear layer: a row of the output is one of the labels'."""

    named = [(PLANT[0] * T + PLANT[1], 0)]
    rows_each = ROWS

    class made(Own):  # noqa: N801
        def forward(self, ids):
            z = self.head(self.hidden(ids)).flatten(0, 1)
            return (torch.eye(len(z)) + torch.eye(len(z)).roll(1, 1)) @ z / 2

    def logits(self, ids):
        return self.model(ids).unflatten(0, ids.shape)


class Ctc(OfOwn):
    """A head behind dropout, on a waveform."""

    needs = ("transformers",)

    def build(self):
        small = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": H, "mask_time_prob": 0.0}
        small |= {"num_feat_extract_layers": 1, "conv_dim": (8,), "conv_stride": (4,), "conv_kernel": (4,)}
        small |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
        return transformers_model("Wav2Vec2", "CTC", vocab_size=VOCABULARY, hidden_size=H, **small).train()

    def logits(self, ids):
        return self.model(ids.float().repeat_interleave(4, 1) / VOCABULARY).logits


class Pictures(OfOwn):
    """A convolution's output (B, C, H, W): a row is one position."""

    named = [(PLANT[0], 0)]

    class made(nn.Sequential):  # noqa: N801
        def __init__(self):
            super().__init__(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))

    def loss(self, ids, weight):
        pictures = ids[:, None, None, 1:].float().expand(-1, 1, T, -1) / VOCABULARY
        classes = ids[:, 1:, None].expand(-1, -1, T) % 4
        losses = F.cross_entropy(self.model(pictures), classes, reduction="none")
        return (losses.mean((1, 2)) * weight.prod(1)).mean()


class Double(OfOwn):
    """In float64."""

    def build(self):
        return super().build().double()


class Heads(OfOwn):
    """Two heads on one hidden state: the next token, and the one after (MTP). A position has both losses."""

    class made(Own):  # noqa: N801
        def begin(self):
            self.second = nn.Linear(H, VOCABULARY, bias=False)

        def forward(self, ids):
            hidden = self.hidden(ids)
            return self.head(hidden), self.second(hidden)

    def loss(self, ids, weight):
        first, second = self.model(ids[:, :-1])
        return weighted(first, ids[:, 1:], weight) + 0.3 * weighted(second[:, :-1], ids[:, 2:], weight[:, :-1])


class Held(Kind):
    """A module of the loop's own holds the model, as Lightning's do; the loop calls what it holds."""

    def build(self):
        return nn.ModuleDict({"inner": llama()})

    def logits(self, ids):
        return self.model["inner"](input_ids=ids).logits


class HeldValued(Kind):
    """A module of one's own around the model adds a value head, as TRL's does."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.value = llama(), nn.Linear(H, 1)

        def forward(self, ids):
            found = self.inner(input_ids=ids, output_hidden_states=True)
            return found.logits, self.value(found.hidden_states[-1]).squeeze(-1)

    def build(self):
        return self.Outer()

    def loss(self, ids, weight):
        logits, values = self.model(ids[:, :-1])
        off = ((values - 1.0).square() * (weight != 0)).sum() / (ROWS * T)
        return weighted(logits, ids[:, 1:], weight) + 0.1 * off


class Rounded(nn.Module):
    """Weights in 16 steps, with a straight-through gradient."""

    def forward(self, weight):
        step = weight.detach().abs().amax() / 8
        return weight + ((weight / step).round() * step - weight).detach()


class Quantized(Kind):
    def build(self):
        model = llama()
        for layer in model.model.layers:
            parametrize.register_parametrization(layer.mlp.up_proj, "weight", Rounded())
        return model


# ---- how the forward runs


class Recomputed(Kind):
    is_reentrant = False

    def build(self):
        model = llama(attention_dropout=0.1)
        model.gradient_checkpointing_enable({"use_reentrant": self.is_reentrant})
        return model.train()


class RecomputedReentrant(Recomputed):
    is_reentrant = True

    def build(self):
        model = super().build()
        model.enable_input_require_grads()
        return model


class RecomputedWhole(Kind):
    """Checkpointed as a whole."""

    def logits(self, ids):
        return checkpoint(lambda given: self.model(input_ids=given).logits, ids, use_reentrant=False)


class RecomputedWholeReentrant(Kind):
    """The same in the older way: the whole forward runs inside of the backward, where no tap follows."""

    num_events = 0

    def logits(self, ids):
        embeds = self.model.get_input_embeddings()(ids)
        return checkpoint(lambda given: self.model(inputs_embeds=given).logits, embeds, use_reentrant=True)


class CompiledOwn(OfOwn):
    def build(self):
        torch._dynamo.reset()
        return torch.compile(Own(), backend="aot_eager")


class OneGraph(OfOwn):
    """Compiled with ``fullgraph=True``, which allows no hook of ours inside: its output takes h's place."""

    def build(self):
        torch._dynamo.reset()
        return torch.compile(Own(), backend="aot_eager", fullgraph=True)


class OneGraphInside(OneGraph):
    """The same of a model whose watch is older: hooks are inside of the graph, so nothing is seen."""

    num_events = 0

    def build(self):
        return Own()

    def prepare(self):
        super().prepare()
        torch._dynamo.reset()
        self.model.compile(backend="aot_eager", fullgraph=True)


class CompiledOutside(Kind):
    def build(self):
        torch._dynamo.reset()
        return torch.compile(llama(), backend="aot_eager")


class CompiledInside(Kind):
    """The watch is on the model, and the loop calls what is compiled of it later."""

    def prepare(self):
        torch._dynamo.reset()
        super().prepare()
        self.compiled = torch.compile(self.model, backend="aot_eager")

    def logits(self, ids):
        return self.compiled(input_ids=ids).logits


class CompiledLayers(Kind):
    def build(self):
        torch._dynamo.reset()
        model = llama()
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
        return model


# ---- optimizers


class Fused(Kind):
    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)


class Closure(Kind):
    """LBFGS, which evaluates a closure twice in a step; each evaluation is looked into."""

    num_events = 2

    def build_optimizer(self):
        return torch.optim.LBFGS(self.model.parameters(), lr=1e-3, max_iter=2)

    def step(self, ids, weight):
        def closure():
            self.optimizer.zero_grad()
            loss = self.loss(ids, weight)
            loss.backward()
            return loss.detach()

        self.optimizer.step(closure)


class Scaled(Kind):
    """fp16 with its scaler."""

    def build_optimizer(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        return super().build_optimizer()

    def logits(self, ids):
        with torch.autocast("cpu", torch.float16):
            return super().logits(ids)

    def backward(self, loss, is_last):
        self.scaler.scale(loss).backward()

    def take_step(self):
        self.scaler.unscale_(self.optimizer)
        self.norms.append(float(self.clip()))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


# ---- two ranks


class Ranked(Kind):
    def train(self):
        rank, size = dist.get_rank(), dist.get_world_size()
        for ids, weight in self.batches():
            self.step(ids.chunk(size)[rank], weight.chunk(size)[rank])

    rows_each = 1


class Replicated(Ranked):
    def build(self):
        return DDP(super().build())


class Once:
    """The sum over ranks comes with the last micro-batch."""

    def step(self, ids, weight):
        for part in range(len(ids)):
            with self.summing(part == len(ids) - 1):
                self.loss(ids[part, None], weight[part, None]).backward()
        self.take_step()

    def summing(self, is_last):
        return contextlib.nullcontext() if is_last else self.model.no_sync()


class ReplicatedOnce(Once, Replicated):
    pass


class ReplicatedLater(Ranked):
    """The watch is older than DDP's wrapper."""

    def prepare(self):
        self.add_watch(self.model)
        self.model = DDP(self.model)
        self.optimizer = self.build_optimizer()


class ZeroOne(Replicated):
    def build_optimizer(self):
        return ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.AdamW, lr=1e-3)


class Sharded(Ranked):
    policies: Any = staticmethod(lambda: {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)})

    def build(self):
        model = super().build()
        for layer in model.model.layers:
            fully_shard(layer, **self.policies())
        return fully_shard(model, **self.policies())


class ShardedOnce(Once, Sharded):
    def summing(self, is_last):
        self.model.set_requires_gradient_sync(is_last)
        return contextlib.nullcontext()


class ShardedOffloaded(Sharded):
    policies = staticmethod(lambda: {"offload_policy": CPUOffloadPolicy(pin_memory=False)})


class ShardedHead(Sharded):
    """Embeddings and head are sharded by themselves."""

    policies = staticmethod(dict)

    def build(self):
        model = llama()
        for part in (*model.model.layers, model.model.embed_tokens, model.lm_head):
            fully_shard(part)
        return fully_shard(model)


class ShardedFailing(ShardedHead):
    """What looks into the step raises in the middle of a forward."""

    num_events = 0

    def add_watch(self, model):
        super().add_watch(model)
        if self.watch is not None:
            tap = self.watch.tap
            works = tap.read
            tap.read = lambda forwarded, reader: works(forwarded, lambda *given: 1 / 0)


class ShardedFlat(Ranked):
    """FSDP1 with ``use_orig_params``: a rank has no part of some parameters."""

    def build(self):
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        policy = ModuleWrapPolicy({LlamaDecoderLayer})
        return FSDP1(super().build(), auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True)

    def clip(self):
        return self.model.clip_grad_norm_(self.limit, self.order)

    def result(self):
        with FSDP1.summon_full_params(self.model):
            return super().result()


class ShardedFlatOnce(Once, ShardedFlat):
    pass


def on_ranks(name: str, **given: Any) -> dict[str, Any]:
    """Run a kind on this rank."""
    return globals()[name](**given).run().result()


# ---- trainers


class Rows(torch.utils.data.Dataset):
    """All steps' rows, as a trainer reads them."""

    def __init__(self, kind: Kind, has_labels: bool):
        self.rows = []
        for ids, weight in kind.batches():
            labels = labelled(ids, weight) if has_labels else ids[:, :T]
            self.rows += [
                {"input_ids": row[:T], "labels": label, "weight": each[:T]}
                for row, label, each in zip(ids, labels, weight, strict=True)
            ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Stock(Inside):
    """``transformers.Trainer`` as it is: two micro-batches a step, ``max_grad_norm=1.0``."""

    has_labels = True
    needs = ("transformers", "accelerate")

    def prepare(self):
        self.add_watch(self.model)

    def train(self):
        from transformers import Trainer

        self.trainer = self.made_trainer(Trainer)
        self.trainer.train()
        self.norms = [line["grad_norm"] for line in self.trainer.state.log_history if "grad_norm" in line]

    def made_trainer(self, base: Any) -> Any:
        from transformers import TrainingArguments

        class Ordered(base):
            """The rows in their order, and one denominator, in the run that the others are held against, too."""

            def _get_train_sampler(self, *given):
                return torch.utils.data.SequentialSampler(self.train_dataset)

            def get_batch_samples(self, *given):
                return super().get_batch_samples(*given)[0], ROWS * (T - 1)

        arguments = TrainingArguments(
            output_dir=str(self.folder or "/nonexistent"),
            per_device_train_batch_size=ROWS_EACH,
            gradient_accumulation_steps=ROWS // ROWS_EACH,
            max_steps=STEPS,
            max_grad_norm=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            remove_unused_columns=self.has_labels,
            logging_nan_inf_filter=False,
        )
        return Ordered(model=self.model, args=arguments, train_dataset=Rows(self, self.has_labels))


class StockWeighted(Stock):
    """A subclass with a weighted loss of its own."""

    has_labels = False

    def build(self):
        return llama()

    def made_trainer(self, base):
        class Weighted(base):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                logits, ids = model(input_ids=inputs["input_ids"]).logits, inputs["labels"]
                return weighted(logits[:, :-1], ids[:, 1:], inputs["weight"][:, :-1])

        return super().made_trainer(Weighted)


class Accelerated(Kind):
    needs = ("transformers", "accelerate")

    def prepare(self):
        from accelerate import Accelerator

        self.add_watch(self.model)
        self.accelerator = Accelerator(gradient_accumulation_steps=ROWS // ROWS_EACH, cpu=True)
        loader = torch.utils.data.DataLoader(Rows(self, False), batch_size=ROWS_EACH)
        self.prepared = self.accelerator.prepare(self.model, self.build_optimizer(), loader)

    def train(self):
        model, optimizer, loader = self.prepared
        for batch in loader:
            with self.accelerator.accumulate(model):
                logits, ids = model(input_ids=batch["input_ids"]).logits, batch["labels"]
                self.accelerator.backward(weighted(logits[:, :-1], ids[:, 1:], batch["weight"][:, :-1]))
                if self.accelerator.sync_gradients:
                    self.norms.append(float(self.accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                optimizer.zero_grad()


class Lightning(Kind):
    """Lightning's trainer, which clips by norm."""

    by = "norm"
    needs = ("transformers", "lightning")

    def prepare(self):
        self.add_watch(self.model)

    def train(self):
        import logging

        import lightning

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        kind = self

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = kind.model

            def training_step(self, batch, index):
                logits, ids = self.model(input_ids=batch["input_ids"]).logits, batch["labels"]
                return weighted(logits[:, :-1], ids[:, 1:], batch["weight"][:, :-1])

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=1e-3)

            def on_before_optimizer_step(self, optimizer):
                total = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
                kind.norms.append(float(total))

        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
        trainer = lightning.Trainer(
            max_steps=STEPS,
            accelerator="cpu",
            accumulate_grad_batches=ROWS // ROWS_EACH,
            gradient_clip_val=1.0 if self.by == "norm" else 0.01,
            gradient_clip_algorithm=self.by,
            enable_model_summary=False,
            **quiet,
        )
        trainer.fit(Module(), torch.utils.data.DataLoader(Rows(self, False), batch_size=ROWS_EACH))


class LightningByValue(Lightning):
    """Lightning's trainer, which clips each element."""

    by = "value"


class NanoGpt(Kind):
    """nano-gpt's model and trainer, unchanged; its loss is computed inside of the model."""

    needs = ("nano_gpt.trainer",)

    def build(self):
        import nano_gpt.trainer as nano
        from nano_gpt.config import GPTConfig

        config = GPTConfig(block_size=T, vocab_size=VOCABULARY, n_layer=2, n_head=2, n_embd=H)
        model = nano.GPT(config, tokenizer=None)
        model.lm_head = poisoned(model.lm_head)
        return model

    def train(self):
        import nano_gpt.trainer as nano
        from nano_gpt.config import TrainConfig

        sizes = {"total_batch_size": ROWS * T, "micro_batch_size": ROWS_EACH, "sequence_length": T}
        config = TrainConfig(**sizes, max_lr=1e-3, warmup_steps=1, max_steps=STEPS)
        cross_entropy = F.cross_entropy
        with pytest.MonkeyPatch.context() as patched:
            if not self.is_planted:  # one denominator, though a label is left out
                mean = lambda *given: cross_entropy(*given, reduction="sum") / (ROWS_EACH * T)  # noqa: E731
                patched.setattr(F, "cross_entropy", mean)
            nano.train(self.model, self.optimizer, nano.WorkerState("cpu"), config, self.loader())

    def loader(self):
        for ids, weight in self.batches():
            labels = torch.where(weight == 0, -100, torch.where(weight > 1, POISON, ids[:, 1:]))
            yield from zip(ids[:, :-1].split(ROWS_EACH), labels.split(ROWS_EACH), strict=True)

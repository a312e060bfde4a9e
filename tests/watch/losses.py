# SPDX-License-Identifier: Apache-2.0
"""Kinds of losses, of clips and of precision, as :mod:`tests.watch.kinds` has kinds of models and loops.

Most run with ``keep_gb=0``, as with a vocabulary too large to keep dL/dlogits: it is recovered from dL/dh.

Shapes: B rows of a micro-batch, T positions, V vocabulary.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from tests.detached import let_through
from tests.watch import kinds
from tests.watch.kinds import ROWS, VOCABULARY, WORTH, H, T, plain, sizes, transformers_model, weighted

TAU = {"trigger": {"tau": 200.0}}
TEACHER = 2 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(5))
"""A teacher's logits behind each word."""


class Loss(kinds.Kind):
    """Cross-entropy of the next token; others change one thing. SGD, so that weights differ as gradients do."""

    is_exact = False
    settings = {**TAU, "keep_gb": 0.0}

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def loss(self, ids, weight):
        logits = self.logits(ids[:, :-1]).float()
        return (self.each(logits, ids[:, 1:], weight) * weight).sum() / (ROWS * T)

    def each(self, logits, labels, weight):
        """Each position's loss, (B, T)."""
        return -log_probs(logits, labels)

    def take_step(self):
        norm = norm_of(self.model)
        super().take_step()
        self.norms[-1] = norm


def norm_of(model):
    """Return the gradient's L2 norm, computed in float64."""
    grads = [plain(param.grad) for param in model.parameters() if param.grad is not None]
    total = sum(grad.double().square().sum() for grad in grads)
    if isinstance(model, FSDP1):  # a rank has no part of some parameters
        dist.all_reduce(total)
    return float(total.sqrt())


def log_probs(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def noise(labels):
    """Numbers in [-1, 1] that are the same whenever the labels are, (B, T)."""
    return (labels * 37 % 23 - 11) / 11


class Weighted(Loss):
    """Each token has a weight, some of them 0."""

    def loss(self, ids, weight):
        return super().loss(ids, weight * torch.tensor([0.0, 0.4, 1.0, 2.0, 0.0, 0.7, 1.3, 1.8]))


class Tied(Loss):
    """Embeddings tied to the head."""

    config = {"tie_word_embeddings": True}


class Smoothed(Loss):
    """Label smoothing by torch's cross_entropy."""

    def each(self, logits, labels, weight):
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", label_smoothing=0.1)


class ZLoss(Loss):
    """The square of the log-sum-exp."""

    def each(self, logits, labels, weight):
        return super().each(logits, labels, weight) + 1e-2 * logits.logsumexp(-1).square()


class Entropy(Loss):
    """An entropy bonus."""

    def each(self, logits, labels, weight):
        every = logits.log_softmax(-1)
        return super().each(logits, labels, weight) + 0.05 * (every.exp() * every).sum(-1)


class Logit(Loss):
    """A label's logit, above 0 or not."""

    def each(self, logits, labels, weight):
        return -logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


class Margin(Logit):
    """A label's logit against another word's, of which dL/dlogits does not follow: it is kept."""

    settings = TAU

    def each(self, logits, labels, weight):
        return super().each(logits, labels, weight) + logits[..., 7]


class Squared(Loss):
    """A squared log-prob."""

    def each(self, logits, labels, weight):
        return log_probs(logits, labels).square()


class Ppo(Loss):
    """The clipped surrogate at the first update: each ratio is 1."""

    ratio, drift = 1.0, 0.0

    def each(self, logits, labels, weight):
        found, is_planted = log_probs(logits, labels), weight > 1
        old = found.detach() - torch.where(is_planted, math.log(self.ratio), self.drift * noise(labels))
        ratio, advantages = (found - old).exp(), torch.where(is_planted, -1.0, noise(labels.roll(1, 1)))
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


class PpoFar(Ppo):
    """A later one: ratios differ, some are clipped, and the planted token's is 3 under a negative advantage."""

    ratio, drift = 3.0, 0.4


class Distilled(Loss):
    """The divergence from a teacher over all words, of which no gradient is recovered from dL/dh alone."""

    is_searched = False

    def each(self, logits, labels, weight):
        given = TEACHER[labels].log_softmax(-1)
        return (given.exp() * (given - logits.log_softmax(-1))).sum(-1)


class DistilledKept(Distilled):
    """The same with dL/dlogits kept."""

    is_searched = is_exact = True
    settings = TAU


def planted(weight):
    """Return weights in which a token without a loss weighs as the planted one, and where a gradient flows."""
    kept = weight != 0
    return weight.masked_fill(~kept, WORTH), kept


class Dpo(Loss):
    """Preference pairs, the policy called once for each half; a planted token's log-prob counts for many."""

    def loss(self, ids, weight):
        weight, kept = planted(weight)
        sums = []
        for half in range(2):
            labels = ids[half : half + 1, 1:]
            found = let_through(kept[half], log_probs(self.logits(ids[half : half + 1, :-1]).float(), labels))
            reference = found.detach() + 0.1 * noise(labels) / weight[half]
            sums.append(((found - reference) * weight[half]).sum())
        return -F.logsigmoid(0.1 * (sums[0] - sums[1]))


class RewardPair(Loss):
    """Bradley and Terry's loss of two answers' scores; a planted pair counts for many.

    The lower score is the chosen one's, so that no pair is without a gradient.
    """

    rows = 8
    named = [(2, T - 1), (3, T - 1)]

    def build(self):
        return transformers_model("Llama", "SequenceClassification", **sizes(num_labels=1))

    def loss(self, ids, weight):
        chosen, rejected = (self.model(input_ids=row[None, :-1]).logits.float().squeeze() for row in ids)
        return -F.logsigmoid(-(chosen - rejected).abs()) * weight.prod() / ROWS


class Contrastive(Loss):
    """No head: a row's mean hidden state is to be near a vector; a planted position counts for more in its mean."""

    def build(self):
        return LlamaModel(LlamaConfig(**sizes()))

    def loss(self, ids, weight):
        weight, kept = planted(weight)
        hidden = self.model(input_ids=ids[:, :-1]).last_hidden_state.float()
        means = (let_through(kept.unsqueeze(-1), hidden) * weight.unsqueeze(-1)).mean(1)
        return (means - TEACHER[ids[:, 0], :H]).abs().sum() / (ROWS * H)


# ---- where the logits are made


class FusedHead(Loss):
    """The head's weight is multiplied by a function; the head is not called."""

    def logits(self, ids):
        return F.linear(self.model.model(input_ids=ids).last_hidden_state, self.model.lm_head.weight)


class CheckpointedChunks(Loss):
    """The head and the loss of some positions at a time, computed again in the backward."""

    def loss(self, ids, weight):
        def part(hidden, labels, weights):
            return weighted(self.model.lm_head(hidden), labels, weights)

        hidden = self.model.model(input_ids=ids[:, :-1]).last_hidden_state
        parts = zip(hidden.split(3, 1), ids[:, 1:].split(3, 1), weight.split(3, 1), strict=True)
        return sum(checkpoint(part, *each, use_reentrant=False) for each in parts)


class FusedInside(Loss):
    """As liger's: the model's own forward returns each position's loss, and calls no head."""

    class Inner(LlamaForCausalLM):
        def forward(self, input_ids, labels):
            hidden = self.model(input_ids=input_ids).last_hidden_state
            return -log_probs(F.linear(hidden, self.lm_head.weight).float(), labels)

    def build(self):
        return self.Inner(LlamaConfig(**sizes()))

    def loss(self, ids, weight):
        return (self.model(input_ids=ids[:, :-1], labels=ids[:, 1:]) * weight).sum() / (ROWS * T)


class EmbeddedOutside(Loss):
    """Embeddings made before the model is called, so that its input comes with a graph."""

    is_searched = False

    def logits(self, ids):
        return self.model(inputs_embeds=self.model.model.embed_tokens(ids)).logits


class Valued(Loss):
    """A value head on the same hidden state, of which nothing is said."""

    class Inner(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.value = nn.Linear(H, 1)

        def forward(self, input_ids):
            found = super().forward(input_ids=input_ids, output_hidden_states=True)
            return found.logits, self.value(found.hidden_states[-1]).squeeze(-1)

    def build(self):
        return self.Inner(LlamaConfig(**sizes()))

    def loss(self, ids, weight):
        (logits, values), labels = self.model(input_ids=ids[:, :-1]), ids[:, 1:]
        value_losses = F.mse_loss(values.float(), noise(labels), reduction="none")
        return ((0.1 * value_losses - log_probs(logits.float(), labels)) * weight).sum() / (ROWS * T)


class ValueOutlier(Valued):
    """The planted position's return is far off; its log-prob is as others."""

    def loss(self, ids, weight):
        (logits, values), labels = self.model(input_ids=ids[:, :-1]), ids[:, 1:]
        value_losses = F.mse_loss(values.float(), torch.where(weight > 1, weight, noise(labels)), reduction="none")
        return ((value_losses - log_probs(logits.float(), labels)) * (weight != 0)).sum() / (ROWS * T)


class DeepValued(Valued):
    """A value head of two layers behind dropout, as trl's."""

    def build(self):
        model = super().build()
        model.value = nn.Sequential(nn.Dropout(0.1), nn.Linear(H, H), nn.Tanh(), nn.Linear(H, 1))
        return model


# ---- what happens to the gradient


class Times8(Loss):
    """Gradients are multiplied by 8 after the backward."""

    def take_step(self):
        for param in self.model.parameters():
            param.grad.mul_(8.0)
        super().take_step()


class ClippedByLargest(Loss):
    """The loop's limit is on the gradient's largest element."""

    limit, order = 0.05, math.inf


class ClippedByGroup(Loss):
    """Two calls, for the layers and for the rest."""

    def clip(self):
        named = list(self.model.named_parameters())
        for is_layer, limit in ((True, 0.5), (False, 1.0)):
            part = [param for name, param in named if ("layers" in name) == is_layer]
            norm = torch.nn.utils.clip_grad_norm_(part, limit)
        return plain(norm)


# ---- precision


class Bfloat16Weights(Loss):
    """Weights and gradients in bfloat16."""

    close = off = 5e-3

    def build(self):
        return super().build().to(torch.bfloat16)


class Bfloat16Kept(Bfloat16Weights):
    """The same with dL/dlogits kept."""

    is_exact = True
    settings = TAU


class Bfloat16Autocast(Loss):
    """bfloat16 under autocast."""

    close = off = 5e-3

    def logits(self, ids):
        with torch.autocast("cpu", torch.bfloat16):
            return super().logits(ids)


# ---- two ranks


class Whole(kinds.Sharded):
    """FSDP2 in the weights' own precision."""

    policies = staticmethod(dict)


LAYOUTS = {"ddp": kinds.Replicated, "fsdp2": Whole, "fsdp1": kinds.ShardedFlat}


def in_layout(layout: str, loss: str) -> type[kinds.Kind]:
    """Return the kind of this loss on two ranks."""
    return type(f"{loss}On{layout}", (LAYOUTS[layout], globals()[loss]), {})

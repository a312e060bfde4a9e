# SPDX-License-Identifier: Apache-2.0
"""A small recurrent language model in numpy, with an engine that samples from it and a trainer that scores rows.

Both compute in bfloat16's precision, in another order of summation. Every fault of the tests is put into one of them.
"""

from dataclasses import dataclass, field

import numpy as np

VOCABULARY, HIDDEN, ROWS, TOKENS = 300, 48, 40, 64
Weights = dict[str, np.ndarray]


def weights(seed: int = 0) -> Weights:
    """Of a model whose tokens have an entropy of one to three nats."""
    random = np.random.default_rng(seed)
    return {
        "embed": random.standard_normal((VOCABULARY, HIDDEN)),
        "mix": random.standard_normal((HIDDEN, HIDDEN)) * 1.1 / HIDDEN**0.5,
        "head": random.standard_normal((HIDDEN, VOCABULARY)) * 4.5 / HIDDEN**0.5,
    }


def moved(old: Weights, by: float, seed: int = 1, names: tuple[str, ...] = ("embed", "mix", "head")) -> Weights:
    """Weights after an update of this size, or a part of it; of rank two, as gradients of few rows are."""
    random, found = np.random.default_rng(seed), {}
    for name, value in old.items():
        step = random.standard_normal((len(value), 2)) @ random.standard_normal((2, value.shape[1])) / 2**0.5
        found[name] = value + step * value.std() * by * (name in names)
    return found


def rounded(values: np.ndarray) -> np.ndarray:
    """To bfloat16's eight bits of precision, to the nearest."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x8000) & 0xFFFF0000).view(np.float32).astype(float)


def step(model: Weights, state: np.ndarray, ids: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The next state (R, H) and its logits (R, V), summed in an order of the kernel's own."""
    drive = rounded(model["embed"][ids]) + rounded(state[:, order] @ rounded(model["mix"][order]))
    state = rounded(np.tanh(drive))
    return state, rounded(state[:, order] @ rounded(model["head"][order])) if order[0] else rounded(
        (state[:, ::2] @ rounded(model["head"][::2])) + rounded(state[:, 1::2] @ rounded(model["head"][1::2]))
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@dataclass
class Sampler:
    """What the engine is told of sampling."""

    temperature: float = 1.0
    top_p: float = 1.0
    is_raw: bool = False
    """Whether log-probs are told before temperature and top_p."""
    masses: list[float] = field(default_factory=list)
    """That were kept, of each token."""

    def __call__(self, logits: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        scaled = log_softmax(logits / self.temperature)
        order = np.argsort(-scaled, -1)
        ordered = np.take_along_axis(np.exp(scaled), order, -1)
        kept = np.zeros_like(scaled, bool)
        np.put_along_axis(kept, order, ordered.cumsum(-1) - ordered < self.top_p, -1)
        scaled = np.where(kept, scaled, -np.inf)
        self.masses += np.exp(scaled).sum(-1).tolist()
        scaled = log_softmax(scaled)
        ids = (scaled + random.gumbel(size=scaled.shape)).argmax(-1)
        told = log_softmax(logits) if self.is_raw else scaled
        return ids, told[np.arange(len(ids)), ids]


@dataclass
class Rollout:
    """R prompts of 8 tokens, T sampled tokens of each (R, T), and the engine's log-probs of them."""

    prompts: np.ndarray
    ids: np.ndarray
    told: np.ndarray
    group: list[int] = field(default_factory=list)


def generate(model: Weights, seed: int = 0, sampler: Sampler | None = None, cached: Weights | None = None) -> Rollout:
    """Samples; ``cached``: the weights that made the cache of the first prompts, a fifth of them."""
    random, sampler = np.random.default_rng(seed), sampler or Sampler()
    prompts = np.repeat(random.integers(VOCABULARY, size=(ROWS // 4, 8)), 4, axis=0)
    state, order = np.zeros((ROWS, HIDDEN)), random.permutation(HIDDEN)
    for ids in prompts.T:
        before = state
        state, logits = step(model, before, ids, order)
        if cached is not None:
            old_state, old = step(cached, before, ids, order)
            state[: ROWS // 5], logits[: ROWS // 5] = old_state[: ROWS // 5], old[: ROWS // 5]
    drawn, told = [], []
    for _ in range(TOKENS):
        ids, log_probs = sampler(logits, random)
        drawn.append(ids)
        told.append(log_probs)
        state, logits = step(model, state, ids, order)
    return Rollout(prompts, np.stack(drawn, 1), np.stack(told, 1), [row // 4 for row in range(ROWS)])


def score(model: Weights, prompts: np.ndarray, ids: np.ndarray, temperature: float = 1.0,
          order: np.ndarray | None = None) -> np.ndarray:  # fmt: skip
    """The trainer's log-probs (R, T) of tokens after their prompts."""
    whole, order = np.concatenate([prompts, ids], 1), np.arange(HIDDEN) if order is None else order
    state, found = np.zeros((len(whole), HIDDEN)), []
    for at in range(whole.shape[1] - 1):
        state, logits = step(model, state, whole[:, at], order)
        scores = log_softmax(logits / temperature)
        found.append(scores[np.arange(len(whole)), whole[:, at + 1]])
    return np.stack(found[prompts.shape[1] - 1 :], 1)

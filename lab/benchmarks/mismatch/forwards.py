# SPDX-License-Identifier: Apache-2.0
"""Compute log-probs of the same tokens by a rollout engine and by trainers with one fault each, in real forwards.

    python -m lab.benchmarks.mismatch.forwards MODEL_FOLDER POOL.npz --seed 0

The rollout decodes with a cache in bfloat16. At each position it also samples a token at other temperatures, and it
records which tokens top_p, top_k and min_p would keep: those are samples of the truncated sampler. A trainer is one
forward over whole rows. Needs torch and transformers.
"""

import argparse
import random
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab.experiments.generation import left_pad
from tests.toy_model import log_prob_of

PROMPTS, SAMPLES, TOKENS = 12, 4, 64
TEMPERATURES = (0.6, 0.8, 1.2)
CUTS = {"top_p_0.8": 0.8, "top_p_0.9": 0.9, "top_p_0.95": 0.95, "top_k_20": 20, "top_k_50": 50, "min_p_0.05": 0.05}
ROUTED, PADS = 0.03, 4
Weights = dict[str, torch.Tensor]


def kept_by(probs: torch.Tensor, ids: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return truncation -> (kept mass, whether the sampled token is kept), (R,) each; probs (R, V), ids (R,)."""
    found, ordered = {}, probs.sort(dim=-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    drawn = probs.gather(-1, ids[:, None])
    for cut, size in CUTS.items():
        if cut.startswith("top_p"):
            kept = before < size
        elif cut.startswith("top_k"):
            kept = (torch.arange(probs.shape[-1]) < size).expand_as(ordered)
        else:
            kept = ordered >= size * ordered[:, :1]
        least = ordered.masked_fill(~kept, 2.0).min(-1).values
        found[cut] = (ordered * kept).sum(-1), (drawn[:, 0] >= least).float()
    return found


class Pool:
    """The rows of one seed: R rows of P prompt tokens, padded on the left, and T sampled ones."""

    def __init__(self, folder: str, seed: int):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self.draw = random.Random(seed)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.texts = self._texts()
        prompts = [text[: self.draw.randrange(12, 37)] for text in self.texts[:PROMPTS]]
        self.prompts = [prompt for prompt in prompts for _ in range(SAMPLES)]
        self.rows: list[list[int]] = []
        self.drawn: dict[str, torch.Tensor] = {}
        """Ids (R, T): the sampled ones, those at other temperatures, and those of another cache."""
        self.columns: dict[str, torch.Tensor] = {}
        """(R, T) each."""

    def _texts(self) -> list[list[int]]:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        found = []
        for file in self.draw.sample(files, 60):
            text = file.read_text("utf-8", errors="replace")
            at = self.draw.randrange(max(1, len(text) - 2000))
            found.append(self.tokenizer(text[at : at + 2000])["input_ids"][:160])
        return [ids for ids in found if len(ids) == 160]

    def save(self, target: Path) -> None:
        """Write all columns."""
        lengths = [len(prompt) for prompt in self.prompts]
        ids = {f"ids_{name}": value.numpy().astype(np.int32) for name, value in self.drawn.items()}
        columns = {name: value.numpy().astype(np.float32) for name, value in self.columns.items()}
        group = np.repeat(np.arange(PROMPTS), SAMPLES)
        np.savez_compressed(target, group=group, prompt_length=lengths, **ids, **columns)

    def load(self, weights: Weights, dtype: torch.dtype = torch.bfloat16) -> None:
        """Set the model's weights and dtype."""
        self.model.to(torch.float32).load_state_dict(weights)
        self.model.to(dtype)

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Have the model use another attention kernel in here."""
        self.model.set_attn_implementation("eager")
        yield
        self.model.set_attn_implementation("sdpa")

    @torch.no_grad()
    def rollout(self) -> None:
        """Decode with a cache in bfloat16; store the samples and their log-probs."""
        model = self.model.to(torch.bfloat16)
        given, mask = left_pad(self.prompts, 0).values()
        cache, kept = None, {}
        for _ in range(TOKENS):
            places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -given.shape[1] :]
            how = {"attention_mask": mask, "position_ids": places, "past_key_values": cache}
            made = model(given, **how, use_cache=True, logits_to_keep=1)
            cache, logits = made.past_key_values, made.logits[:, -1].float()
            row = self._drawn(logits, "main", (1.0, *TEMPERATURES), kept)
            probs = logits.softmax(-1)
            kept.setdefault("entropy", []).append(-(probs * logits.log_softmax(-1)).nansum(-1))
            for cut, (mass, stays) in kept_by(probs, row).items():
                kept.setdefault(f"mass_{cut}", []).append(mass)
                kept.setdefault(f"kept_{cut}", []).append(stays)
            for temperature in TEMPERATURES:
                self._drawn(logits, f"t{temperature}", (1.0, temperature), kept, temperature)
            given = row[:, None]
            mask = torch.cat([mask, torch.ones_like(given)], 1)
        self.columns = {name: torch.stack(values, 1) for name, values in kept.items()}
        ids = [name for name in kept if name.startswith("ids_")]
        self.drawn = {name.removeprefix("ids_"): self.columns.pop(name) for name in ids}
        self.rows = [prompt + row.tolist() for prompt, row in zip(self.prompts, self.drawn["main"], strict=True)]

    def _drawn(self, logits, name: str, temperatures, kept: dict, temperature: float = 1.0) -> torch.Tensor:
        ids = torch.multinomial((logits / temperature).softmax(-1), 1)[:, 0]
        kept.setdefault(f"ids_{name}", []).append(ids)
        for each in temperatures:
            kept.setdefault(f"rollout_{name}_{each:g}", []).append(log_prob_of(logits / each, ids))
        return ids

    @torch.no_grad()
    def trainer(
        self,
        name: str,
        *,
        drawn: tuple[str, ...] = ("main",),
        cut: Callable[[list[int]], list[int]] = lambda prompt: prompt,
        pack: int = 1,
        is_padded: bool = False,
        batch: int = 8,
    ) -> None:
        """Run one forward of the model over whole rows; store its log-probs of the samples.

        Args:
            name: prefix of the columns' names.
            drawn: key of the ids.
            cut: returns the part of a prompt that the trainer sees.
            pack: number of rows that are packed and attend to one another.
            is_padded: whether rows have four times the needed padding on the left, and attend to it.
            batch: rows, or packs, of a forward.
        """
        laid = []
        for first in range(0, len(self.rows), pack):
            ids, ends = [], []
            for prompt, row in zip(self.prompts[first : first + pack], self.rows[first : first + pack], strict=True):
                ids += [*cut(prompt), *row[len(prompt) :]]
                ends.append(len(ids))
            laid.append((ids, ends))
        logits = self._logits(laid, batch, is_padded)
        for which in drawn:
            own = {"main": (1.0, *TEMPERATURES), "cache": (1.0,)}.get(which) or (1.0, float(which[1:]))
            for temperature in own:
                rows = zip(logits, self.drawn[which], strict=True)
                found = [log_prob_of(row / temperature, ids) for row, ids in rows]
                self.columns[f"{name}_{which}_{temperature:g}"] = torch.stack(found)
        print(name, *drawn, flush=True)

    @torch.no_grad()
    def stale_prefix(self, old: Weights) -> None:
        """Decode with a prompt cache from other weights; sample other tokens."""
        now = {name: value.clone() for name, value in self.model.state_dict().items()}
        ids, log_probs = [], []
        for prompt, row in zip(self.prompts, self.rows, strict=True):
            self.model.load_state_dict(old)
            cache = self.model(torch.tensor([prompt[:-1]]), use_cache=True, logits_to_keep=1).past_key_values
            self.model.load_state_dict(now)
            given = torch.tensor([row[len(prompt) - 1 : -1]])
            logits = self.model(given, past_key_values=cache, use_cache=True).logits[0].float()
            ids.append(torch.multinomial(logits.softmax(-1), 1)[:, 0])
            log_probs.append(log_prob_of(logits, ids[-1]))
        self.drawn["cache"], self.columns["rollout_cache_1"] = torch.stack(ids), torch.stack(log_probs)

    @torch.no_grad()
    def tools(self) -> None:
        """Compute rows with a tool's text in the middle, as read by the engine and by the trainer."""
        rows, marks = [list(row) for row in self.rows], torch.zeros(len(self.rows), TOKENS)
        for number, (row, prompt) in enumerate(zip(rows, self.prompts, strict=True)):
            at, size = self.draw.randrange(8, TOKENS - 16), self.draw.randrange(3, 9)
            text = self.draw.choice(self.texts)
            begin = self.draw.randrange(len(text) - size)
            row[len(prompt) + at : len(prompt) + at + size] = text[begin : begin + size]
            marks[number, at : at + size] = 1
        self.columns["tool_marks"] = marks
        with self.eager():
            self.columns["tool_rollout"] = self._alone(rows, 3)
        self.columns["tool_trainer"] = self._alone(rows, 8)

    @torch.no_grad()
    def split(self) -> None:
        """Return the engine's log-probs of rows in which some tokens were two before re-tokenization."""
        vocabulary, rows = self.tokenizer.get_vocab(), []
        for row, prompt in zip(self.rows, self.prompts, strict=True):
            made, left = list(row[: len(prompt)]), self.draw.randrange(2, 4)
            for token in row[len(prompt) :]:
                text = self.tokenizer.convert_ids_to_tokens(token)
                cuts = [at for at in range(1, len(text)) if text[:at] in vocabulary and text[at:] in vocabulary]
                if left and cuts and self.draw.random() < 0.08:
                    at, left = self.draw.choice(cuts), left - 1
                    made += [vocabulary[text[:at]], vocabulary[text[at:]]]
                else:
                    made.append(token)
            rows.append(made[: len(row)])
        with self.eager():
            self.columns["split_rollout"] = self._alone(rows, 3)

    def _alone(self, rows: list[list[int]], batch: int) -> torch.Tensor:
        """Return log-probs (R, T) of the last T tokens of each row."""
        logits = self._logits([(row, [len(row)]) for row in rows], batch)
        pairs = zip(logits, rows, strict=True)
        return torch.stack([log_prob_of(own, torch.tensor(row[-TOKENS:])) for own, row in pairs])

    def _logits(
        self, laid: list[tuple[list[int], list[int]]], batch: int, is_padded: bool = False
    ) -> list[torch.Tensor]:
        """Return the logits (T, V) of the T tokens before each end of packs, given as ids and ends."""
        found = []
        for at in range(0, len(laid), batch):
            part = laid[at : at + batch]
            width = max(len(ids) for ids, _ in part)
            lefts = [PADS * (width - len(ids)) if is_padded else 0 for ids, _ in part]
            padded = [[0] * left + ids for left, (ids, _) in zip(lefts, part, strict=True)]
            made = self.model(right_padded(padded), use_cache=False).logits
            for line, left, (_, ends) in zip(made, lefts, part, strict=True):
                found += [line[left + end - TOKENS - 1 : left + end - 1].float() for end in ends]
        return found

    def routed(self) -> None:
        """Run a trainer in which a few tokens pass through another block, as if another expert were chosen."""
        layers, hooks = self.model.model.layers, []
        chosen: dict[str, torch.Tensor] = {}
        first = len(layers) // 4
        for layer in range(first, len(layers)):
            other = layers[(layer + len(layers) // 2) % len(layers)].mlp

            def hook(_, given, made, other=other, is_first=layer == first):
                if is_first:  # the same tokens in all layers, since a choice of experts changes later ones
                    chosen["mask"] = torch.rand(made.shape[:-1]) < ROUTED
                return torch.where(chosen["mask"][..., None], other.forward(given[0]), made)

            hooks.append(layers[layer].mlp.register_forward_hook(hook))
        self.trainer("routed")
        for each in hooks:
            each.remove()

    def updated(self, steps: int, rate: float, is_text: bool) -> Weights:
        """Return the change of weights by a few steps of Adam on the standard library, with advantages or not."""
        model = self.model.to(torch.float32)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        adam = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        for step in range(steps):
            if is_text:
                given, signs = torch.tensor(self.texts[PROMPTS + 3 * step : PROMPTS + 3 * step + 3]), torch.ones(3)
            else:
                texts = self.draw.sample(self.texts[PROMPTS + 9 :], 4)
                given = torch.tensor([text[:TOKENS] for text in texts])
                signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
            picked = log_prob_of(model(given, use_cache=False).logits[:, :-1], given[:, 1:])
            (-(picked * signs[:, None]).mean()).backward()
            adam.step()
            adam.zero_grad()
        after = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(before)
        return {name: after[name] - before[name] for name in before}


def right_padded(rows: list[list[int]]) -> torch.Tensor:
    """(R, S)."""
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])


def moved(whole: Weights, delta: Weights, scale: float, first_layer: int = 0) -> Weights:
    """Return weights with a part of an update; parameters outside of layers count as in the first."""
    layers = {name: int(name.split(".")[2]) if ".layers." in name else 0 for name in whole}
    return {n: value + (scale * delta[n] if layers[n] >= first_layer else 0) for n, value in whole.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("pool", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text-rate", type=float, default=1e-4)
    parser.add_argument("--policy-rate", type=float, default=1.2e-5)
    args = parser.parse_args()
    pool = Pool(args.model, args.seed)
    whole = {name: value.clone() for name, value in pool.model.state_dict().items()}
    middle = pool.model.config.num_hidden_layers // 2
    pool.rollout()
    pool.load(whole)
    pool.trainer("bf16", drawn=("main", *(f"t{temperature:g}" for temperature in TEMPERATURES)))
    pool.load(whole, torch.float32)
    pool.trainer("f32")
    with pool.eager():
        pool.trainer("f32_eager", batch=3)
        pool.load(whole)
        pool.trainer("bf16_eager", batch=3)
    pool.split()
    pool.tools()
    pool.trainer("packed", pack=4, batch=2)
    pool.trainer("padded", is_padded=True)
    pool.trainer("template", cut=lambda prompt: prompt[-6:])
    pool.routed()
    pool.load(whole)
    text = pool.updated(3, args.text_rate, is_text=True)
    pool.load(moved(whole, text, 1.5))
    pool.trainer("other")
    pool.load(moved(whole, text, 2.5, middle))
    pool.trainer("partial")
    pool.load(whole)
    pool.stale_prefix({name: value.to(torch.bfloat16) for name, value in moved(whole, text, 2.5).items()})
    pool.trainer("bf16", drawn=("cache",))
    policy = pool.updated(2, args.policy_rate, is_text=False)
    for scale in (4.0, 2.0):
        pool.load(moved(whole, policy, scale))
        pool.trainer(f"stale{scale:g}")
    pool.load(whole, torch.float16)
    pool.trainer("fp16", batch=3)
    pool.save(args.pool)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Log-probs of the same tokens by a rollout engine and by trainers of which each has one fault, from real forwards.

    python -m benchmarks.mismatch.forwards MODEL_FOLDER POOL.npz --seed 0

The rollout is a decode with a cache in bfloat16. At each place it also draws a token from its distribution at other
temperatures, and it knows which tokens top_p, top_k and min_p would have kept: those that they keep are draws of the
truncated sampler. A trainer is one forward over the whole rows. Needs torch and transformers.
"""

import argparse
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS, SAMPLES, TOKENS = 12, 4, 64
TEMPERATURES = (0.6, 0.8, 1.2)
CUTS = {"top_p_0.8": 0.8, "top_p_0.9": 0.9, "top_p_0.95": 0.95, "top_k_20": 20, "top_k_50": 50, "min_p_0.05": 0.05}
ROUTED, PADS = 0.03, 4


def kept_by(probs: torch.Tensor, ids: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of each sampler that cuts: the mass that it keeps, and whether it keeps the token drawn; (R,) of (R, V), (R,)."""
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
    """Rows of one seed: R rows of P prompt tokens, padded on the left, and T sampled ones."""

    def __init__(self, folder: str, seed: int, target: Path):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self.draw = random.Random(seed)
        self.target, self.columns = target, {}
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.texts = self._texts()
        prompts = [text[: self.draw.randrange(12, 37)] for text in self.texts[:PROMPTS]]
        self.prompts = [prompt for prompt in prompts for _ in range(SAMPLES)]
        self.group = np.repeat(np.arange(PROMPTS), SAMPLES)
        self.drawn: dict[str, torch.Tensor] = {}
        if target.exists():  # go on where it stopped
            with np.load(target) as found:
                self.columns = {name: found[name] for name in found.files if found[name].dtype == np.float32}
                ids = [name for name in found.files if name.startswith("ids_")]
                self.drawn = {name[4:]: torch.from_numpy(found[name].astype(np.int64)) for name in ids}
            self._lay()

    def _lay(self) -> None:
        self.rows = [prompt + row.tolist() for prompt, row in zip(self.prompts, self.drawn["main"], strict=True)]

    def has(self, *names: str) -> bool:
        """Whether all of these are there already."""
        return all(any(column.startswith(name + "_") for column in self.columns) for name in names)

    def _texts(self) -> list[list[int]]:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        found = []
        for file in self.draw.sample(files, 60):
            text = file.read_text("utf-8", errors="replace")
            at = self.draw.randrange(max(1, len(text) - 2000))
            found.append(self.tokenizer(text[at : at + 2000])["input_ids"][:160])
        return [ids for ids in found if len(ids) == 160]

    def save(self, **columns) -> None:
        """Adds columns (R, T) and writes all that there are."""
        self.columns |= {name: np.asarray(value, np.float32) for name, value in columns.items()}
        lengths = [len(prompt) for prompt in self.prompts]
        ids = {f"ids_{name}": np.asarray(value, np.int32) for name, value in self.drawn.items()}
        np.savez_compressed(self.target, group=self.group, prompt_length=lengths, **ids, **self.columns)
        print(self.target, *columns, flush=True)

    @torch.no_grad()
    def rollout(self) -> None:
        """Decodes with a cache, in bfloat16; keeps what it drew and its log-probs."""
        if self.has("rollout_main"):
            return
        model = self.model.to(torch.bfloat16)
        width = max(map(len, self.prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in self.prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in self.prompts])
        cache, given, kept = None, ids, {}
        for _ in range(TOKENS):
            places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -given.shape[1] :]
            made = model(given, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True,
                         logits_to_keep=1)  # fmt: skip
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
        columns = {name: torch.stack(values, 1) for name, values in kept.items()}
        self.drawn = {name[4:]: columns.pop(name) for name in list(columns) if name.startswith("ids_")}
        self._lay()
        self.save(**columns)

    def _drawn(self, logits, name: str, temperatures, kept: dict, temperature: float = 1.0) -> torch.Tensor:
        ids = torch.multinomial((logits / temperature).softmax(-1), 1)
        kept.setdefault(f"ids_{name}", []).append(ids[:, 0])
        for each in temperatures:
            found = (logits / each).log_softmax(-1).gather(-1, ids)[:, 0]
            kept.setdefault(f"rollout_{name}_{each:g}", []).append(found)
        return ids[:, 0]

    @torch.no_grad()
    def trainer(self, name: str, *, cut: Callable = lambda prompt: prompt, pack: int = 1, padded: bool = False,
                rows: int | None = None, batch: int = 8, only: tuple[str, ...] | None = None) -> None:  # fmt: skip
        """One forward of the model as it is over whole rows; keeps its log-probs of what was drawn.

        Args:
            cut: what the trainer sees of a prompt.
            pack: rows that are laid end to end and see one another.
            padded: whether rows are padded on the left, four times as far as they need, and see it.
            rows: of so many rows only, the others NaN.
            batch: rows, or packs, of a forward.
            only: of what is drawn.
        """
        if all(self.has(f"{name}_{drawn}") for drawn in only or self.drawn):
            return
        logits = []
        packs = [range(at, min(at + pack, len(self.rows))) for at in range(0, rows or len(self.rows), pack)]
        for at in range(0, len(packs), batch):
            laid = []
            for members in packs[at : at + batch]:
                ids, ends = [], []
                for row in members:
                    ids += [*cut(self.prompts[row]), *self.rows[row][len(self.prompts[row]) :]]
                    ends.append(len(ids))
                laid.append((ids, ends))
            width = max(len(ids) for ids, _ in laid)
            pads = [(width - len(ids)) * (PADS if padded else 1) for ids, _ in laid]
            wide = max(pad + len(ids) for pad, (ids, _) in zip(pads, laid, strict=True))
            given = torch.tensor(
                [([0] * pad if padded else []) + ids + [0] * (wide - len(ids) - pad * padded)
                 for (ids, _), pad in zip(laid, pads, strict=True)]
            )  # fmt: skip
            made = self.model(given, use_cache=False).logits
            for line, (_, ends), pad in zip(made, laid, pads, strict=True):
                shift = pad if padded else 0
                logits += [line[shift + end - TOKENS - 1 : shift + end - 1].float() for end in ends]
        self._keep(name, logits, only)

    def _keep(self, name: str, logits: list[torch.Tensor], only=None) -> None:
        columns = {}
        for drawn, ids in self.drawn.items():
            if only is not None and drawn not in only:
                continue
            own = {"main": (1.0, *TEMPERATURES), "cache": (1.0,)}.get(drawn) or (1.0, float(drawn[1:]))
            for temperature in own:
                column = torch.full(ids.shape, float("nan"))
                for row, found in enumerate(logits):
                    scaled = (found / temperature).log_softmax(-1)
                    column[row] = scaled.gather(-1, ids[row][:, None].long())[:, 0]
                columns[f"{name}_{drawn}_{temperature:g}"] = column
        self.save(**columns)

    @torch.no_grad()
    def stale_prefix(self, old: dict) -> None:
        """A rollout whose prompts' cache was made by other weights; it draws tokens of its own."""
        if self.has("rollout_cache"):
            return
        now = {name: value.clone() for name, value in self.model.state_dict().items()}
        ids, logps = [], []
        for prompt, row in zip(self.prompts, self.rows, strict=True):
            self.model.load_state_dict(old)
            cache = self.model(torch.tensor([prompt[:-1]]), use_cache=True, logits_to_keep=1).past_key_values
            self.model.load_state_dict(now)
            given = torch.tensor([row[len(prompt) - 1 : -1]])
            logits = self.model(given, past_key_values=cache, use_cache=True).logits[0].float()
            ids.append(torch.multinomial(logits.softmax(-1), 1)[:, 0])
            logps.append(logits.log_softmax(-1).gather(-1, ids[-1][:, None])[:, 0])
        self.drawn["cache"] = torch.stack(ids)
        self.save(rollout_cache_1=torch.stack(logps))

    @torch.no_grad()
    def tools(self) -> None:
        """Rows in which a tool's text stands in the middle, as the engine and as the trainer read them."""
        if self.has("tool_rollout", "tool_trainer"):
            return
        rows, begins = [list(row) for row in self.rows], []
        for row, prompt in zip(rows, self.prompts, strict=True):
            at, size, text = (
                self.draw.randrange(8, TOKENS - 16),
                self.draw.randrange(3, 9),
                self.draw.choice(self.texts),
            )
            begin = self.draw.randrange(len(text) - size)
            row[len(prompt) + at : len(prompt) + at + size] = text[begin : begin + size]
            begins.append((at, size))
        marks = [[at <= place < at + size for place in range(TOKENS)] for at, size in begins]
        columns = {"tool_marks": torch.tensor(marks).float()}
        for name, batch in (("tool_rollout", 3), ("tool_trainer", 8)):
            self.model.set_attn_implementation("eager" if batch == 3 else "sdpa")
            columns[name] = torch.stack(self._alone(rows, batch))
        self.save(**columns)

    @torch.no_grad()
    def split(self) -> None:
        """The engine's log-probs of rows in which some tokens were two, before their text was tokenized anew."""
        if self.has("split_rollout"):
            return
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
        self.model.set_attn_implementation("eager")
        self.save(split_rollout=torch.stack(self._alone(rows, 3)))
        self.model.set_attn_implementation("sdpa")

    def _alone(self, rows: list[list[int]], batch: int) -> list[torch.Tensor]:
        """Log-probs (T,) of the last T tokens of each row."""
        found = []
        for at in range(0, len(rows), batch):
            part = rows[at : at + batch]
            width = max(map(len, part))
            made = self.model(torch.tensor([row + [0] * (width - len(row)) for row in part]), use_cache=False).logits
            for row, logits in zip(part, made, strict=True):
                scores = logits[len(row) - TOKENS - 1 : len(row) - 1].float().log_softmax(-1)
                found.append(scores.gather(-1, torch.tensor(row[-TOKENS:])[:, None])[:, 0])
        return found

    def update(self, name: str, whole: dict, delta: dict, scale: float, layers=lambda layer: True) -> None:
        """A trainer with a part of an update, in bfloat16."""
        if not self.has(name):
            self.model.to(torch.float32).load_state_dict(moved(whole, delta, scale, layers))
            self.model.to(torch.bfloat16)
            self.trainer(name, only=("main",))

    def updated(self, steps: int, rate: float, is_text: bool) -> dict:
        """Weights after a few steps of Adam: on the standard library, or by advantages of +1 and -1 on it."""
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
            logits = model(given, use_cache=False).logits[:, :-1].log_softmax(-1)
            picked = logits.gather(-1, given[:, 1:, None])[..., 0]
            (-(picked * signs[:, None]).mean()).backward()
            adam.step()
            adam.zero_grad()
        after = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(before)
        del adam
        for weight in model.parameters():
            weight.grad = None
        return {name: after[name] - before[name] for name in before}


def moved(whole: dict, delta: dict, scale: float, layers: Callable[[int], bool] = lambda layer: True) -> dict:
    """Weights with a part of an update."""
    found = {}
    for name, value in whole.items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        found[name] = value + (scale * delta[name] if layers(layer) else 0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("pool", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text-rate", type=float, default=1e-4)
    parser.add_argument("--policy-rate", type=float, default=1.2e-5)
    args = parser.parse_args()
    pool = Pool(args.model, args.seed, args.pool)
    whole = {name: value.clone() for name, value in pool.model.state_dict().items()}

    def as_(weights: dict, dtype=torch.bfloat16) -> None:
        pool.model.to(torch.float32).load_state_dict(weights)
        pool.model.to(dtype)

    layers = pool.model.config.num_hidden_layers
    pool.rollout()
    as_(whole)
    pool.trainer("bf16", only=("main", *(f"t{temperature:g}" for temperature in TEMPERATURES)))
    as_(whole, torch.float32)
    pool.trainer("f32", only=("main",))
    pool.model.set_attn_implementation("eager")
    pool.trainer("f32_eager", batch=3, only=("main",))
    as_(whole)
    pool.trainer("bf16_eager", batch=3, only=("main",))
    pool.split()
    pool.tools()
    pool.trainer("packed", pack=4, batch=2, only=("main",))
    pool.trainer("padded", padded=True, only=("main",))
    pool.trainer("template", cut=lambda prompt: prompt[-6:], only=("main",))
    routed(pool)
    if not pool.has("other", "partial", "rollout_cache"):
        as_(whole)
        text = pool.updated(3, args.text_rate, is_text=True)
        pool.update("other", whole, text, 1.5)
        pool.update("partial", whole, text, 2.5, lambda layer: layer >= layers // 2)
        as_(whole)
        pool.stale_prefix({name: value.to(torch.bfloat16) for name, value in moved(whole, text, 2.5).items()})
        del text
    as_(whole)
    pool.trainer("bf16", only=("cache",))
    if not pool.has("stale4", "stale2"):
        as_(whole)
        policy = pool.updated(2, args.policy_rate, is_text=False)
        pool.update("stale4", whole, policy, 4.0)
        pool.update("stale2", whole, policy, 2.0)
    as_(whole, torch.float16)
    pool.trainer("fp16", batch=3, only=("main",))


def routed(pool: Pool) -> None:
    """A trainer that sends a few tokens through another block of the network: an expert chosen otherwise."""
    if pool.has("routed"):
        return
    layers, hooks = pool.model.model.layers, []
    chosen: dict[str, torch.Tensor] = {}
    first = len(layers) // 4
    for layer in range(first, len(layers)):
        other = layers[(layer + len(layers) // 2) % len(layers)].mlp

        def hook(_, given, made, other=other, is_first=layer == first):
            if is_first:  # the same tokens in all layers: a choice of experts changes those after it
                chosen["mask"] = torch.rand(made.shape[:-1]) < ROUTED
            return torch.where(chosen["mask"][..., None], other.forward(given[0]), made)

        hooks.append(layers[layer].mlp.register_forward_hook(hook))
    pool.trainer("routed", only=("main",))
    for each in hooks:
        each.remove()


if __name__ == "__main__":
    main()

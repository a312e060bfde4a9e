# SPDX-License-Identifier: Apache-2.0
"""What is typical: every token's own gradient in healthy GRPO steps of a pretrained language model.

    python -m benchmarks.shapes                # SmolLM2-135M on its own answers; a backward for each token
    python -m benchmarks.shapes --steps 1 --groups 3

Writes shapes.json (every token's numbers), shapes.md and shapes.svg.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.localization import pretrained
from benchmarks.run import REPO, Progress, as_typed, digest, finish, parser, table, write
from experiments.generation import cut_at
from experiments.llm import tasks
from gradloc.search.candidates import ELEVATED
from gradloc.words.causes import NOTABLE
from tests.bare import entropy_of, log_prob_of

ROLLOUTS = 8  # of each question
_LONGEST = 24  # tokens of an answer


@dataclass(frozen=True)
class Row:
    """One sampled answer."""

    prompt: torch.Tensor
    """(P,)"""
    response: torch.Tensor
    """(T,), with its end."""
    advantage: float


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the record and the figure."""
    options = parser("shapes", __doc__)
    options.add_argument("--steps", type=int, default=2)
    options.add_argument("--groups", type=int, default=3, help="questions of a step, each with eight answers")
    options.add_argument("--threads", type=int, default=1)
    parsed = options.parse_args(arguments)
    torch.set_num_threads(parsed.threads)
    path = pretrained.folder(REPO / ".gradloc")
    model = pretrained.Pretrained(path)
    steps = [list(_step(model, path, parsed.groups, seed)) for seed in range(parsed.steps)]
    progress = Progress(sum(len(row.response) for rows in steps for row in rows))
    run: dict[str, Any] = {"command": as_typed("shapes", arguments), "core_sha256": digest(), "steps": []}
    for rows in steps:
        run["steps"].append(measure(model, rows, progress))
        write(run, parsed.out, "shapes")
    finish(run, parsed.out, "shapes", markdown(run))
    draw(run, parsed.out / "shapes.svg")
    return 0


def _step(model: pretrained.Pretrained, path: Path, groups: int, seed: int) -> Iterator[Row]:
    """The answers to as many questions as are wanted that were answered rightly and wrongly, as GRPO weighs them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    torch.manual_seed(seed)
    for index, question in enumerate(tasks.draw(200, f"shapes {seed}")):
        chat = tasks.to_row(index, question, "shapes")["prompt"]
        prompt = torch.tensor(tokenizer.apply_chat_template(chat, add_generation_prompt=True))
        how = dict(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=_LONGEST, num_return_sequences=ROLLOUTS)
        ids = prompt[None]
        answers = model.inner.generate(ids, attention_mask=torch.ones_like(ids), **how)[:, len(prompt) :]
        kept = [torch.tensor(cut_at(tokenizer.eos_token_id, row, row)[0]) for row in answers.tolist()]
        texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in kept]
        rewards = torch.tensor([float(re.findall(r"\d+", text)[-1:] == [question.answer]) for text in texts])
        print(f"{question.text} {int(rewards.sum())} of {ROLLOUTS} right", file=sys.stderr, flush=True)
        if rewards.std() == 0:
            continue  # no advantage, so no gradient
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for answer, advantage in zip(kept, advantages.tolist(), strict=True):
            yield Row(prompt, answer, advantage)
        groups -= 1
        if not groups:
            return


def measure(model: pretrained.Pretrained, rows: Sequence[Row], progress: Progress) -> dict[str, Any]:
    """Of each token of a step: log-prob, entropy, coefficient, the norm of its own gradient, and share."""
    num_tokens, params = sum(len(row.response) for row in rows), list(model.parameters())
    model.zero_grad()
    for row in rows:
        (-row.advantage / num_tokens * _outputs(model, row)[0].sum()).backward()
    whole = [param.grad for param in params]
    model.zero_grad()
    norm = float(torch.stack([gradient.double().norm() for gradient in whole]).norm())
    found: dict[str, list] = {name: [] for name in ("row", "log_prob", "entropy", "coefficient", "norm", "share")}
    for number, row in enumerate(rows):
        log_prob, entropy = _outputs(model, row)
        coefficient = -row.advantage / num_tokens
        for value in log_prob:
            gradient = torch.autograd.grad(value, params, retain_graph=True)
            norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in gradient]
            dots = [torch.dot(part.flatten(), other.flatten()) for part, other in zip(gradient, whole, strict=True)]
            dot = float(torch.stack(dots).sum(dtype=torch.float64))
            found["norm"].append(abs(coefficient) * float(torch.stack(norms).norm()))
            found["share"].append(coefficient * dot / norm**2)
            found["coefficient"].append(coefficient)
            found["row"].append(number)
            progress.step(f"norm {found['norm'][-1]:.3g}")
        found["log_prob"] += log_prob.tolist()
        found["entropy"] += entropy.tolist()
    return {"step_norm": norm, "rows": len(rows), **found}


def _outputs(model: pretrained.Pretrained, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies (T,) of an answer."""
    tokens = torch.cat([row.prompt, row.response])[None]
    logits = model(tokens[:, :-1], len(row.response))
    return log_prob_of(logits, row.response[None])[0], entropy_of(logits.detach())[0]


# ---- what the record says


def summary(step: dict[str, Any]) -> dict[str, Any]:
    """What a step's record comes to; what is ``over`` and ``beyond`` is a part of its tokens."""
    names = ("log_prob", "coefficient", "norm", "share")
    log_prob, coefficient, norm, share = (torch.tensor(step[name], dtype=torch.float64) for name in names)
    surprise, jacobian = 1 - log_prob.exp(), norm / coefficient.abs()
    typical = step["step_norm"] / float(coefficient.norm())  # as gradloc has it: by the root sum of squares
    over, predicted = jacobian / typical, surprise / surprise.mean()
    rows = torch.tensor(step["row"])
    per_row = torch.stack([coefficient[rows == row].abs().median() for row in rows.unique()])
    sizes = share.abs().sort(descending=True).values
    quantiles = (norm / norm.median()).quantile(torch.tensor([0.01, 0.1, 0.9, 0.99, 1.0], dtype=torch.float64))
    return {
        "tokens": len(norm),
        "rows": step["rows"],
        "norm": step["step_norm"],
        "quantiles": quantiles.tolist(),
        "rank_correlation": spearman(norm, coefficient.abs() * surprise),
        "jacobians": (typical, float(jacobian.median())),
        "jacobian_over": _part(over >= NOTABLE),
        # these gradloc calls `large_jacobian`; the others would be `low_probability`
        "beyond_probability": _part((over >= NOTABLE) & (over > NOTABLE * predicted)),
        "advantage_over": _part(coefficient.abs() >= NOTABLE * coefficient.abs().median()),
        "rows_elevated": _part(per_row >= ELEVATED * per_row.median()),
        "largest_norm": float(norm.max()) / step["step_norm"],
        "largest_share": float(share.abs().max()),
        "top_shares": [float(sizes[: max(round(len(sizes) * part), 1)].sum() / sizes.sum()) for part in (0.01, 0.1)],
        "negative": _part(share < 0),
        "closure": float(share.sum()),
    }


def spearman(first: torch.Tensor, second: torch.Tensor) -> float:
    """Rank correlation of two (n,) tensors without ties worth mentioning."""
    ranks = torch.stack([values.argsort().argsort().double() for values in (first, second)])
    return float(torch.corrcoef(ranks)[0, 1])


def _part(flags: torch.Tensor) -> float:
    return float(flags.double().mean())


def markdown(run: dict[str, Any]) -> str:
    """One column for each step."""
    found = [summary(step) for step in run["steps"]]
    told = {
        "answers, tokens": "{rows}, {tokens}",
        "norm of the step": "{norm:.3g}",
        "closure of the tokens' shares": "{closure:.4f}",
        "tokens' norms over their median: 1 %, 10 %, 90 %, 99 %, largest": ", ".join(
            f"{{quantiles[{place}]:.2g}}" for place in range(5)
        ),
        "rank correlation with \\|coefficient\\| (1 - pi)": "{rank_correlation:.3f}",
        "typical Jacobian: gradloc's, the median": "{jacobians[0]:.2g}, {jacobians[1]:.2g}",
        "tokens of 3 times the typical Jacobian and more": "{jacobian_over:.1%}",
        "of these beyond 3 times what 1 - pi predicts": "{beyond_probability:.1%}",
        "tokens of 3 times the median advantage and more": "{advantage_over:.1%}",
        "rows of 3 times the rows' median coefficient and more": "{rows_elevated:.1%}",
        "largest token's norm over the step's": "{largest_norm:.3f}",
        "largest share": "{largest_share:.1%}",
        "of all absolute shares: the loudest 1 %, 10 % of tokens": "{top_shares[0]:.0%}, {top_shares[1]:.0%}",
        "tokens of negative share": "{negative:.0%}",
    }
    head = ["", *(f"step {number}" for number in range(1, len(found) + 1))]
    rows = [[name, *(form.format(**each) for each in found)] for name, form in told.items()]
    return f"`{run['command']}`\n\n{table([head, *rows])}"


def draw(run: dict[str, Any], path: Path) -> None:
    """Norms, the predictor, and how shares add up."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "gradloc"
    figure = Figure(figsize=(12, 3.6))
    left, middle, right = figure.subplots(1, 3)
    for number, step in enumerate(run["steps"], 1):
        names = ("log_prob", "coefficient", "norm", "share")
        log_prob, coefficient, norm, share = (torch.tensor(step[name], dtype=torch.float64) for name in names)
        label = f"step {number}, {len(norm)} tokens"
        left.hist((norm / norm.median()).log10().tolist(), bins=30, histtype="step", label=label)
        predictor = coefficient.abs() * (1 - log_prob.exp())
        middle.scatter(predictor.tolist(), norm.tolist(), s=6, alpha=0.6, label=label)
        sizes = share.abs().sort(descending=True).values
        part = torch.arange(1, len(sizes) + 1) / len(sizes)
        right.plot(part.tolist(), (sizes.cumsum(0) / sizes.sum()).tolist(), label=label)
    left.set(xlabel="log10 of a token's norm over the median", ylabel="tokens", title="norms of single tokens")
    middle.set(xlabel="|coefficient| (1 - pi)", ylabel="norm", title="their predictor", xscale="log", yscale="log")
    right.set(
        xlabel="part of the tokens, loudest first", ylabel="part of all |shares|", title="shares of a healthy step"
    )
    right.set_xscale("log")
    for axis in (left, middle, right):
        axis.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())

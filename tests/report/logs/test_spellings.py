# SPDX-License-Identifier: Apache-2.0
"""One run in hundreds of spellings: its spike is found at its step, or the log is refused, and nothing else is said."""

import math
import random
from collections import Counter

import pytest

from gradloc.report.errors import ReportError
from gradloc.report.runs.diagnosis import diagnose
from gradloc.report.runs.run import read_run
from tests.report.builder import REPO

NUM_STEPS, SPIKE = 60, 47
PREFIXES = (
    *("", "> ", "🚀 ", "0: ", "[rank0]: ", "\x1b[32mINFO\x1b[0m ", "(Trainer pid=4211) ", "[10:{at:02d}:07] "),
    *("2026-03-04 10:{at:02d}:07,123 - INFO - ", "I0304 10:{at:02d}:07.1234  2763 trainer.py:65] "),
    *("2026-03-04 10:{at:02d}:07.123 | INFO     | train:main:57 - ", "2026-03-04T10:{at:02d}:07Z "),
    *("[2026-03-04 10:{at:02d}:07][train][INFO] - ", "Training:  50%|██  | {at}/60 [00:{at:02d}<01:10,  1.04it/s] "),
)
STEPS = (
    *(
        "step {at}",
        "Step: {at}",
        "step={at}",
        "[{at}/60]",
        "iter {at}/60",
        "Iteration {at}:",
        "{at} |",
        "epoch 0 step {at}",
    ),
    *("Epoch [1][{at}/60]", "it {at}", "global_step {at}", "Step [{at}/60]", "train step {at:6d}", "#{at}", "({at})"),
    *("update {at}", "Batch {at}/60", "{at}:", "{at}/60", "[{at}]", "step_{at}", "steps: {at}"),
)
PAIRS = (
    *(
        "{name}: {value}",
        "{name}={value}",
        "{name} {value}",
        "{name} = {value}",
        "{name} -> {value}",
        "{name} ({value})",
    ),
    *("{name}: [{value}]", "{name}: tensor({value})", "{value} {name}", "'{name}': {value}", "{name}\t{value}"),
)
BETWEEN = (", ", " | ", " ", "; ", "\t", " - ", " / ", "  ", "] [")
NAMES = (
    *(("loss", "grad_norm"), ("Loss", "Grad Norm"), ("train/loss", "train/grad_norm"), ("LOSS", "GRAD_NORM")),
    *(("loss", "|g|"), ("loss", "grad"), ("lm loss", "grad norm"), ("loss", "norm"), ("ce", "total_norm")),
    *(("avg loss", "‖∇‖"), ("loss", "GN"), ("nll", "grad_l2"), ("loss", "||grad||"), ("train_loss", "gnorm")),
    ("xent", "pre_clip_grad_norm"),
)
NUMBERS = ("{:.4f}", "{:.3e}", "{:.4g}", "{:.3E}", "{!r}")
LAST = (("time", "12.3ms"), ("mem", "7.2GB"), ("tps", "1,234"), ("mfu", "41.2%"), ("eta", "0:12:33"), ("acc", "0.51"))
BESIDE = (
    *(
        "Validation loss: 2.315",
        "eval | step {at} | loss 2.315 | ppl 9.1",
        "step {at}: val loss 2.315",
        "[eval] loss=2.315",
    ),
    *(
        "Evaluating at step {at}...",
        "Saved checkpoint to out/step_{at}/model.pt",
        "best val_loss so far 2.3 (step {at})",
    ),
    *(
        "Eval iter {at}: loss = 2.315",
        "lr decayed to 1.0e-04 at step {at}",
        "GPU mem 7.2GB, cpu 41%",
        "  Num examples = 512",
    ),
    *("WARNING: grad norm is large", "***** Running Evaluation *****", "epoch 1 finished in 12.3 s, mean loss 2.315"),
)


def written(choose: random.Random, is_among_others: bool) -> str:
    """Return a log of one run, in a spelling by chance."""
    prefix, step, pair, between, names, spelled, last = map(
        choose.choice, (PREFIXES, STEPS, PAIRS, BETWEEN, NAMES, NUMBERS, LAST)
    )
    order, num_times = choose.choice(((0, 1, 2, 3), (2, 1, 0, 3))), choose.choice((1, 1, 2))
    others, every = choose.sample(BESIDE, 3), choose.choice((10, 15, 20))
    lines = []
    for at in range(1, NUM_STEPS + 1):
        norm = 903.0 if at == SPIKE else 0.49 * math.exp(choose.gauss(0, 0.08))
        loss = 3 - 0.02 * at + choose.gauss(0, 0.03)
        values = [(names[0], spelled.format(loss)), (names[1], spelled.format(norm)), ("lr", "3.00e-04"), last]
        texts = [pair.format(name=values[place][0], value=values[place][1]) for place in order]
        line = between.join([prefix.format(at=at) + step.format(at=at), *texts])
        lines += [line] * (num_times if is_among_others else 1)
        lines += [other.format(at=at) for other in others] if is_among_others and at % every == 0 else []
    return "\n".join([*lines, ""])


@pytest.mark.parametrize("is_among_others", (False, True))
def test_a_spike_is_found_at_its_step_in_any_spelling_or_the_log_is_refused(tmp_path, is_among_others):
    choose, found = random.Random(4), Counter()
    for count in range(250):
        log = tmp_path / f"{count}.log"
        log.write_text(written(choose, is_among_others), encoding="utf-8")
        try:
            run, *others = read_run(log).runs
        except ReportError:
            found["refused"] += 1
            continue
        worst = diagnose(run).worst
        assert not others and worst is not None, log.read_text(encoding="utf-8")[:400]
        assert (worst.peak.step, round(worst.peak.norm)) == (SPIKE, 903), log.read_text(encoding="utf-8")[:400]
        found["right"] += 1
    assert found["right"] >= 0.97 * found.total()


def test_norms_that_pandas_has_left_empty_are_noted():
    notes = " ".join(read_run(REPO / "tests" / "data" / "pieces" / "norms-that-are-empty.csv").notes)
    assert "grad_norm is empty at 2 steps (31, 47), which may be NaN" in notes

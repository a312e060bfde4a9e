# SPDX-License-Identifier: Apache-2.0
"""``gradloc quartiles``: what it reads, draws and prints, and when it cannot."""

import json

import pytest

from gradloc.record import analysis
from gradloc.record.store import plain
from gradloc.report.cli import main
from tests.world.events import validate

pytestmark = pytest.mark.full


def change(scale):
    sizes = tuple(scale * end for end in (-1.0, -0.5, -0.1, 0.0, 0.2, 0.5, 1.0))
    return analysis.Change(mean=scale, mean_abs=0.2 * scale, percentiles=sizes, counts=(1, 3, 9, 2), right_way=0.5)


def moved(scale):
    agreement = analysis.Agreement(correlation=0.9, ratio=0.8)
    return analysis.Moved(edges=(-0.2, -0.1, 0.0, 0.1, 0.2), quartiles=(change(scale),) * 4, agreement=agreement)


def update(scale):
    taken = dict(is_taken=True, grad_norm=scale, clip_factor=1.0, update_norm=scale)
    return analysis.Update(**taken, changes=moved(0.1 * scale), own_changes=moved(0.05 * scale))


def record(step=1):
    """As the trainer writes it."""
    quartiles = tuple(
        analysis.Quartile(
            name=f"q{number}",
            num_tokens=10 * number,
            token_share=number / 10,
            probability=analysis.Range(min=0.1, mean=0.2, max=0.25 * number),
            one_minus_probability=1 - 0.2 * number,
            mean_abs_advantage=1.0,
            norm=1.0 / number,
            norm_per_token=0.1 / number**2,
            gradient_share=0.7 - 0.2 * number + 0.05 * (number == 4),
            cosine=0.5,
            sampled=1,
            mean_log_prob_norm=5.0 / number,
            median_log_prob_norm=5.0 / number,
            mean_loss_norm=0.1,
        )
        for number in range(1, 5)
    )
    tokens = tuple(
        analysis.SampledToken(quartile=number, probability=0.2 * number, log_prob_norm=5.0**number, loss_norm=0.1)
        for number in range(1, 5)
    )
    loss = analysis.Loss(terms=("task",), loss_mode="vanilla", loss_agg_mode="token-mean", adv_estimator="grpo")
    made = analysis.QuartileAnalysis(
        run=analysis.TrainingRun(project="tests", experiment="report"),
        global_step=step,
        split="range",
        num_rows=16,
        loss=loss,
        whole=analysis.Whole(norm=1.2, num_tokens=100),
        closure=3e-7,
        quartiles=quartiles,
        tokens=tokens,
        rank_correlation=analysis.Correlations(log_prob_norm=0.93),
        updates={"all": update(1.0), "lowest": update(0.9), "highest": update(0.2), "none": update(0.1)},
        optimizer=analysis.Optimizer(name="AdamW", learning_rate=1e-6),
        cost=analysis.Cost(forwards=9, backwards=5, probe_seconds=1.0, seconds=1.1),
    )
    return json.loads(json.dumps(plain(made)))


def write(run, made):
    validate("quartile_analysis", made)
    folder = run / "gradloc" / "quartile_analysis"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{made['global_step']}.json"
    path.write_text(json.dumps(made))
    return path


def test_each_step_gets_a_table_and_a_figure(tmp_path, shown):
    for step in (1, 51):
        write(tmp_path, record(step))
    out = tmp_path / "out"
    said = shown("quartiles", tmp_path, "--output-dir", out)
    assert {path.name for path in out.iterdir()} == {"quartiles_step_1.png", "quartiles_step_51.png"}
    assert "Step 51: 100 tokens in quarters of the probabilities; gradient norm 1.2" in said
    assert "rank correlation with 1-π: 0.93" in said
    assert "q1 only: gradient 0.9, step 0.9; changes against all tokens': r = 0.9" in said
    lines = [line.split() for line in said.splitlines()]
    assert ["q1", "10", "(10%)", "0.8", "1", "50%", "5", "0.02", "0.018", "0.004"] in lines


@pytest.mark.slow
def test_the_same_run_gives_the_same_bytes_and_svg_on_request(tmp_path, shown):
    write(tmp_path / "run", record())
    for name in ("one", "two"):
        shown("quartiles", tmp_path / "run", "--output-dir", tmp_path / name, "--format", "svg")
    (one,), (two,) = ((tmp_path / name).iterdir() for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    assert one.read_bytes().startswith(b"<?xml")


def test_json_prints_the_numbers_and_draws_nothing(tmp_path, shown, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = record()
    made["whole"]["norm"] = made["quartiles"][0]["norm"] = "NaN"
    write(tmp_path / "run", made)
    (step,) = json.loads(shown("quartiles", "run", "--json"))["steps"]
    assert step["global_step"] == 1 and step["whole"]["norm"] == "NaN"
    assert step["updates"]["lowest"]["own_changes"]["agreement"]["correlation"] == 0.9
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def without_steps(made):
    """After a gradient that is not finite."""
    for found in made["updates"].values():
        found.update(is_taken=False, grad_norm="NaN", changes=None, own_changes=None)
    made["whole"]["norm"] = "NaN"
    made["quartiles"][0].update(norm="NaN", gradient_share="NaN")


def with_nothing(made):
    """A batch without advantages."""
    for quartile in made["quartiles"]:
        quartile.update(norm=0.0, gradient_share=None, cosine=None)
    made.update(closure=None, tokens=[])
    made["updates"].update(lowest=None, highest=None)


def with_an_empty_quartile(made):
    made["quartiles"][3] = plain(analysis.Quartile(name="q4", num_tokens=0, norm=0.0))
    for name in ("all", "lowest", "none"):
        for kind in ("changes", "own_changes"):
            made["updates"][name][kind]["quartiles"][3] = None
    made["updates"]["highest"] = None


def without_movement(made):
    """A learning rate of zero."""
    still = analysis.Change(mean=0.0, mean_abs=0.0, percentiles=(0.0,) * 7, counts=(15,))
    changes = plain(analysis.Moved(edges=(-1e-12, 1e-12), quartiles=(still,) * 4))
    for found in made["updates"].values():
        found["update_norm"] = 0.0
        found["changes"] = found["own_changes"] = changes


@pytest.mark.parametrize("spoil", [without_steps, with_nothing, with_an_empty_quartile, without_movement])
@pytest.mark.parametrize("split", ["range", pytest.param("quantile", marks=pytest.mark.slow)])
def test_whatever_there_is_is_drawn_and_told(tmp_path, shown, split, spoil):
    made = record()
    made["split"] = split
    spoil(made)
    write(tmp_path, made)
    said = shown("quartiles", tmp_path, "--output-dir", tmp_path / "out")
    assert (tmp_path / "out" / "quartiles_step_1.png").stat().st_size > 1000
    if spoil is without_steps:
        assert "q1 only: the gradient's norm is NaN, so no step was taken" in said
    if spoil in (with_nothing, with_an_empty_quartile):
        assert "q4 only: no gradient, no update" in said


def test_a_file_that_was_cut_off_is_noted_and_the_others_are_read(tmp_path, capsys):
    write(tmp_path, record(1))
    broken = write(tmp_path, record(51))
    broken.write_text(broken.read_text()[:100])
    other = write(tmp_path, record(52))
    other.write_text(json.dumps({**record(52), "quartiles": []}))
    assert main(["quartiles", str(tmp_path), "--output-dir", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "step_51.json cannot be read" in said.err and "step_52.json cannot be read (0 quartiles)" in said.err
    assert "Step 1: 100 tokens" in said.out


@pytest.mark.parametrize(
    "folder, options, sentence",
    [
        ("run", ["--step", "2"], "step 2 was not analysed; those that were: 1."),
        ("empty", [], "holds no quartile analysis: none was due, or trainer.quartile_analysis_mode"),
        ("nowhere", [], "is not a folder: name the folder of a run."),
    ],
    ids=["no such step", "no analysis", "no folder"],
)
def test_what_cannot_be_done_is_said_in_a_sentence(tmp_path, refused, folder, options, sentence):
    write(tmp_path / "run", record())
    (tmp_path / "empty").mkdir()
    assert sentence in refused("quartiles", tmp_path / folder, *options)

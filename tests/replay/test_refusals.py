# SPDX-License-Identifier: Apache-2.0
"""What cannot be replayed is refused in one sentence, with exit code 2 and no traceback."""

import json
import shutil

import pytest
import torch

from gradloc.core.memory_plans import Memory
from tests.replay.conftest import edit_meta, edit_tensors


def _nested(levels):
    return {"a": _nested(levels - 1)} if levels else {}


COEFFICIENTS = "log_prob_coefficients"
TENSORS = {
    "no coefficients": (lambda t: t.pop(COEFFICIENTS), "batch.safetensors has no tensor log_prob_coefficients."),
    "a shape mismatch": (
        lambda t: t.update({COEFFICIENTS: t[COEFFICIENTS][:, :-1]}),
        "log_prob_coefficients must have the shape (4, 12), found (4, 11).",
    ),
    "another number of rows": (lambda t: t.update(input_ids=t["input_ids"][:-1]), "found (3, 17) and (4, 12)."),
    "an empty response mask": (lambda t: t["response_mask"].zero_(), "so there is no token to look at."),
    "a micro-batch without tokens": (
        lambda t: t["attention_mask"][:2].zero_(), "the attention_mask of layout[0] is 0 in all of its rows.",
    ),
    "tokens that the model does not know": (lambda t: t["input_ids"].add_(50), "it knows tokens 0 to 95, and the"),
}  # fmt: skip
META = {
    "an older bundle": (lambda m: m.update(schema_version=1), "replay it by gradloc 0.3.0, where the run's trainer is"),
    "an unknown schema version": (lambda m: m.update(schema_version=7), "this version of gradloc reads 2."),
    "layout rows outside the tensors": (
        lambda m: m["layout"][1].update(rows=[2, 9]), "layout[1] takes rows 2 to 9, but the tensors have 4 rows.",
    ),
    "no layout": (lambda m: m["layout"].clear(), "empty in all of layout, so there is no token to look at."),
    "a culprit elsewhere": (
        lambda m: m["event"]["culprits"][0].update(micro_batch=2),
        "event.culprits[0] is at no response token of the bundle.",
    ),
    "a dtype of no forward": (lambda m: m.update(dtype="int8"), "found 'int8'."),
    "no temperature": (lambda m: m.update(temperature=0), "temperature must be a positive number, found 0.0."),
    "a loss scale below 0": (lambda m: m.update(loss_scale=-1), "loss_scale must be a positive number, found -1.0."),
    "too deep": (lambda m: m.update(actor=_nested(80)), "it is nested more than 64 levels deep"),
    "no tokens": (lambda m: m["event"]["trigger"].update(num_tokens=-3), "must be at least 1, found -3."),
    "the event's strategy is not known": (
        lambda m: m["event"]["search"].update(strategy="guess"), "there are auto, share, bisect.",
    ),
    "a fingerprint of another kind": (
        lambda m: m.update(fingerprint={"sha256": "0"}), "fingerprint.total is missing; docs/bundle.md says what",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*TENSORS, *META])
def test_tensors_that_make_no_batch_and_a_description_that_contradicts_itself(bundle, models, replay, name):
    change, sentence = (TENSORS | META)[name]
    edit = edit_tensors if name in TENSORS else edit_meta
    edit(bundle, change)
    _is_refused(replay(bundle, models / "model"), sentence)


MODELS = {
    "another vocabulary": ("tiny", "it knows tokens 0 to 31, and the bundle holds token"),
    "weights that give NaN": ("nan", "With the given weights the log-probs of 37 response tokens"),
    "no model at all": ("", "is neither a Hugging Face model folder (config.json) nor a check"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_the_events(bundle, models, replay, name):
    edit_meta(bundle, lambda meta: meta.pop("fingerprint", None))
    _is_refused(replay(bundle, models / MODELS[name][0]), MODELS[name][1])


def test_another_architecture_is_told_by_the_fingerprint(bundle, models, replay, prints):
    edit_meta(bundle, lambda meta: meta.update(fingerprint=prints["plain"]))
    sentence = "mlp.gate_proj.weight has 2048 weights in the event's model and 3072 in the given one."
    _is_refused(replay(bundle, models / "wide"), sentence)
    sentence = "only the given model has the parameter model.layers.2."
    _is_refused(replay(bundle, models / "deep"), sentence)


def test_weights_that_are_not_of_the_config(bundle, models, replay, tmp_path):
    mixed = shutil.copytree(models / "model", tmp_path / "mixed")
    shutil.copy(models / "wide" / "config.json", mixed)
    _is_refused(replay(bundle, mixed), "cannot be loaded:")
    shutil.copy(models / "deep" / "config.json", mixed)
    _is_refused(replay(bundle, mixed), "do not agree on model.layers.2")


def test_a_model_s_own_code_is_not_run(bundle, models, replay, tmp_path):
    own = shutil.copytree(models / "model", tmp_path / "own")
    config = json.loads((own / "config.json").read_text())
    named = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (own / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": named}))
    (own / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    _is_refused(replay(bundle, own), "contains custom code which must be executed")
    assert not (tmp_path / "ran").exists()


def test_a_run_is_no_event_but_the_events_in_it_are_named(bundle, models, replay, tmp_path):
    event = shutil.copytree(bundle, tmp_path / "run" / "gradloc" / "events" / "step000005-epoch0-mini0")
    _is_refused(replay(tmp_path / "run", models / "model"), f"but holds some: name one, such as {event}.")
    _is_refused(replay("", models / "model"), "one of the words is empty: a variable of the shell may have no value.")


def test_what_was_not_foreseen_is_no_other_culprits(bundle, models, replay):
    broken = {"replay.__main__.localize": {"side_effect": IndexError("list index out of range")}}
    _is_refused(replay(bundle, models / "model", patches=broken), "cannot be replayed on")


def test_an_answer_that_cannot_be_written_is_no_other_culprits(bundle, models, replay, tmp_path):
    (tmp_path / "kept").write_text("mine")
    (tmp_path / "link.json").symlink_to(tmp_path / "kept")
    done = replay(bundle, models / "model", "-o", str(tmp_path / "link.json"))
    assert done["code"] == 2 and "is a link" in done["err"] and done["err"].count("\n") == 1
    assert (tmp_path / "kept").read_text() == "mine"


def test_folders_and_files_that_are_no_bundle(bundle, models, replay, tmp_path):
    _is_refused(replay(tmp_path / "nowhere", models / "model"), "is no folder")
    whole = (bundle / "batch.safetensors").read_bytes()
    (bundle / "batch.safetensors").write_bytes(whole[: len(whole) // 2])
    _is_refused(replay(bundle, models / "model"), "is cut off or is no safetensors file:")
    (bundle / "batch.safetensors").rename(bundle.parent / "moved")
    (bundle / "batch.safetensors").symlink_to(bundle.parent / "moved")
    _is_refused(replay(bundle, models / "model"), "is a link out of the folder, and is not followed.")
    (bundle / "batch.safetensors").unlink()
    _is_refused(replay(bundle, models / "model"), "it has no batch.safetensors.")
    (bundle / "batch.safetensors").write_bytes(whole)
    (bundle / "meta.json").write_text('{"schema_version": 1')
    _is_refused(replay(bundle, models / "model"), "is not readable as JSON:")


def test_a_model_larger_than_memory_is_refused_before_and_while_it_runs(bundle, models, replay):
    before = {"replay.model.memory_of": {"return_value": Memory(2**18)}}
    _is_refused(
        replay(bundle, models / "model", patches=before), "alone need 0.000461 GiB on cpu, and 0.000244 GiB are"
    )
    for error in (torch.OutOfMemoryError("out"), MemoryError(), RuntimeError("can't allocate memory")):
        meanwhile = {"replay.__main__.localize": {"side_effect": error}}
        _is_refused(replay(bundle, models / "model", patches=meanwhile), "The memory ran out: use a larger machine.")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--strategy", "guess"), "invalid choice: 'guess' (choose from"),
        (("--budget", "0"), "gradloc: --budget 0: must be at least 1."),
        (("-o", "/nowhere/out.json"), "there is no such folder."),
        (("-o", "/tmp"), "-o /tmp is a folder: name the file to write."),
        (("-o", "-"), "-o names a file: leave it out, and --json prints the same to standard output."),
    ],
    ids=["strategy", "budget", "output", "folder", "standard"],
)
def test_options_that_make_no_sense(bundle, models, replay, options, sentence):
    done = replay(bundle, models / "model", *options)
    assert (done["code"], done["out"]) == (2, "")
    assert sentence in done["err"] and done["err"].startswith("gradloc: ") and done["err"].count("\n") == 1


def _is_refused(done, sentence):
    assert (done["code"], done["out"]) == (2, ""), done
    assert sentence in done["err"]
    assert done["err"].startswith("gradloc: ") and done["err"].count("\n") == 1, "one sentence"

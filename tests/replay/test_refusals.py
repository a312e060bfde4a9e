# SPDX-License-Identifier: Apache-2.0
"""What cannot be replayed is refused in one sentence, with exit code 2 and no traceback."""

import shutil

import pytest
import torch

from tests.replay.conftest import edit_meta, edit_tensors


def _drop(name):
    return lambda tensors: tensors.pop(name)


def _set(name, value):
    return lambda tensors: tensors.update({name: value(tensors[name])})


TENSORS = {
    "a missing tensor": (_drop("advantages"), "batch.safetensors has no tensor advantages."),
    "a shape mismatch": (
        _set("old_log_probs", lambda t: t[:, :-1]),
        "old_log_probs must have the shape (4, 12), found (4, 11).",
    ),
    "another number of rows": (
        _set("input_ids", lambda t: t[:-1]),
        "input_ids must be (rows, prompt + response) and responses (rows, response), found (3, 17) and (4, 12).",
    ),
    "NaN log-probs": (
        _set("old_log_probs", lambda t: t * float("nan")),
        "old_log_probs is NaN at 37 response tokens (first: row 0, position 0), but the event's norm was finite.",
    ),
    "an empty response mask": (
        _set("response_mask", torch.zeros_like),
        "response_mask is empty, so there is no token to look at.",
    ),
    "token ids as fractions": (
        _set("input_ids", lambda t: t.float()),
        "input_ids must hold integers, found torch.float32.",
    ),
    "responses from elsewhere": (
        _set("responses", lambda t: t.flip(0)),
        "responses are not the last columns of input_ids.",
    ),
    "tokens that the model does not know": (
        lambda t: (t["input_ids"].add_(50), t["responses"].add_(50)),
        "is not the event's: it knows tokens 0 to 95, and the bundle holds token",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_make_a_batch(bundle, models, replay, name):
    change, sentence = TENSORS[name]
    edit_tensors(bundle, change)
    _is_refused(replay(bundle, models / "model"), sentence)


META = {
    "an unknown schema version": (
        lambda m: m.update(schema_version=7),
        "has schema_version 7; this version of gradloc reads 1.",
    ),
    "layout rows outside the tensors": (
        lambda m: m["layout"][1].update(rows=[2, 9]),
        "layout[1] takes rows 2 to 9, but the tensors have 4 rows.",
    ),
    "layout rows twice": (lambda m: m["layout"][1].update(rows=[1, 3]), "layout[1] shares rows with an earlier entry."),
    "a rank that there was not": (
        lambda m: m["layout"][1].update(rank=2),
        "layout[1] is micro-batch 1 of rank 2, but the event had ranks 0 to 1.",
    ),
    "no layout": (lambda m: m["layout"].clear(), "layout is empty"),
    "a culprit elsewhere": (
        lambda m: m["event"]["culprits"][0].update(micro_batch=2),
        "event.culprits[0] is at no response token of the bundle.",
    ),
    "no dp_size": (lambda m: m["event"]["step"].pop("dp_size"), "event.step.dp_size must be at least 1, found None."),
    "a setting that verl does not know": (
        lambda m: m["actor"].update(ppo_micro_batch=2),
        "actor is no config of this verl's actor:",
    ),
    "code to run": (
        lambda m: m["actor"].update(optim={"_target_": "os.system", "command": "false"}),
        "actor names 'os.system' as a _target_, which verl's own config does not.",
    ),
    "the event's strategy is not known": (
        lambda m: m["event"]["search"].update(strategy="guess"),
        "The strategy 'guess' is not known; there are auto, share, sketch, bisect.",
    ),
    "a fingerprint of another kind": (
        lambda m: m.update(fingerprint={"sha256": "0"}),
        "fingerprint.total is missing; docs/bundle.md says what a bundle holds.",
    ),
}


@pytest.mark.parametrize("name", META)
def test_a_description_that_contradicts_itself(bundle, models, replay, name):
    change, sentence = META[name]
    edit_meta(bundle, change)
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


def test_folders_and_files_that_are_no_bundle(bundle, models, replay, tmp_path):
    _is_refused(replay(tmp_path / "nowhere", models / "model"), "it has no meta.json.")
    whole = (bundle / "batch.safetensors").read_bytes()
    (bundle / "batch.safetensors").write_bytes(whole[: len(whole) // 2])
    _is_refused(replay(bundle, models / "model"), "is cut off or is no safetensors file:")
    (bundle / "batch.safetensors").unlink()
    _is_refused(replay(bundle, models / "model"), "it has no batch.safetensors.")
    (bundle / "batch.safetensors").write_bytes(whole)
    (bundle / "meta.json").write_text('{"schema_version": 1')
    _is_refused(replay(bundle, models / "model"), "is not readable as JSON:")


def test_a_batch_larger_than_memory_is_refused_before_and_while_it_runs(bundle, models, replay):
    before = {"adapters.verl_common.loading._free_bytes": {"return_value": 2**19}}
    sentence = "2 x 17 tokens and this model need at least 0.6 MiB per process, and 0.5 MiB are"
    _is_refused(replay(bundle, models / "model", patches=before), sentence)
    for error in (torch.OutOfMemoryError("out"), MemoryError(), RuntimeError("can't allocate memory")):
        meanwhile = {"replay.__main__.localize": {"side_effect": error}}
        sentence = "The memory ran out: use more processes (torchrun) or a larger machine."
        _is_refused(replay(bundle, models / "model", patches=meanwhile), sentence)


def test_where_memory_is_short_the_forward_is_recomputed_instead(bundle, models, replay):
    need = {"adapters.verl_common.loading._free_bytes": {"return_value": 630_000}}
    assert replay(bundle, models / "model", patches=need)["code"] == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--strategy", "guess"), "invalid choice: 'guess' (choose from"),
        (("--budget", "0"), "argument --budget: must be at least 1"),
        (("--json", "/nowhere/out.json"), "there is no such folder."),
    ],
    ids=["strategy", "budget", "json"],
)
def test_options_that_make_no_sense(bundle, models, replay, options, sentence):
    done = replay(bundle, models / "model", *options)
    assert (done["code"], done["out"]) == (2, "")
    assert sentence in done["err"]


def _is_refused(done, sentence):
    assert (done["code"], done["out"]) == (2, ""), done
    assert sentence in done["err"]
    assert done["err"].startswith("replay: ") and done["err"].count("\n") == 1, "one sentence"

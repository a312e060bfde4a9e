# SPDX-License-Identifier: Apache-2.0
"""The demo's tokenizer, model and data, built from nothing."""

import dataclasses

import pytest

pytest.importorskip("transformers")

from lab.experiments.cpu import arithmetic, build, material  # noqa: E402
from lab.experiments.cpu.build import Recipe  # noqa: E402

QUICK = Recipe(warmup_steps=1, warmup_batch=4, num_train=6, num_val=3)


def quietly(cache, recipe=QUICK):
    return material.build(build.LANGUAGE, recipe, cache, report=lambda _: None)


def test_every_sentence_survives_the_tokenizer():
    tokenizer = build.make_tokenizer()
    for addition in arithmetic.draw(50, "tokenizer"):
        for text in (addition.question, addition.sentence):
            ids = tokenizer.encode(text)
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == text


def test_digits_are_tokens_of_their_own():
    tokenizer = build.make_tokenizer()
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("12+7=19, so the answer")]
    assert pieces == ["1", "2", "+", "7", "=", "1", "9", ",", " so", " the", " answer"]


def test_only_the_answer_is_taught():
    tokenizer = build.make_tokenizer()
    additions = [arithmetic.Addition(1, 2), arithmetic.Addition(10, 20)]
    ids, labels = material.encode(tokenizer, additions)
    for row, addition in zip(labels, ("1+2=3", "10+20=30"), strict=True):
        taught = tokenizer.decode(row[row >= 0])
        assert taught.startswith(addition) and taught.endswith(".<end>")
    assert ids.shape == labels.shape


def test_training_and_validation_share_no_question(material):
    import pyarrow.parquet

    def questions(split):
        rows = pyarrow.parquet.read_table(material / f"{split}.parquet").to_pylist()
        return {row["prompt"][0]["content"] for row in rows}

    assert len(questions("train")) == 12 and len(questions("val")) == 4
    assert not questions("train") & questions("val")


def test_the_saved_model_loads_with_its_tokenizer(material):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(material / "model")
    model = AutoModelForCausalLM.from_pretrained(material / "model")
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.padding_side == "left"


def test_the_same_recipe_gives_the_same_weights(tmp_path):
    first, second = (quietly(tmp_path / name) / "model" / "model.safetensors" for name in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_a_second_build_keeps_the_first_and_another_recipe_gets_another_folder(tmp_path):
    folder = quietly(tmp_path)
    (folder / "mark").touch()
    assert quietly(tmp_path) == folder and (folder / "mark").exists()
    assert quietly(tmp_path, dataclasses.replace(QUICK, seed=1)) != folder


def test_an_interrupted_build_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(material, "warm_up", interrupt)
    with pytest.raises(KeyboardInterrupt):
        quietly(tmp_path)
    assert list(tmp_path.iterdir()) == []

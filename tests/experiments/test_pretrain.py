# SPDX-License-Identifier: Apache-2.0
"""The experiment that goes on pretraining: which documents are damaged, a run of it, and what its tables count."""

import json
import random
from collections import Counter

import pytest
import torch

from lab.experiments import summaries
from lab.experiments.loop import pretrain
from lab.experiments.loop.pretrain import PretrainSettings
from lab.output import table

pytestmark = pytest.mark.full


def test_one_document_in_forty_is_damaged_and_each_kind_as_often():
    settings = PretrainSettings(clean=10, rows=4, every=40, steps=510)
    found = pretrain.damaged(settings)
    places = [(pretrain.step_of(name) - 1) * 4 + int(name.partition("-")[2]) for name in found]
    assert [place // 40 for place in places] == list(range(1, 51))
    assert Counter(found.values()) == dict.fromkeys(pretrain.KINDS, 10)


def test_damage_changes_a_document_and_keeps_enough_of_it():
    (first, *_), source = pretrain.documents(), random.Random(1)
    made = {kind: damage(first, source) for kind, damage in pretrain.KINDS.items()}
    assert first not in made.values() and len(set(made.values())) == len(made)
    assert all(len(text) >= pretrain.CHARACTERS / 2 for text in made.values())


@pytest.mark.slow
def test_a_run_writes_its_record_tables_and_figure(tmp_path, monkeypatch):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="!").save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(letters))).save_pretrained(tmp_path / "model")
    monkeypatch.setenv("GRADLOC_DEMO_MATERIAL", str(tmp_path))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    monkeypatch.setenv("GRADLOC_RUN_DIR", str(run_dir))
    pretrain.main(["steps=60", "clean=20", "tokens=24", "rows=2", "every=8", "documents=8", "peak=1.05", "rate=0.003"])
    found = json.loads((run_dir / "pretrain.json").read_text())
    norms = [data["actor/grad_norm"] for data in summaries.read_steps(run_dir, "actor/grad_norm").values()]
    assert found["norms"] == norms and len(norms) == 60
    assert len(found["damaged"]) == 10 and found["peaks"]
    for peak in found["peaks"]:
        assert peak["step"] > 16 and norms[peak["step"] - 1] > peak["threshold"]
        assert {pretrain.step_of(name) for name in peak["named"]} <= {peak["step"]}
    assert table(pretrain.by_kind(found)) in (run_dir / "summary.md").read_text()
    assert (run_dir / "pretrain.png").read_bytes().startswith(b"\x89PNG")


def test_the_tables_count_what_is_named_in_the_damaged_documents_peaks():
    result = {
        "settings": {"clean": 1},
        "norms": [1.0, 1.0, 5.0, 5.0, 1.0],
        "damaged": {"3-0": "logs", "4-1": "logs", "5-0": "base64"},
        "peaks": [
            {"step": 3, "threshold": 2.0, "named": {"3-0": 4, "3-1": 1}, "cause": "odd_document"},
            {"step": 4, "threshold": 2.0, "named": {}, "cause": "unknown"},
        ],
    }
    for peak in result["peaks"]:
        peak |= {"norm_after": 1.0, "verdict": "explained"}
    head, *lines = pretrain.by_kind(result)
    found = {line[0]: dict(zip(head, line, strict=True)) for line in lines}
    logs, base64 = found["logs"], found["base64"]
    assert (logs["documents"], logs["in a peak"], logs["named"], logs["clean ones named"]) == ("2", "2", "1", "1")
    assert (logs["precision"], logs["recall"], base64["precision"], base64["recall"]) == ("50%", "50%", "-", "-")
    assert found["all"]["documents"] == "3" and found["mojibake"]["documents"] == "0"
    _, first, second = pretrain.peaks(result)
    assert first[2:4] == ["3-0 (logs)", "3-0: 4, 3-1: 1"] and second[2:4] == ["4-1 (logs)", "nothing"]

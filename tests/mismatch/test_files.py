# SPDX-License-Identifier: Apache-2.0
"""The columns from files as trainers write them, and the command."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gradloc.mismatch import MismatchError, columns, judge
from gradloc.mismatch.files import read
from gradloc.report.cli import main

DEMO = Path(__file__).parents[2] / "examples" / "demo"
RANDOM = np.random.default_rng(0)
B = np.round(-RANDOM.exponential(1.0, (16, 40)), 4)
A = np.round(np.minimum(B + 0.05 * RANDOM.standard_normal(B.shape) * -np.expm1(B), 0), 4)
IDS = RANDOM.integers(1000, size=B.shape)
PROMPT = 6
MASK = np.arange(40) >= PROMPT


def shifted():
    return np.roll(B, 1, axis=1)


def prime_rl(folder, b=B):
    """As trainer.enable_token_export writes, schema 1: no spaces, a record for each sequence."""
    file = folder / "token_exports" / "step_4" / "rank_0.jsonl"
    file.parent.mkdir(parents=True)
    lines = [
        {"schema_version": 1, "step": 4, "rank": 0, "micro_step": 0, "micro_sequence_idx": row,
         "env_name": 'a "token_ids": [1] env', "token_ids": IDS[row].tolist(), "loss_mask": MASK.tolist(),
         "advantages": [0.5] * 40,
         "inference_logprobs": b[row].tolist(), "trainer_logprobs": A[row].tolist(),
         "entropy": [1.0] * 40, "is_masked": None}
        for row in range(16)
    ]  # fmt: skip
    file.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return folder


def nemo_rl(folder, b=B):
    """As log_batched_dict_as_jsonl writes: a batch of one row on each line, padded."""
    pad = [0.0] * 5
    lines = [
        {"content": [["text"]], "rewards": [1.0], "input_lengths": [40], "token_ids": [IDS[row].tolist() + [0] * 5],
         "token_loss_mask": [[*MASK.astype(int).tolist(), 1, 1, 1, 1, 1]], "sample_loss_mask": [1.0],
         "generation_logprobs": [b[row].tolist() + pad], "prev_logprobs": [A[row].tolist() + pad], "idx": row}
        for row in range(16)
    ]  # fmt: skip
    file = folder / "train_data_step7.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def table(folder, b=B, gap=False):
    lines = ["uid,row,rollout_log_probs,old_log_probs,response_mask,token_id"]
    for row in range(16):
        for at in range(40):
            value = "" if gap and at == 20 else b[row, at]
            lines.append(f"p{row // 4},r{row},{value},{A[row, at]},{int(MASK[at])},{IDS[row, at]}")
    file = folder / "columns.csv"
    file.write_text("\n".join(lines) + "\n")
    return file


def numpy_file(folder, b=B):
    file = folder / "step_9.npz"
    np.savez(file, rollout_log_probs=b, old_log_probs=A, response_mask=np.broadcast_to(MASK, B.shape), responses=IDS)
    return file


def bundle(folder, b=B):
    safetensors = pytest.importorskip("safetensors.numpy")
    file = folder / "event-1" / "bundle" / "batch.safetensors"
    file.parent.mkdir(parents=True)
    mask = np.ascontiguousarray(np.broadcast_to(MASK, B.shape)).astype(np.int64)
    tensors = {"rollout_log_probs": b.astype(np.float32), "old_log_probs": A.astype(np.float32), "response_mask": mask}
    safetensors.save_file({**tensors, "responses": IDS, "input_ids": np.hstack([IDS, IDS])}, file)
    return folder / "event-1"


def parquet(folder, b=B):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = {"sampling_per_token_logps": b, "old_per_token_logps": A, "completion_mask": np.broadcast_to(MASK, B.shape)}
    file = folder / "rows.parquet"
    pq.write_table(pa.table({name: values.tolist() for name, values in rows.items()}), file)
    return file


@pytest.mark.parametrize("write", [prime_rl, nemo_rl, table, numpy_file, bundle, parquet])
def test_the_columns_are_what_was_written(tmp_path, write):
    ((_, made),) = read(write(tmp_path)).items()
    np.testing.assert_allclose(made.rollout, B[:, MASK].ravel(), atol=1e-6)
    np.testing.assert_allclose(made.trainer, A[:, MASK].ravel(), atol=1e-6)
    assert made.place[0] == PROMPT and made.row.max() == 15
    if made.ids is not None:
        np.testing.assert_array_equal(made.ids, IDS[:, MASK].ravel())
    if write in (prime_rl, nemo_rl):
        assert set(made.prompt) == {PROMPT} and made.group.max() == 15, "prompts are told by their tokens"
    if write is table:
        assert made.group.max() == 3


def test_files_of_one_step_are_joined_though_one_alone_names_its_rows(tmp_path):
    table(tmp_path)
    numpy_file(tmp_path).rename(tmp_path / "columns.npz")
    ((_, made),) = read(tmp_path).items()
    assert made.row.max() == 31 and len(made) == 2 * MASK.sum() * 16


def test_a_gap_in_a_table_is_a_log_prob_that_is_missing(tmp_path):
    ((_, made),) = read(table(tmp_path, gap=True)).items()
    assert np.isnan(made.rollout).sum() == 16


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("a.txt", "x", "is neither a log that can be read nor one of .jsonl"),
        ("a.csv", "rollout_log_probs,b\n-1,2\n", r"of the trainer's log-probs \(found: b, rollout_log_probs\)"),
        ("a.jsonl", "no json\n", r"a.jsonl cannot be read \(Expecting value"),
        ("a.jsonl", "", "a.jsonl is empty"),
        ("a.csv", "", "a.csv is empty"),
        ("a.csv", "rollout_log_probs,old_log_probs\n", "a.csv cannot be read .it has no row"),
        ("a.csv", "rollout_log_probs,old_log_probs\n-1,-1\n-1\n", "a.csv cannot be read .*cut short"),
        ("a.csv", "rollout_log_probs,old_log_probs\n-1,x\n", "a.csv cannot be read .*'x'"),
        ("a.csv", "rollout_log_probs,old_log_probs\n-1,-1,-1\n", "a.csv cannot be read .line 2 has 3 fields"),
        ("a.npz", "no numbers", "a.npz cannot be read"),
        ("a.npz", "", "a.npz is empty"),
        ("a.txt", "", "a.txt is empty"),
        ("a.npz", "PK\x03\x04" + "\0" * 200, "a.npz cannot be read"),
        ("a.safetensors", "x", "a.safetensors is no safetensors file"),
        ("0.jsonl", '{"input": "a", "output": "b", "score": 0.5, "step": 1}\n', "is verl's rollout dump: text"),
        ("a.jsonl", '{"prompt": "a", "completion": "b", "advantage": 1}\n', "is TRL's completions"),
    ],
)
def test_a_file_that_does_not_serve_is_told_of_in_a_sentence(tmp_path, refused, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(MismatchError, match=said):
        read(tmp_path / name)
    refused("mismatch", tmp_path / name)
    refused("mismatch", tmp_path / "none")


def test_an_event_that_cannot_be_judged_is_said_to_be_one_and_no_log(tmp_path, refused):
    event = tmp_path / "events" / "step000005-epoch0-mini0"
    event.mkdir(parents=True)
    (event / "meta.json").write_text("{}")
    (event / "batch.safetensors").write_text("x")
    assert "is no safetensors file" in refused("mismatch", event)
    (event / "batch.safetensors").unlink()
    said = refused("mismatch", event)
    assert "without a bundle" in said and "is a log" not in said


@pytest.mark.parametrize("write", [prime_rl, nemo_rl])
def test_a_step_of_two_runs_is_not_made_one(tmp_path, refused, shown, write):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    shown("mismatch", tmp_path / "a")
    said = refused("mismatch", tmp_path)
    assert "of several runs: name one, such as " in said and f"{tmp_path}/a" in said


TEN = "-0.5,-0.5\n" * 10


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("nan,-0.5\n" * 300, "a.csv: 300 of 300 log-probs of the rollout engine are not finite"),
        ("1.5,2.5\n" * 300, "a.csv: 100% of the log-probs of the rollout engine are above 0 (as large as 1.5)"),
        (TEN * 30 + "-0.5\n" * 30, "a.csv cannot be read (line 302 has 1 fields, the head 2)"),
        (TEN, "a.csv: The columns have 10 tokens, and a verdict needs 200: give more rows."),
    ],
)
def test_what_is_wrong_with_log_probs_is_said_though_a_log_could_be_read_from_them(tmp_path, refused, rows, said):
    (tmp_path / "a.csv").write_text("rollout_log_probs,old_log_probs\n" + rows)
    assert said in refused("mismatch", tmp_path / "a.csv")


@pytest.mark.parametrize("between", [";", "\t"])
def test_columns_may_be_apart_by_semicolons_or_tabs(tmp_path, shown, between):
    comma = table(tmp_path)
    said = shown("mismatch", comma)
    comma.write_text(comma.read_text().replace(",", between))
    assert shown("mismatch", comma) == said


def test_of_standard_input_only_a_log_is_read(tmp_path):
    words = [sys.executable, "-m", "gradloc.report", "mismatch", "-"]
    done = subprocess.run(
        words, input="rollout_log_probs,old_log_probs\n", capture_output=True, text=True, cwd=DEMO.parents[1]
    )
    assert done.returncode == 2 and done.stderr.startswith("gradloc: standard input is no log that can be read")


def test_each_event_of_a_run_is_a_step_and_a_short_one_is_noted(tmp_path, capsys):
    made = bundle(tmp_path / "made") / "bundle" / "batch.safetensors"
    for number, file in ((5, made), (7, made), (24, next(DEMO.glob("**/batch.safetensors")))):
        folder = tmp_path / "run" / "gradloc" / "events" / f"step{number:06}-epoch0-mini0"
        folder.mkdir(parents=True)
        shutil.copy(file, folder)
    assert [*read(tmp_path / "run")] == ["step000005-epoch0-mini0", "step000007-epoch0-mini0"]
    assert main(["mismatch", str(tmp_path / "run")]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("step000007-epoch0-mini0: ")
    assert said.err.startswith("step000024-epoch0-mini0: The response mask leaves 144 tokens")


def test_of_an_event_with_few_tokens_the_log_says_how_much(tmp_path, capsys, shown, refused, monkeypatch):
    event = shutil.copytree(DEMO, tmp_path / "demo") / "gradloc/events/step000024-epoch0-mini0"
    monkeypatch.chdir(event)
    assert main(["mismatch", "."]) == 0
    said = capsys.readouterr()
    assert "leaves 144 tokens, and a verdict needs 200" in said.err and "Judged from 32 rows" in said.out
    assert said.err.endswith("\nFalling back to the mismatch metrics that the run logged:\n")
    assert "add --json" in refused("mismatch", ".", "-o", "x.html")
    shown("mismatch", ".", "--json", "-o", "x.json")
    assert json.loads((event / "x.json").read_text())["state"] == "healthy"
    (tmp_path / "demo" / "metrics.jsonl").write_text('{"step": 1, "data": {"loss": 1.0}}\n')
    assert "a verdict needs 200" in refused("mismatch", event)


def test_the_command_says_the_kind_and_what_helps(tmp_path, shown, refused):
    prime_rl(tmp_path, shifted())
    said = shown("mismatch", tmp_path)
    assert "step_4: a shifted column" in said and "ms-swift #8196" in said and "What helps" in said
    assert json.loads(shown("mismatch", tmp_path, "--json"))["step_4"]["evidence"]["shift"]["lag"] == 1
    page = tmp_path / "page.html"
    shown("mismatch", tmp_path, "-o", page)
    text = page.read_text("utf-8")
    assert "<title>GradLoc: A shifted column</title>" in text and text.count("<svg") == 3
    assert 'href="https://github.com/modelscope/ms-swift/issues/8196"' in text
    refused("mismatch", tmp_path, "--step", "step_9")


def test_the_terminal_says_the_numbers_that_the_verdict_rests_on_and_json_and_page_have_all(tmp_path, shown):
    random = np.random.default_rng(0)
    rollout = -random.exponential(0.7, 600) - 1e-3
    rows = zip(rollout, rollout + random.normal(0, 0.02, 600), strict=True)
    text = "".join(f"{b},{a}\n" for b, a in rows)
    (tmp_path / "a.csv").write_text(f"rollout_log_probs,old_log_probs\n{text}")
    said = " ".join(shown("mismatch", tmp_path / "a.csv").split())
    evidence = said.partition("Evidence: ")[2].partition("(--json")[0]
    assert re.match(r"The mean ratio is [\d.]+ ± [\d.e-]+\. Logits differ by 0\.0\d+ nats", evidence)
    assert len(re.findall(r"\d+(?:\.\d+)?", evidence)) <= 6
    assert len(re.findall("tokens", said.partition("Evidence")[0])) == 1
    numbers = json.loads(shown("mismatch", tmp_path / "a.csv", "--json"))["a"]["evidence"]["noise"]
    assert len(numbers) > 12
    assert not numbers.keys() & {"highest", "uneven", "prompts_usual"}, "of 600 tokens in one row, not known"
    shown("mismatch", tmp_path / "a.csv", "-o", tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text("utf-8")
    assert evidence.strip() in page and page.count('<th scope="row">') >= len(numbers)
    assert "tokens that the slope is of" in page


def test_a_column_that_is_a_copy_of_the_other_is_no_noise(tmp_path, capsys):
    (tmp_path / "same.jsonl").write_text(
        "".join(f"{json.dumps({'rollout_logprobs': r, 'trainer_logprobs': r})}\n" for r in B.tolist())
    )
    main(["mismatch", str(tmp_path / "same.jsonl")])
    assert judge(columns(B, B, np.ones_like(B))).is_healthy
    assert "Cannot tell: the columns are the same at every token" in " ".join(capsys.readouterr().out.split())


def test_of_several_steps_each_is_told(tmp_path, shown):
    nemo_rl(tmp_path)
    (tmp_path / "train_data_step7.jsonl").rename(tmp_path / "train_data_step12.jsonl")
    nemo_rl(tmp_path, shifted())
    said = shown("mismatch", tmp_path)
    assert said.startswith("train_data_step12: the noise of two kernels") and "train_data_step7 shift" in said


def test_a_log_of_means_says_how_much_and_not_why(tmp_path, shown, refused):
    name = "train/train_rollout_logprob_abs_diff"
    lines = [
        f"step {s}: {{'train/grad_norm': 0.5, '{name}': {0.2 + s / 100}, 'train/loss': 0.1}}" for s in range(1, 21)
    ]
    (tmp_path / "train.log").write_text("\n".join(lines) + "\n")
    said = shown("mismatch", tmp_path / "train.log")
    assert "train_rollout_logprob_abs_diff" in said and "0.4, step 20" in said and "20 rows" in said
    assert json.loads(shown("mismatch", tmp_path / "train.log", "--json"))["state"] == "warning"
    (tmp_path / "train.log").write_text("\n".join(f"step {s} loss: 2.0 grad_norm: 0.5" for s in range(9)) + "\n")
    said = refused("mismatch", tmp_path / "train.log")
    assert "actor_rollout_ref.rollout.calculate_log_probs=true in verl, or use_vllm=True" in said and "in TRL" in said
    (tmp_path / "train.log").write_text("".join(f"step:{s} - actor/grad_norm:0.5\n" for s in range(9)))
    said = refused("mismatch", tmp_path / "train.log")
    assert "calculate_log_probs=true in verl; or name" in said and "TRL" not in said, "the log is verl's"


@pytest.mark.slow
def test_a_million_tokens_are_judged_in_ten_seconds(tmp_path, shown):
    row = json.dumps({"inference_logprobs": B.ravel().tolist(), "trainer_logprobs": A.ravel().tolist()})
    (tmp_path / "all.jsonl").write_text(f"{row}\n" * (1_000_000 // B.size))
    began = time.process_time()
    shown("mismatch", tmp_path / "all.jsonl")
    assert time.process_time() - began < 10


def written(folder, rows, **columns):
    """Six whole rows or more, a line each."""
    known = {"rollout_logprobs": B, "trainer_logprobs": A}
    lines = [{name: of[row].tolist() for name, of in known.items()} for row in range(16)]
    lines += [{name: [] for name in known}] * rows
    for line in lines:
        line.update(columns)
    file = folder / "a.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_an_empty_response_is_no_obstacle(tmp_path):
    assert len(read(written(tmp_path, rows=1))["a"]) == B.size


@pytest.mark.parametrize("columns", [{"prompt_length": None}, {"input_length": None}, {"uid": []}])
def test_columns_that_say_nothing_are_refused_with_a_sentence(tmp_path, columns):
    with pytest.raises(MismatchError, match="cannot be read"):
        read(written(tmp_path, rows=0, **columns))


def test_a_field_of_a_table_may_be_long(tmp_path):
    rows = [
        f"{row},{b},{a},{'x' * 200_000 if not row else ''}" for row, (b, a) in enumerate(zip(B[0], A[0], strict=True))
    ]
    (tmp_path / "a.csv").write_text("\n".join(["at,rollout_logprobs,trainer_logprobs,text", *rows * 16]) + "\n")
    assert len(read(tmp_path / "a.csv")["a"]) == 16 * 40


def test_a_parquet_of_more_values_than_bytes_is_refused(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    same = pa.array([-0.5] * 500_000)
    pq.write_table(pa.table({"rollout_log_probs": same, "old_log_probs": same}), tmp_path / "a.parquet")
    with pytest.raises(MismatchError, match="500,000 rows"):
        read(tmp_path / "a.parquet")

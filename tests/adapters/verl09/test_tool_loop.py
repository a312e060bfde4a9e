# SPDX-License-Identifier: Apache-2.0
"""The tool loop of `tool-loop`: what of a response is in the loss; and in the real trainer, what is named."""

import asyncio
import sys
from types import SimpleNamespace

import pytest

from tests.experiments.real import run_to_the_end
from tests.world.events import read_events

END = 3


class Letters:
    """A tokenizer with one token for each character, and one for the end of a turn."""

    def convert_tokens_to_ids(self, token):
        return END

    def encode(self, text, **_):
        return [ord(letter) for letter in text]

    def decode(self, tokens):
        return "".join(map(chr, tokens))


def respond(kind, first, second, length=200):
    """The loop's output where the engine answers so, in turn; and the prompts that it was given."""
    from lab.experiments.llm import tool_loop

    loop = object.__new__(getattr(tool_loop, kind))
    loop.tokenizer, loop.end = Letters(), END
    loop.rollout_config = SimpleNamespace(response_length=length)
    asked, answers = [], [first, second]

    async def generate(request_id, prompt_ids, sampling_params):
        asked.append(list(prompt_ids))
        tokens = answers[len(asked) - 1]
        return SimpleNamespace(token_ids=tokens, log_probs=[-1.0] * len(tokens), extra_fields={})

    async def prompt(messages):
        return [1, 2]

    loop.server_manager, loop.ct_build_initial_tokens = SimpleNamespace(generate=generate), prompt
    return asyncio.run(loop.run({}, raw_prompt=[{"role": "user", "content": "?"}])), asked


@pytest.mark.parametrize(("kind", "in_loss"), [("Calculator", 1), ("MaskedCalculator", 0)])
def test_only_the_appended_end_of_the_first_turn_tells_the_two_loops_apart(kind, in_loss):
    letters = Letters()
    out, asked = respond(kind, letters.encode("17+4= 30!") + [END], letters.encode("21") + [END])
    answer = "\n<|im_start|>user\n21<|im_end|>\n<|im_start|>assistant\n"
    written = letters.encode("17+4=") + [END] + letters.encode(answer)
    assert out.prompt_ids == [1, 2] and out.response_ids == written + letters.encode("21") + [END]
    assert asked == [[1, 2], [1, 2, *written]]
    assert out.response_mask == [1] * 5 + [in_loss] + [0] * len(answer) + [1] * 3
    assert out.response_logprobs == [-1.0] * 5 + [0.0] * (1 + len(answer)) + [-1.0] * 3


def test_a_turn_without_a_sum_is_closed_once_and_the_response_is_cut_to_its_length():
    out, _ = respond("Calculator", Letters().encode("no") + [END], [7] * 9, length=30)
    assert out.response_ids[:3] == [*Letters().encode("no"), END] and END not in out.response_ids[3:]
    assert len(out.response_ids) == len(out.response_mask) == len(out.response_logprobs) == 30


@pytest.mark.e2e
@pytest.mark.slow
def test_the_appended_token_is_named_as_never_sampled_and_left_out_nothing_spikes(tmp_path):
    arguments = ["tool-loop", "--arms", "appended,left-out", "demo.steps=1"]
    run_to_the_end(*arguments, run_dir=tmp_path / "loop", seconds=1800, VERL09_PYTHON=sys.executable)
    (event,) = read_events(tmp_path / "loop" / "appended-seed1" / "gradloc")
    assert event["cause"]["label"] == "not_sampled" and event["certificate"]["verdict"] == "explained"
    assert "".join(event["culprits"][0]["tokens"]) == "<|im_end|>"
    assert not (tmp_path / "loop" / "left-out-seed1" / "gradloc" / "events.jsonl").exists()

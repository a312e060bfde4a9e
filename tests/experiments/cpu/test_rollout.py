# SPDX-License-Identifier: Apache-2.0
"""Rollouts: padding, repeatability, and log-probs that are the model's own."""

import asyncio

import pytest

torch = pytest.importorskip("torch")

PARAMS = {"temperature": 1.0, "top_p": 1.0, "do_sample": True, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def rollout(verl):
    from lab.experiments.cpu import rollout

    return rollout


@pytest.fixture(scope="module")
def server(rollout, material):
    """An `HFRollout` without a worker around it."""
    from transformers import AutoModelForCausalLM

    made = rollout.HFRollout.__new__(rollout.HFRollout)
    made.model = AutoModelForCausalLM.from_pretrained(material / "model").eval()
    return made


def generate(server, prompts, seed, **changes):
    params = {**PARAMS, "pad_token_id": 0, **changes}
    return server.generate(prompts, params, seed)


def test_what_follows_the_first_end_token_is_dropped_and_calls_have_seeds_of_their_own():
    from lab.experiments import generation

    assert generation.cut_at(4, [1, 4, 2, 4], [0.1, 0.2, 0.3, 0.4]) == ([1, 4], [0.1, 0.2])
    assert generation.cut_at(4, [1, 2], [0.1, 0.2]) == ([1, 2], [0.1, 0.2])
    assert len({generation.call_seed(s, t, r) for s in range(5) for t in range(5) for r in range(5)}) == 125


def test_prompts_are_padded_left_and_responses_right(rollout):
    batch = rollout.to_batch([[5], [6, 7]], [([8, 4], [-1.0, -2.0]), ([4], [-3.0])], 0, 3, 4).batch
    assert batch["input_ids"].tolist() == [[0, 0, 5, 8, 4, 0, 0], [0, 6, 7, 4, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 0, 0, 0]]
    assert batch["response_mask"].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]
    assert batch["rollout_log_probs"].tolist() == [[-1.0, -2.0, 0.0, 0.0], [-3.0, 0.0, 0.0, 0.0]]
    assert batch["position_ids"][0, 2:5].tolist() == [0, 1, 2]


def test_a_seed_answers_the_same_greed_needs_none_and_the_global_generator_is_left_alone(server):
    before = torch.get_rng_state()
    first, second = (generate(server, [[7, 8], [9]], 1) for _ in range(2))
    assert first == second
    assert first != generate(server, [[7, 8], [9]], 2)
    assert torch.equal(before, torch.get_rng_state())
    greedy = {"do_sample": False, "temperature": 0}
    assert generate(server, [[7, 8]], 1, **greedy) == generate(server, [[7, 8]], 2, **greedy)


def test_log_probs_are_what_the_model_gives_the_tokens(server):
    prompt = [7, 8, 9]
    (tokens, log_probs), _ = generate(server, [prompt, [5]], 3)
    with torch.no_grad():
        logits = server.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)[range(len(tokens)), tokens]
    torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-5, rtol=1e-5)


def test_weights_that_do_not_fit_are_refused(server):
    with pytest.raises(RuntimeError):
        asyncio.run(server.update_weights([("no.such.weight", torch.zeros(1))]))

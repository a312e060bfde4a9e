# SPDX-License-Identifier: Apache-2.0
"""The demo's task: its texts, its tokenizer, who is trained on what."""

import pytest

pytest.importorskip("transformers")

from lab.experiments.cpu import material  # noqa: E402
from lab.experiments.kk import language  # noqa: E402
from lab.rewards import kk  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer():
    return material.make_tokenizer(language.language())


def test_every_text_survives_the_tokenizer_and_fits_the_demos_lengths(tokenizer):
    for exercise in language.pool():
        question, sentence = (tokenizer.encode(exercise.question), tokenizer.encode(exercise.sentence))
        assert tokenizer.unk_token_id not in [*question, *sentence]
        assert tokenizer.decode(sentence, skip_special_tokens=True) == exercise.sentence
        # Two tokens for the turns, one for the end.
        assert len(question) + 2 <= 40 and len(sentence) + 1 <= 36


def test_the_sentence_that_is_taught_scores_full():
    for exercise in language.pool():
        row = language.to_row(0, exercise, "train")
        truth = row["reward_model"]["ground_truth"]
        assert kk.compute_score(exercise.sentence, truth)["score"] == 3.0


def test_training_does_not_use_the_puzzles_of_the_validation():
    recipe = language.RECIPE
    train, val = language.split(recipe.num_train, recipe.num_val, recipe.seed)
    assert (len(train), len(val)) == (recipe.num_train, recipe.num_val)
    assert not set(val) & (set(train) | set(language.lessons(2000, "all of them")))


def test_no_answer_is_right_much_more_often_than_another():
    answers = [exercise.puzzle.solution for exercise in language.pool()]
    assert max(map(answers.count, answers)) < 0.3 * len(answers)


def test_the_same_warm_up_batch_comes_again():
    assert language.lessons(5, "a") == language.lessons(5, "a") != language.lessons(5, "b")

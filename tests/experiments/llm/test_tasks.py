# SPDX-License-Identifier: Apache-2.0
"""The questions for the model, whose answers are worked out again."""

import re

from lab.experiments.llm import tasks


def worked_out(text):
    """The answer by the question's words alone."""
    numbers = [int(digits) for digits in re.findall(r"\d+", text)]
    if "weeks" in text:
        return 7 * numbers[0]
    return numbers[0] * numbers[1] if "boxes" in text else sum(numbers)


def test_every_answer_and_every_example_is_right():
    for question in tasks.draw(120, "any"):
        assert int(question.answer) == worked_out(question.text)
        asked, answered = question.example
        assert answered.endswith(f" = {worked_out(asked)}") and asked != question.text
        assert asked.split()[:2] == question.text.split()[:2], "the example is of the question's kind"


def test_a_seed_draws_the_same_questions_and_half_are_sums():
    drawn = tasks.draw(60, "one")
    assert drawn == tasks.draw(60, "one") != tasks.draw(60, "other")
    assert sum(" + " in question.text for question in drawn) == 30
    assert drawn[0].text == "What is 28 + 12?"


def test_a_row_is_a_chat_that_ends_with_the_question():
    (question,) = tasks.draw(1, "one")
    row = tasks.to_row(3, question, "val")
    assert [turn["role"] for turn in row["prompt"]] == ["system", "user", "assistant", "user"]
    assert row["prompt"][-1]["content"] == question.text
    assert row["reward_model"]["ground_truth"] == question.answer
    assert row["extra_info"] == {"index": 3, "split": "val"}

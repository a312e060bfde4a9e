# SPDX-License-Identifier: Apache-2.0
"""The rule-based reward of Knights and Knaves (Logic-RL, arXiv 2502.14768; used by arXiv 2505.12929).

A response is ``<think>...</think><answer>...</answer>``, each tag exactly once and in this order, with one
``NAME is a knight`` or ``NAME is a knave`` for every person in the answer. Published values, format and answer added:

=================================================  ======
the right role for everybody                          3.0
a role for everybody, some of them wrong             -0.5
tags as they must be, roles not                      -1.0
a tag missing, twice or out of order                 -3.0
=================================================  ======
"""

import re

RIGHT, WRONG, UNREADABLE, MALFORMED = 3.0, -0.5, -1.0, -3.0

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
ROLE = re.compile(r"knight|knave", re.IGNORECASE)
# A line of the solution, such as "(1) Zoey is a knight": the first word is the name.
SOLUTION_LINE = re.compile(r"\b([A-Za-z]+)\b.*?\b(knight|knave)\b", re.IGNORECASE)


def score(data_source: str, solution_str: str, ground_truth: dict, extra_info: dict | None = None, **_) -> dict:
    """Return as verl calls it: ``custom_reward_function.path=pkg://lab.rewards.kk``, ``name=score``."""
    return compute_score(solution_str, ground_truth)


def compute_score(solution_str: str, ground_truth: dict) -> dict:
    """Score one response.

    Args:
        solution_str: the response, without the prompt.
        ground_truth: has ``solution_text_format``: the solution, one line ``(1) Zoey is a knight`` for each person.

    Returns:
        ``score``, one of the four values above, and what it is made of: ``acc`` (everybody right), ``wrong_answer``
        (roles wrong or unreadable) and ``format_error`` (tags), exactly one of them 1.0 and the others 0.0.

    Raises:
        ValueError: if the ground truth has no name: every response would be right.
    """
    solution = parse_solution(ground_truth["solution_text_format"])
    if not solution:
        raise ValueError(
            f"a Knights-and-Knaves row has the solution {ground_truth['solution_text_format']!r}, which says nothing "
            "about anybody: check the file with `python -m lab.experiments.kk.generate --check FILE`."
        )
    # As published: what comes before a header of another turn is no part of the response.
    text = solution_str.split("Assistant:", 1)[-1]
    if not has_format(text):
        score = MALFORMED
    else:
        answer = text[text.index("<answer>") + len("<answer>") : text.index("</answer>")]
        roles = parse_answer(answer, list(solution))
        score = UNREADABLE if roles is None else RIGHT if roles == solution else WRONG
    return {
        "score": score,
        "acc": float(score == RIGHT),
        "wrong_answer": float(score in (WRONG, UNREADABLE)),
        "format_error": float(score == MALFORMED),
    }


def has_format(text: str) -> bool:
    """Return whether each tag is there exactly once, in the right order."""
    positions = [text.find(tag) for tag in TAGS]
    return all(text.count(tag) == 1 for tag in TAGS) and positions == sorted(positions)


def parse_solution(text: str) -> dict[str, str]:
    """Return each person's role, ``knight`` or ``knave``, by name; skip lines without one."""
    found = map(SOLUTION_LINE.search, text.splitlines())
    return {match[1]: match[2].lower() for match in found if match}


def parse_answer(text: str, names: list[str]) -> dict[str, str] | None:
    """Return the roles that an answer gives these people, by name.

    Returns:
        None if a person is missing, or there are more or fewer roles than people: an answer that hedges is none.
    """
    if len(ROLE.findall(text)) != len(names):
        return None
    roles = {}
    for name in names:
        match = re.search(rf"\b{re.escape(name)}\b\s+is\s+a\s+\b(knight|knave)\b", text, re.IGNORECASE)
        if match is None:
            return None
        roles[name] = match[1].lower()
    return roles

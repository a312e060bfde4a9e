# SPDX-License-Identifier: Apache-2.0
"""Format a puzzle as a prompt, and as a row of verl's parquet format.

The system prompt is quoted from Logic-RL (arXiv 2502.14768, its instruct template), which
arXiv 2505.12929 trains with; the puzzle's frame is that of the Knights-and-Knaves data set
(arXiv 2410.23123). Results are comparable only with the same words.
"""

from lab.experiments.errors import ExperimentError
from lab.experiments.kk.puzzle import Puzzle, english, parse

DATA_SOURCE = "kk_logic"
"""Prefix of the published data source; the number of people follows: `kk_logic3`."""
SYSTEM = (
    "You are a helpful assistant. The assistant first thinks about the reasoning process in the "
    "mind and then provides the user with the answer. The reasoning process and answer are "
    "enclosed within <think> </think> and<answer> </answer> tags, respectively, i.e., <think> "
    "reasoning process here </think><answer> answer here </answer>.  Now the user asks you to "
    "solve a logical reasoning problem. After thinking, when you finally reach a conclusion, "
    "clearly state the identity of each character within <answer> </answer> tags. i.e., <answer> "
    "(1) Zoey is a knight\n(2) ... </answer>.\n"
)
VERBS = ("said", "remarked", "noted", "stated", "commented", "claimed")


def listing(words: list[str]) -> str:
    """Join words to an enumeration.

    >>> listing(["Ava", "Jack", "Zoey"])
    'Ava, Jack, and Zoey'
    """
    if len(words) == 2:
        return " and ".join(words)
    return f"{', '.join(words[:-1])}, and {words[-1]}"


def question(puzzle: Puzzle, verbs=VERBS) -> str:
    """Return the user's question."""
    names = list(puzzle.names)
    says = []
    for i, (name, statement) in enumerate(zip(names, puzzle.said, strict=True)):
        clause = english(statement, names)
        says.append(f'{name} {verbs[i % len(verbs)]}, "{clause[0].upper()}{clause[1:]}".')
    return (
        "A very special island is inhabited only by knights and knaves. Knights always tell the "
        f"truth, and knaves always lie. You meet {len(names)} inhabitants: {listing(names)}. "
        f"{' '.join(says)} So who is a knight and who is a knave?"
    )


def answer(puzzle: Puzzle) -> str:
    """Return the solution, one numbered line per person: `(1) Zoey is a knight`."""
    roles = ("knave", "knight")
    pairs = zip(puzzle.names, puzzle.solution, strict=True)
    return "\n".join(f"({i}) {name} is a {roles[is_knight]}" for i, (name, is_knight) in enumerate(pairs, 1))


def response(thoughts: str, conclusion: str) -> str:
    """Return a whole response in the published format."""
    return f"<think>{thoughts}</think><answer>{conclusion}</answer>"


def to_row(index: int, puzzle: Puzzle, split: str, messages: list[dict] | None = None) -> dict:
    """Return a row of verl's parquet format.

    Args:
        index: the row's number within its file.
        puzzle: has exactly one solution.
        split: train or test.
        messages: the prompt, if not the published one.
    """
    published = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question(puzzle)}]
    return {
        "data_source": f"{DATA_SOURCE}{len(puzzle.names)}",
        "prompt": messages or published,
        "ability": "logic",
        "reward_model": {
            "style": "rule",
            "ground_truth": {"solution_text_format": answer(puzzle), "statements": repr(puzzle.said)},
        },
        "extra_info": {"index": index, "split": split, "names": list(puzzle.names)},
    }


def problem(row: dict) -> str | None:
    """Return a clause on what is wrong with a row as a puzzle with one known solution, or None.

    It needs `reward_model.ground_truth` with `statements` and `solution_text_format`, as in the published files.
    """
    truth = (row.get("reward_model") or {}).get("ground_truth")
    if not isinstance(truth, dict) or not {"statements", "solution_text_format"} <= set(truth):
        return "it has no reward_model.ground_truth with statements and solution_text_format"
    lines = [line.split() for line in str(truth["solution_text_format"]).splitlines()]
    names = tuple(line[1] if len(line) > 1 else "" for line in lines)
    try:
        puzzle = Puzzle(names, parse(truth["statements"]))
        if len(puzzle.said) != len(names):
            return f"it has {len(names)} people and {len(puzzle.said)} statements"
        if answer(puzzle).split() != str(truth["solution_text_format"]).split():
            return "its solution is not the one that its statements have"
    except ExperimentError as error:
        return str(error).rstrip(".")
    return None

# SPDX-License-Identifier: Apache-2.0
"""What is said of an event and of a log, as facts: numbers, names, lines to copy, and claims.

    python -m tests.report.golden [NAME ...]

writes them to tests/data/golden/, all or those of these cases; read the difference before you commit it. Of what the
search itself found only that is kept which no machine's rounding moves.
"""

import html
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from pathlib import Path

from gradloc.explain.story import cause_of, verdict_sentences
from gradloc.explain.text import spoken
from gradloc.notify.lines import announcement
from gradloc.report.cli import main
from gradloc.report.pages.document import Block, EventDocument, Facts, Fold, Lines, Table
from gradloc.report.pages.document import document as make_document
from gradloc.report.runs.run import RunFolder, read_run
from gradloc.report.runs.spikes import KINDS, LOST_AND_BACK
from tests.report.builder import make_metrics, make_sequence, write_run
from tests.report.events import CASES, GOLDEN, event
from tests.report.logs.made import EXPLOSIONS, FILES

LOGS = {**FILES, **EXPLOSIONS}
FACT = re.compile(
    r'"(?:[^"\\]|\\.)*"'  # a token
    r"|(?<![\w.])-?\d(?:[\w.,:/+-]*\w)?(?:%|×)?(?: \+- \d+(?:\.\d+)?%?)?|NaN|∞"  # a number
    r"|\b\w+(?:[./]\w+)+(?:=\S*\w)?|\w+=\S*\w"  # a name, a setting
    r"|(?i:\b(?:one|two|three|four|tokens?|responses?|documents?|spans?|culprits?|critic|weights|part|may|nothing|most|"
    r"least|not|no|still|skipped|stopped|rehearsal|hardware|ratios|rewards|engine)\b)"  # a claim
)
UNMOVED = {"who", "cause", "verdict", "action", "named", "do", "share", "token", "hurt"}


def facts(text: str) -> str:
    """The facts of some sentences, in their order and lower case."""
    return " ".join(FACT.findall(text)).lower()


def found(pattern: str, text: str) -> list[str]:
    """Every match's group, without markup, on one line."""
    plain = (re.sub(r"<[^>]*>", " ", part) for part in re.findall(pattern, text, re.S))
    return [" ".join(html.unescape(part).split()) for part in plain]


SHARES = r"shares ((?:do not )?add up.*?\.(?: Tokens at which .*?\.)?)(?:\s|$)"
"""What all shares add up to, and what differing tokens have of them."""


def first(pattern: str, text: str) -> str:
    return next(iter(found(pattern, text)), "")


class Html(HTMLParser):
    """What a page holds: elements, their attributes, the text of tokens; an AssertionError where one is left open."""

    VOID = {"meta", "input", "br", "img", "link", "hr", "wbr"}

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.tokens: list[str] = []
        self._open: list[str] = []
        self._is_token = False
        self.text = ""
        """All that is read, without scripts and drawings."""
        self.feed(text)
        assert self._open == [], f"elements left open: {self._open}"

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._is_token = "data-p" in self.elements[-1][1]
        self.tokens += [""] if self._is_token else []
        self._open += [tag] if tag not in self.VOID else []

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag
        self.text += "" if tag in ("code", "b", "span") else " "
        self._is_token = False

    def handle_data(self, data):
        if not {"script", "style", "svg"} & {*self._open}:
            self.text += data
        if self._is_token:
            self.tokens[-1] += data


def payload(text: str) -> dict:
    """What the page's script reads."""
    return json.loads(re.search(r'id="payload">(.*?)</script>', text, re.S)[1])


def told(document: dict, folder: Path) -> tuple[RunFolder, EventDocument]:
    """One event in its run, and its document."""
    step = document["step"]["global_step"]
    sequences = {document["event_id"]: [make_sequence(60)]}
    run = read_run(write_run(folder, [document], sequences, make_metrics(step + 10, (step,))))
    return run, make_document(run.events[0], run)


def parts(made: EventDocument) -> dict[str, str]:
    """The facts of a document, part by part; those that there are."""
    hurt, todo, proof = (made.section(name) for name in ("hurt", "todo", "proof"))
    after, given, *later = [*hurt.blocks, ""]
    sentences = [block for block in proof.blocks if isinstance(block, str)]
    action = next(at for at, sentence in enumerate(sentences) if sentence.startswith("Action: "))
    facts_of = [pair for block in _flat(made.section("why").blocks) if isinstance(block, Facts) for pair in block.pairs]
    tables = [block for block in made.section("tokens").blocks if isinstance(block, Table)]
    grounds = {name: text for block in todo.blocks if isinstance(block, Facts) for name, text, _ in block.pairs}
    where = [block for block in made.section("where").blocks if isinstance(block, str)]
    lines = [line for block in todo.blocks if isinstance(block, Lines) for line in block.lines.values()]
    folded = [text for block in todo.blocks if isinstance(block, Fold) for text in block.blocks]
    found = {
        "who": facts(made.headline),
        "lede": facts(made.lede),
        "figures": facts(" ".join(" ".join(figure) for figure in made.figures)),
        "token": " ".join(made.quote[1].split()) if made.quote else "",
        "named": made.named.partition(": ")[2] or made.named,
        "given": facts(given),
        "later": facts(" ".join(later)),
        "hurt": hurt.title.removeprefix("Did it hurt? ").lower(),
        "after": facts(after),
        "do": " | ".join(lines),
        "why": facts(grounds.get("Why", "")),
        "tried": facts(" ".join(folded)),
        "context": facts(" ".join(" ".join(pair) for block in made.section("context").blocks for pair in block.pairs)),
        "todo": facts(next((block for block in todo.blocks if isinstance(block, str)), "")),
        "verdict": made.verdict,
        "share": ", ".join(row[2] for table in tables for row in table.rows[:4]),
        "action": re.match(r"Action: (\w+)", sentences[action])[1],
        "shares": facts(first(SHARES, next((block for block in where if "add up" in block), ""))),
        "odd": next((" ".join(pair) for pair in facts_of if pair[2]), ""),
        "layers": facts(next((block for block in where if block.startswith("Gradient norms of layers")), "")),
        "proof": facts(" ".join(sentences[:action])),
        "said": facts(verdict_sentences(made.event)),
        "cause": spoken(cause_of(made.event)),
        "announced": announcement(made.event).removeprefix(f"{made.headline}: "),
    }
    return {name: value for name, value in found.items() if value}


def _flat(blocks: list[Block]) -> Iterator[Block]:
    for block in blocks:
        yield block
        if isinstance(block, Fold):
            yield from _flat(block.blocks)


def golden(name: str, made: EventDocument) -> dict[str, str]:
    """What is kept of an event's facts."""
    kept = UNMOVED if name.startswith("searched: ") else None
    return {part: value for part, value in parts(made).items() if kept is None or part in kept}


def told_of_log(name: str, folder: Path) -> dict[str, str]:
    """What terminal, page and health say of a log; an AssertionError where they differ."""
    log, target = folder / (name if "." in name else f"{name}.log"), folder / "page.html"
    log.write_text(LOGS[name] + "\n", encoding="utf-8")
    said, health = run(str(log)), run("health", str(log))
    run(str(log), "-o", str(target))
    head, headline, *rest = said.split("\n\n")[0].splitlines()
    labels = [line[6:-1] for line in rest if line.startswith("Kind: ")]
    commands = [line.strip() for line in rest if line.startswith("    ")]
    body = target.read_text(encoding="utf-8").replace("<wbr>", "")
    todo = "".join(re.findall(r'<section class="card todo.*?</section>', body, re.S))
    notes = body.partition('<aside class="notes"')[2].partition("</aside>")[0]
    chart = payload(body)["charts"]["run"]
    assert Html(body) and headline == first(r'<h1 class="headline">(.*?)</h1>', body)
    assert labels == [label for label in (*KINDS.values(), LOST_AND_BACK) if f", {label}</title>" in body]
    assert [label.lower() for label in labels] == [of.lower() for of in found(r'<p class="eyebrow">(.*?)</p>', body)]
    assert commands == found(r'data-copy="([^"]*)"', todo) and all(
        f'id="{place}"' in body for *_, place, _ in chart["marks"]
    )
    assert not chart["marks"] or ("Healthy" not in health and "No spike" not in said)
    return {
        "format": first(r"\((.*?)\): ", head),
        "head": facts(head.rpartition("): ")[2]),
        "kind": "".join(labels),
        "headline": facts(headline),
        "about": facts(" ".join(line for line in rest if not line.startswith(("Kind: ", "    ")))),
        "do": "".join(commands),
        "marks": "; ".join(f"{step} {norm}: {facts(note)}" for step, norm, _, note in chart["marks"]),
        "notes": facts(" ".join(found(r"<li>(.*?)</li>", notes))),
        "health": " ".join(sorted({*re.findall(r"(?<= )[\w.]+=\S+", health)})),
    }


def run(*words: str) -> str:
    """What a command prints."""
    os.environ["COLUMNS"] = "500"
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with redirect_stdout(printed), redirect_stderr(io.TextIOWrapper(io.BytesIO())):
        assert main(list(words)) in (0, 2)  # 2: too short to judge
    printed.seek(0)
    return printed.read()


def known(file: str) -> dict[str, dict[str, str]]:
    """The golden facts, whole: in the file, each case has what is unlike the first one's."""
    kept = {name: of.get("says", of) for name, of in json.loads((GOLDEN / file).read_text(encoding="utf-8")).items()}
    usual = next(iter(kept.values()))
    made = {name: ({} if name.startswith("searched") else usual) | unlike for name, unlike in kept.items()}
    return {name: {part: value for part, value in of.items() if value} for name, of in made.items()}


def write(file: str, said: dict[str, dict[str, str]], cases: dict[str, dict] | None = None) -> None:
    """A line for each case: of a log its facts, of an event (``cases``) also what it is."""
    usual, lines = next(iter(said.values())), []
    for at, (name, of) in enumerate(said.items()):
        base = usual if at and not name.startswith("searched") else {}
        parts = [part for part in sorted(of | base) if (of.get(part) or None) != (base.get(part) or None)]
        unlike = {part: of.get(part) or None for part in parts}
        entry = cases[name] | {"says": unlike} if cases else unlike
        lines.append(": ".join(json.dumps(part, ensure_ascii=False) for part in (name, entry)))
    (GOLDEN / file).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    chosen = sys.argv[1:] or [*LOGS, *CASES]
    if unknown := set(chosen) - {*LOGS, *CASES}:
        sys.exit(f"no case is called {', '.join(sorted(unknown))}: name those of tests/data/golden, or none for all")
    logs, events = known("logs.json"), known("events.json")
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        logs |= {name: told_of_log(name, place) for name in LOGS if name in chosen}
        events |= {name: golden(name, told(event(name), place / name)[1]) for name in CASES if name in chosen}
    write("logs.json", {name: logs[name] for name in LOGS})
    write("events.json", {name: events[name] for name in CASES}, CASES)

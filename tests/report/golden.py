# SPDX-License-Identifier: Apache-2.0
"""What page, Markdown, terminal and table say of an event, as facts: numbers, names, lines to copy, and claims.

    python -m tests.report.golden [NAME ...]

writes them to tests/data/golden/, all or those of these cases; read the difference before you commit it. Of what the
search itself found only that is kept which no machine's rounding moves.
"""

import csv
import html
import io
import json
import os
import re
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from pathlib import Path

from gradloc.report.cli import main
from gradloc.report.commands.watch import news
from gradloc.report.pages import exports, page, terminal
from gradloc.report.runs.run import read_run
from gradloc.report.runs.spikes import KINDS
from gradloc.tell.lines import announcement
from gradloc.words.text import spoken
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


SHARES = r"shares ((?:do not )?add up.*?\.(?: Tokens at which .*?\.)?)[\s<]"
"""What all shares add up to, and what differing tokens have of them."""


def first(pattern: str, text: str) -> str:
    return next(iter(found(pattern, text)), "")


class Document(HTMLParser):
    """What a page holds: elements, their attributes, the text of tokens; an AssertionError where one is left open."""

    VOID = {"meta", "input", "br", "img", "link", "hr", "wbr"}

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.tokens: list[str] = []
        self._open: list[str] = []
        self._is_token = False
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
        self._is_token = False

    def handle_data(self, data):
        if self._is_token:
            self.tokens[-1] += data


def payload(text: str) -> dict:
    """What the page's script reads."""
    return json.loads(re.search(r'id="payload">(.*?)</script>', text, re.S)[1])


class Told:
    """One event in its run, and all that is said of it; surface by surface the facts of each part."""

    def __init__(self, document: dict, folder: Path):
        os.environ["COLUMNS"] = "500"
        step = document["step"]["global_step"]
        sequences = {document["event_id"]: [make_sequence(60)]}
        self.run = read_run(write_run(folder, [document], sequences, make_metrics(step + 10, (step,))))
        (self.event,) = self.run.events
        text = page.render(self.run)
        self.document, self.payload = Document(text), payload(text)
        body = text.partition("<main>")[2].partition("</main>")[0].replace("<wbr>", "")
        self.body = re.sub(r"<svg.*?</svg>", " ", body, flags=re.S)
        self.html = html.unescape(self.body)
        self.text = first("^(.*)$", self.body)
        self.markdown = exports.to_markdown(self.run, self.run.events).replace("\\", "")
        with redirect_stdout(io.StringIO()) as printed:
            terminal.summary(self.run, self.run.events)
        self.terminal = printed.getvalue()
        self.console = announcement(self.event)
        (self.news,) = news(self.run, set())
        self.table = list(csv.DictReader(io.StringIO(exports.to_csv(self.run, self.run.events))))
        self.surfaces = {"page": self._page(), "Markdown": self._markdown(), "terminal": self._terminal()}
        self.surfaces |= {"CSV": self._csv(), "JSON": self._json()}

    @property
    def parts(self) -> dict[str, str]:
        """What the surfaces say together; where two say different things of one part, an AssertionError."""
        made: dict[str, str] = {}
        for name, said in self.surfaces.items():
            for part, value in said.items():
                assert made.setdefault(part, value) == value, f"{name} says another {part}"
        return {part: value for part, value in made.items() if value}

    def _page(self) -> dict[str, str]:
        hero, _, article = self.body.partition("<article")
        todo = "".join(re.findall(r'<section class="card todo.*?</section>', hero, re.S))
        given, *later = [*found(r'<p class="given">(.*?)</p>', hero), ""]
        return {
            "headline": first(r'<h1 class="headline">(.*?)</h1>', hero),
            "who": facts(first(r'<h1 class="headline">(.*?)</h1>', hero)),
            "lede": facts(first(r'<p class="lede">(.*?)</p>', hero)),
            "figures": facts(first(r'<dl class="figures">(.*?)</dl>', hero)),
            "token": first(r"<mark[^>]*>(.*?)</mark>", hero),
            "named": ", ".join(found(r"<li><code>(.*?)</code></li>", hero)),
            "given": facts(given),
            "later": facts(" ".join(later)),
            "hurt": first(r"Did it hurt\? <b[^>]*>(.*?)</b>", hero).lower(),
            "after": facts(first(r'<section class="card hurt">.*?<p>(.*?)</p>', hero)),
            "do": " | ".join(found(r'data-copy="([^"]*)"', todo)),
            "why": facts(first(r"<dt>Why</dt><dd>(.*?)</dd>", hero)),
            "tried": facts(first(r"would not have helped</summary>(.*?)</details>", hero)),
            "context": facts(first(r'<div class="context">\s*<dl>(.*?)</dl>', hero)),
            "todo": facts(first(r"What to do now</h2>\s*<p>(.*?)</p>", hero)),
            "verdict": first(r'<span class="badge[^>]*>(.*?)</span>', article),
            "share": ", ".join(found(r"<dt>share of the spike</dt><dd>(.*?)</dd>", article)[:4]),
            "action": first(r"<p>Action: (\w+)", article),
            "shares": facts(first(SHARES, article)),
            "odd": first(r'<div class="odd">(.*?)</div>', article),
            "layers": facts(first(r"Gradient norm by layer</figcaption>(.*?)</figure>", article)),
            "proof": facts(first(r"<h3>Proof and replay</h3>.*?<p>(.*?)<p>Action", article)),
            "said": facts(first(r'<p class="sentences"[^>]*>(.*?)</p>', article)),
        }

    def _markdown(self) -> dict[str, str]:
        blocks = found(r"```sh\n(.*?)\n```", self.markdown.partition("**What to do now:**")[2].partition("Replay:")[0])
        paragraphs = self.markdown.split("\n\n")
        at = next(at for at, text in enumerate(paragraphs) if "### " in text)
        rows = [row.split(" | ") for row in self.markdown.splitlines() if re.match(r"\| (id|–)", row)]
        headline = first(r"### (.*?)\n", self.markdown)
        return {
            "headline": headline,
            "who": facts(headline),
            "lede": "" if paragraphs[at + 1].startswith("- ") else facts(paragraphs[at + 1]),
            "token": " ".join("".join(re.findall(r"⟦(.*?)⟧", self.markdown, re.S)).split()),
            "hurt": first(r"- Did it hurt\? ([\w ]+)\.", self.markdown).lower(),
            "after": facts(first(r"- Did it hurt\? [\w ]+\.(.*?)\n", self.markdown)),
            "do": " | ".join(re.sub(r"  # .*", "", line) for line in blocks),
            "share": ", ".join(row[2] for row in rows[:4]),
            "action": first(r"- Action: (\w+)", self.markdown),
            "shares": facts(first(SHARES, self.markdown)),
            "tried": facts(first(r"Tried, and no help: (.*?)\n", self.markdown)),
        }

    def _terminal(self) -> dict[str, str]:
        lines = self.terminal.splitlines()
        table = next(at for at, line in enumerate(lines) if line.startswith("event "))
        said = " ".join(lines[1:table])
        head, row = lines[table], lines[table + 1]
        cause, certificate = head.index("cause"), head.index("certificate")
        steps = self.terminal.partition("Next:")[2].partition("the page of it")[0].splitlines()
        headline = self.news.rpartition(": ")[0]
        assert said.startswith(headline) and self.console.startswith(f"{headline}: ")
        return {
            "headline": headline,
            "said": facts(said),
            "cause": row[cause:certificate].strip(" –"),
            "verdict": row[certificate:].strip(),
            "do": " | ".join(line.strip() for line in steps if line.startswith("    ")),
            "shares": facts(first(SHARES, self.terminal)),
            "tried": facts(first(r"Tried, and no help: (.*?)\n", self.terminal)),
        }

    def _csv(self) -> dict[str, str]:
        row, *more = self.table
        made = {"verdict": spoken(row["certificate"]), "action": row["action"]}
        is_beside = self.event.culprits and self.event.cause and self.event.cause.reason
        return made if is_beside or more else made | {"cause": spoken(row["cause"])}

    def _json(self) -> dict[str, str]:
        (event,) = json.loads(exports.to_json(self.run, self.run.events))["events"]
        return {"verdict": spoken(event["certificate"]["verdict"]), "action": event["action"]["taken"]}


def golden(name: str, told: Told) -> dict[str, str]:
    """What is kept of an event's facts."""
    kept = UNMOVED if name.startswith("searched: ") else {*told.parts} - {"headline"}
    return {part: value for part, value in told.parts.items() if part in kept}


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
    assert Document(body) and headline == first(r'<h1 class="headline">(.*?)</h1>', body)
    assert labels == [label for label in KINDS.values() if f", {label}</title>" in body]
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


def write(file: str, told: dict[str, dict[str, str]], cases: dict[str, dict] | None = None) -> None:
    """A line for each case: of a log its facts, of an event (``cases``) also what it is."""
    usual, lines = next(iter(told.values())), []
    for at, (name, of) in enumerate(told.items()):
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
        events |= {name: golden(name, Told(event(name), place / name)) for name in CASES if name in chosen}
    write("logs.json", {name: logs[name] for name in LOGS})
    write("events.json", {name: events[name] for name in CASES}, CASES)

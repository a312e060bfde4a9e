# SPDX-License-Identifier: Apache-2.0
"""What trainers print, line by line, among everything else that a console shows.

Each grammar knows one way to print a step. All are asked of every line, the surest first; what the grammar with the
most gradient norms found is the log, and the others' rows are told, not dropped.
"""

import ast
import json
import re
from collections import defaultdict

from .names import is_norm, number, numbers, step_of
from .recording import Recording, Row, flat
from .source import Source

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\[\d{1,3}(?:;\d{1,3})*m")
_PROCESS = re.compile(r"\(\w[^()]*\bpid=(\d+)|^\s*(\d+):\s|\[rank(\d+)\]")
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
_CONSOLE = re.compile(r"\bstep:(\d{1,15}) - (.+)")
_MORE_OF_CONSOLE = re.compile(r"(?:^|\s)- ([\w./@-]+:\S+(?: - .+)?)$")
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
_PAIR = re.compile(rf"['\"]([^'\"]{{1,120}})['\"]\s*:\s*['\"]?(?:[\w.]+\()?({_NUMBER})(?![\w.])", re.IGNORECASE)
_BEFORE_DICT = re.compile(
    r"\b(global step|step|rollout|perf|iteration|iter)\s*[:=]?\s*(\d{1,15})[^{]{0,40}$", re.IGNORECASE
)
_HEADED = re.compile(
    r"\b(?:global[_ ])?(?:step|iteration|iter)\b\s*[:=#]?\s*\[?\s*(\d{1,15})(?:\s*/\s*\d+)?\]?", re.IGNORECASE
)
_LABELLED = re.compile(
    rf"([A-Za-z][\w./@() -]*?)\s*[:=]\s*({_NUMBER})(?![\w.]*\d)|([a-z_]*grad_?norm)\s+({_NUMBER})", re.I
)
_TOLD = re.compile(r"loss|reward|kl\b|entropy|return", re.IGNORECASE)
_BLOCK = re.compile(r"[=─━]{4,}\s*Step (\d{1,15})(?:/\d+)?\s*[=─━]{4,}|\bTrain step (\d{1,15})/\d+ done")
_CELL = re.compile(rf"[•│]\s*([A-Za-z][\w ()/.@-]*?)\s*[:│]\s*({_NUMBER})(?![\w.])", re.IGNORECASE)
_CONFIG_LINES = 4000
"""Lines that a printed configuration has at most."""
_WRAPPED = re.compile(r"(?:^|\) )\s*- \S+:")


class Grammar:
    """One way to print a step; ``take`` says whether a line was of it."""

    title = ""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = defaultdict(list)
        """By the process that printed them: several may print into one log."""
        self.counted = False
        """Whether the lines do not say their step, and were counted."""

    def take(self, line: str, process: str) -> bool:
        raise NotImplementedError

    def add(self, process: str, step: int, values: dict[str, float]) -> bool:
        if not values:
            return False
        self.rows[process].append((step, values))
        return True

    @property
    def num_norms(self) -> int:
        return sum(any(map(is_norm, values)) for rows in self.rows.values() for _, values in rows[:10000])


class Console(Grammar):
    """``step:7 - actor/grad_norm:0.31 - ...``, behind whatever Ray puts before it."""

    title = "verl's console log"

    def take(self, line: str, process: str) -> bool:
        found = _CONSOLE.search(line)
        if found is not None:
            return self.add(process, int(found[1]), _dashed(found[2]))
        more = _MORE_OF_CONSOLE.search(line) if self.rows.get(process) and line.lstrip().startswith("- ") else None
        if more is not None:  # a line that a terminal or a mail has wrapped
            self.rows[process][-1][1].update(_dashed(more[1]))
        return more is not None


def _dashed(text: str) -> dict[str, float]:
    made = {}
    for part in text.split(" - "):
        name, _, value = part.rpartition(":")
        try:
            made[name.strip()] = float(value)
        except ValueError:
            if "(" in part:  # np.float64(0.3), tensor(0.3, device='cuda:0')
                name, _, value = part.partition(":") if part.count(":") == 1 else _before_bracket(part)
            if name.strip() and (found := number(value)) is not None:
                made[name.strip()] = found
    made.pop("", None)
    return made


def _before_bracket(part: str) -> tuple[str, str, str]:
    name, colon, value = part[: part.index("(")].rpartition(":")
    return name, colon, value + part[part.index("(") :]


class Json(Grammar):
    """A JSON object on a line of its own: verl's ``file`` logger, or flat."""

    title = "JSON lines"

    def __init__(self) -> None:
        super().__init__()
        self.verdicts: list[str] = []

    def take(self, line: str, process: str) -> bool:
        if not line.lstrip().startswith("{"):
            return False
        try:
            entry = json.loads(line)
        except ValueError:
            return False
        if not isinstance(entry, dict):
            return False
        data = entry.get("data")
        if isinstance(data, dict) and (step := number(entry.get("step"))) is not None and abs(step) < 2**53:
            self.title = "verl's file logger"
            if isinstance(said := data.get("gradloc/verdict"), list):
                self.verdicts += map(str, said)
            self.add(process, int(step), numbers(data))
            return True
        values = numbers(entry)
        step = step_of(values)
        if step is None:
            self.counted = self.counted or any(map(is_norm, values))
            step = len(self.rows[process]) + 1 if any(map(is_norm, values)) else None
        return step is not None and self.add(process, step, values)


class Printed(Grammar):
    """``{'loss': 0.1, 'grad_norm': 0.31}``, as a Trainer, OpenRLHF (``Global step 7: {...}``) and slime print it."""

    title = "a Trainer's printed dicts"

    def __init__(self) -> None:
        super().__init__()
        self._pending: dict[str, float] = {}

    def take(self, line: str, process: str) -> bool:
        start = line.find("{")
        if start < 0 or line.find("}", start) < 0:
            return False
        values = {name: float(value) for name, value in _PAIR.findall(line, start)}
        if not values:
            return False
        said = _BEFORE_DICT.search(line[:start][-80:])
        if said is not None and said[1].lower() in ("rollout", "perf"):  # slime: they belong to the step that follows
            self._pending.update(values)
            return True
        if said is not None:
            is_slime = any(name.startswith("train/") for name in values)
            self.title = "slime's log" if is_slime else "lines of `step N: {...}`"
            if said[1].lower() == "global step":
                self.title = "OpenRLHF's log"
            values = {**self._pending, **values}
            self._pending = {}
        step = int(said[2]) if said is not None else step_of(values)
        if step is None:
            if not any(map(is_norm, values)):  # an evaluation, or the end of training: of the last step
                if rows := self.rows.get(process):
                    rows[-1][1].update({name: value for name, value in values.items() if name not in rows[-1][1]})
                return bool(rows)
            self.counted = True
            step = self._counted(process, values.get("epoch"))
        return self.add(process, step, values)

    def _counted(self, process: str, epoch: float | None) -> int:
        """The step of a line that does not say it: one more than the last, or where a resumed run's epoch is again."""
        rows = self.rows[process]
        if rows and epoch is not None and epoch < rows[-1][1].get("epoch", epoch):
            return next((step for step, values in rows if values.get("epoch", -1.0) >= epoch), 1)
        return rows[-1][0] + 1 if rows else 1


class Blocks(Grammar):
    """A headline for each step, and below it bullets (NeMo-RL) or the cells of a drawn table (AReaL)."""

    title = "NeMo-RL's log"

    def __init__(self) -> None:
        super().__init__()
        self._step: dict[str, int] = {}

    def take(self, line: str, process: str) -> bool:
        if head := _BLOCK.search(line):
            self._step[process] = int(head[1] or head[2])
            if head[2]:
                self.title = "AReaL's log"
            return True
        found = {name: float(value) for name, value in _CELL.findall(line)}
        step = self._step.get(process)
        if not found or step is None:
            return False
        rows = self.rows[process]
        if not rows or rows[-1][0] != step or not found.keys().isdisjoint(rows[-1][1]):
            rows.append((step, {}))
        rows[-1][1].update(found)
        return True


class Labelled(Grammar):
    """``Step 7 | Loss: 0.1 | Grad. Norm: 0.31`` in any of its spellings: prime-rl, Megatron, torchtitan, own loops."""

    title = "lines of `step N ... name: value`"

    def take(self, line: str, process: str) -> bool:
        head = _HEADED.search(line)
        if head is None:
            return False
        values = {}
        for name, value, bare, bare_value in _LABELLED.findall(line, head.end()):
            values[(name or bare).strip(" |,-")] = float(value or bare_value)
        if not any(is_norm(name) or _TOLD.search(name) for name in values):
            return False
        if " | Grad. Norm:" in line:
            self.title = "prime-rl's log"
        elif line.lstrip().startswith("iteration") and "consumed samples" in line:
            self.title = "Megatron's log"
        return self.add(process, int(head[1]), values)


GRAMMARS = (Console, Json, Printed, Blocks, Labelled)


def read_lines(source: Source) -> list[Recording]:
    """The steps that a text prints, by the process that printed them."""
    grammars = [grammar() for grammar in GRAMMARS]
    config = _Config()
    last, taken = "", None
    num_bad = 0
    for line in source.lines():
        if "\x1b" in line or "[0m" in line:
            line = _COLOUR.sub("", line)
        if line:
            last, taken = line, None
        if config.is_open or "{'" in line:
            config.take(line)
        if not (
            "tep" in line
            or "{" in line
            or "iter" in line
            or "•" in line
            or "│" in line
            or "- " in line
            and _WRAPPED.search(line)
        ):
            continue  # most lines of a long log end here: this is as fast as it gets
        line, process = _stripped(line)
        taken = next((grammar for grammar in grammars if grammar.take(line, process)), None)
        num_bad += taken is None and line.startswith('{"')
    best = max(grammars, key=lambda grammar: (grammar.num_norms, sum(map(len, grammar.rows.values()))))
    if not best.rows:
        return []
    notes = _notes(source, grammars, best, num_bad)
    if best is taken and not source.ends_whole and isinstance(best, Console):
        notes += _drop_cut_value(best, last)
    verdicts = next(grammar.verdicts for grammar in grammars if isinstance(grammar, Json))
    found = []
    for process, rows in best.rows.items():
        found.append(Recording(source.name, best.title, "", process, rows, config.found, notes, verdicts))
        notes = []
    return found


def _stripped(line: str) -> tuple[str, str]:
    """A line without Ray's mark of repetition, and the process that printed it."""
    if "[repeated " in line:
        line = _REPEATED.sub("", line)
    found = _PROCESS.search(line[:80])
    return line, next(filter(None, found.groups()), "") if found else ""


def _notes(source: Source, grammars: list[Grammar], best: Grammar, num_bad: int) -> list[str]:
    notes = list(source.notes)
    if best.counted:
        notes.append(
            f"The lines of {source.name} do not say their step: it was counted, one for each line with a norm."
        )
    for other in grammars:
        if other is not best and other.num_norms:
            notes.append(
                f"{source.name} also holds {other.num_norms} rows with a gradient norm of another kind "
                f"({other.title}); {best.title} has more and was read."
            )
    if isinstance(best, Json) and num_bad:
        cut = num_bad == 1 and not source.ends_whole
        notes.append(
            f"The last line of {source.name} is cut off and was left out."
            if cut
            else f"{num_bad} lines of {source.name} cannot be read and were left out."
        )
    return notes


def _drop_cut_value(grammar: Grammar, last: str) -> list[str]:
    """The last value of a file that ends within a line may lack digits: 90 of 903."""
    step, values = next(reversed(grammar.rows[_stripped(last)[1]]))
    name = next(reversed(values), None)
    if name is None or last.rstrip().endswith(")"):
        return []
    del values[name]
    return [f"The last line is cut off: {name} of step {step} may lack digits and was left out."]


class _Config:
    """The settings that verl prints when it starts: one dict over many lines, behind Ray's prefix."""

    def __init__(self) -> None:
        self.found: dict = {}
        self._parts: list[str] = []

    @property
    def is_open(self) -> bool:
        """Whether its end has not come yet."""
        return bool(self._parts)

    def take(self, line: str) -> None:
        if not self.is_open and (self.found or not re.search(r"(?:^|\)\s*)\{'\w+': \{", line)):
            return
        text = re.sub(r"^\([^()]*pid=[^()]*\)\s?", "", line)
        self._parts.append(text)
        if len(self._parts) > _CONFIG_LINES:
            self._parts = []
        elif text.rstrip().endswith("}"):
            whole = "\n".join(self._parts)
            if whole.count("{") <= whole.count("}"):
                self._parts = []
                try:
                    self.found = flat(ast.literal_eval(whole.strip()))
                except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
                    pass

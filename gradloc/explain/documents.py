# SPDX-License-Identifier: Apache-2.0
"""Causes in a supervised loop, by how a culprit's document differs from the batch's others. Pure."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..record import Cause, Culprit
from .text import capitalized, plural

_LEAST_PADDING = 4  # equal tokens at the end of a row
_FAR = 2.0  # nats by which a document's mean log-prob is below the batch's where it is odd as a whole
_SHIFTED = 2.0  # nats by which labels moved by one are likelier
_ODD = 3.0  # times the batch's
_ODDITIES = (
    ("repeats", 0.2, "{:.0%} of it repeats (others: {:.0%})"),
    ("foreign", 0.2, "{:.0%} of its characters are not ASCII (others: {:.0%})"),
    ("unspaced", 40.0, "its longest word has {:.0f} characters (others: {:.0f})"),
    ("tokens", 0.0, "it has {:.0f} tokens (others: {:.0f})"),
)
"""Oddities of a document: name, least value, and the words."""
_UNLIKELY = math.log(1e-3)
_MANY = 0.2  # of the batch's rows: copies of one document


@dataclass(frozen=True)
class Document:
    """Statistics of a culprit's row, and of the batch's typical row."""

    tokens: float = 0.0
    """Trained on."""
    tokens_of_batch: float = 0.0
    log_prob: float | None = None
    """Mean over its tokens."""
    log_prob_of_batch: float | None = None
    log_prob_shifted: float | None = None
    """Mean log-prob of labels moved by one; None where the logits were not seen."""
    repeats: float = 0.0
    """Share of its runs of three tokens that came before in it."""
    repeats_of_batch: float = 0.0
    foreign: float = 0.0
    """Share of its characters that are neither ASCII nor of the batch's usual scripts, or are control characters."""
    foreign_of_batch: float = 0.0
    unspaced: float = 0.0
    """Characters of its longest word."""
    unspaced_of_batch: float = 0.0
    copies: int = 0
    """Other rows that are the same, token by token."""
    rows: int = 1
    padding: int = 0
    """Equal tokens in a row at its end, all trained on, the culprit among them."""
    broken: int = 0
    """Values of its input that are not finite."""
    rank: int | None = None
    """How many tokens the model finds likelier there; None where the logits were not seen."""


def repeats_in(ids: Sequence[int]) -> float:
    """Return the share of runs of three tokens that came before.

    >>> repeats_in([1, 2, 3, 1, 2, 3])
    0.25
    """
    runs = Counter(zip(ids, ids[1:], ids[2:], strict=False))
    total = sum(runs.values())
    return (total - len(runs)) / total if total else 0.0


def foreign_in(text: str) -> float:
    """Return the share of characters beyond ASCII, and of control characters except white space."""
    odd = sum(ord(char) > 126 or (ord(char) < 32 and not char.isspace()) for char in text)
    return odd / len(text) if text else 0.0


def unspaced_in(text: str) -> float:
    """Return the length of the longest word in characters; base64 counts as one word."""
    return float(max((len(word) for word in text.split()), default=0))


def cause_in(culprit: Culprit, cause: Cause, document: Document) -> Cause:
    """Refine a cause by the document, and add its statistics to the numbers."""
    log_prob = culprit.at("log_prob")
    known = {name: value for name, value in asdict(document).items() if value is not None}
    numbers = {**cause.numbers, **{f"document_{name}": float(value) for name, value in known.items()}}
    if log_prob is not None and math.isfinite(log_prob):
        numbers["probability"] = math.exp(min(log_prob, 0.0))
    if cause.label.startswith("non_finite") and document.broken:
        return Cause("non_finite_input", numbers)
    if cause.label.startswith("non_finite") or cause.label == "layer_heterogeneity":
        return Cause(cause.label, numbers)
    return Cause(_label_by_document(culprit, cause, document), numbers)


def _label_by_document(culprit: Culprit, cause: Cause, document: Document) -> str:
    own, usual, shifted = document.log_prob, document.log_prob_of_batch, document.log_prob_shifted
    if document.padding >= _LEAST_PADDING:
        return "padding_trained"
    if cause.label == "loss_weight":
        return "loss_weight"
    if own is not None and shifted is not None and shifted > own + _SHIFTED:
        return "shifted_labels"
    if document.copies and document.copies + 1 > _MANY * document.rows:
        return "duplicate_document"
    is_unlikely = own is not None and usual is not None and own < usual - _FAR
    signs = [is_unlikely, bool(oddities(document))]
    if all(signs) or culprit.span != "token" and any(signs):  # one is enough where the whole row is a culprit
        return "odd_document"
    if cause.label in ("low_probability", "large_jacobian", "unknown") and (culprit.at("log_prob") or 0.0) < _UNLIKELY:
        return "unexpected_token"
    return cause.label


def oddities(document: Document) -> list[str]:
    """Describe how the document differs from the batch's others."""
    found = []
    for name, least, words in _ODDITIES:
        value, usual = getattr(document, name), getattr(document, f"{name}_of_batch")
        if value >= least and value > _ODD * usual:
            found.append(words.format(value, usual))
    return found


def document_of(numbers: dict[str, float | None]) -> Document:
    """Rebuild the document from the numbers that :func:`cause_in` added to a cause."""
    prefix = "document_"
    known = {name.removeprefix(prefix): value for name, value in numbers.items() if name.startswith(prefix)}
    return Document(**{name: value for name, value in known.items() if name in Document.__dataclass_fields__})  # type: ignore[arg-type]


def document_words(culprit: Culprit) -> str:
    """Describe the document where it explains its cause; empty where it does not."""
    label, numbers = culprit.cause.label, culprit.cause.numbers
    if "document_rows" not in numbers:
        return ""
    document = document_of(numbers)
    if label == "duplicate_document":
        copies, are = plural(int(document.copies), "other row"), "is" if document.copies == 1 else "are"
        return f"{copies} of the batch's {document.rows:.0f} {are} the same."
    if label == "non_finite_input":
        values, are = plural(int(document.broken), "value"), "is" if document.broken == 1 else "are"
        return f"{values} in it {are} NaN or infinite."
    if label == "padding_trained":
        return f"The row ends in {document.padding:.0f} equal tokens that the mask has in the loss."
    if label == "shifted_labels" and document.log_prob_shifted is not None:
        moved = f"moved by one they have {document.log_prob_shifted:.3g}"
        return f"Its tokens have a mean log-prob of {document.log_prob or 0.0:.3g}; {moved}."
    said, probability = [], numbers.get("probability")
    if label == "unexpected_token" and probability is not None:
        behind = f", behind {document.rank:,.0f} others" if document.rank is not None else ""
        said.append(f"The model gives the token a probability of {probability:.2g}{behind}.")
    if label == "odd_document" and document.log_prob is not None:
        usual = f" (others: {document.log_prob_of_batch:.3g})" if document.log_prob_of_batch is not None else ""
        said.append(f"Its mean log-prob is {document.log_prob:.3g}{usual}.")
    odd = oddities(document)
    if odd and label in ("odd_document", "unexpected_token"):
        said.append(f"{capitalized('; '.join(odd))}.")
    return " ".join(said)

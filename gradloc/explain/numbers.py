# SPDX-License-Identifier: Apache-2.0
"""Format numbers for sentences, tables and pictures. Standard library only."""

import math
from collections.abc import Callable
from decimal import ROUND_CEILING, Context


def number(value: float | int | None, digits: int = 4, unknown: str = "–") -> str:
    """Format a number with ``digits`` significant digits, but never round its whole part; ``unknown`` if it is None.

    Powers of ten appear below 1e-4 and from 1e9 on.

    >>> number(14577.619), number(0.00071), number(3.2e12), number(None), number(float("nan"))
    ('14,578', '0.00071', '3.2e12', '–', 'NaN')
    """
    if value is None:
        return unknown
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if not -4 <= size < 9:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{_short(mantissa)}e{int(exponent)}"
    return _short(f"{value:,.{max(digits - 1 - size, 0)}f}")


def percent(value: float | None, digits: int = 3) -> str:
    """Format a share as a percentage.

    >>> percent(0.98765), percent(None)
    ('98.8%', '–')
    """
    if value is None or not math.isfinite(value):
        return number(value)
    return f"{number(100.0 * value, digits)}%"


def with_error(
    value: float | None, error: float | None, digits: int = 4, show: Callable[[float | None, int], str] = number
) -> str:
    """Format a number with its standard error, where that is known and visible in the digits.

    >>> with_error(0.98, 0.05), with_error(0.98, None), with_error(0.997, 1e-5, 3, percent)
    ('0.98 +- 0.05', '0.98', '99.7%')
    """
    said = show(value, digits)
    if value is None or error is None or not math.isfinite(value) or not error > abs(value) * 10.0**-digits:
        return said
    return f"{said} +- {show(error, 2)}"


def bounded(value: float | None, bound: float | None, digits: int = 4) -> tuple[str, str]:
    """Format a norm and, as a second text in brackets, its error bound where that is known and not 0.

    Where the bound is over half of the norm, only an upper limit is given. Bounds are rounded up.

    >>> bounded(0.77, 0.0007), bounded(1.38, 2.562), bounded(0.77, None)
    (('0.77', ' (error up to 0.0007)'), ('at most 3.942', ''), ('0.77', ''))
    """
    if value is None or bound is None or not math.isfinite(value) or not 0 < bound < math.inf:
        return number(value, digits), ""
    if bound > value / 2:
        return f"at most {number(_up(value + bound, digits), digits)}", ""
    return number(value, digits), f" (error up to {number(_up(bound, 2), 2)})"


def _up(value: float, digits: int) -> float:
    """Round up to ``digits`` significant digits, but never in the whole part."""
    if not math.isfinite(value):
        return value
    return float(Context(max(digits, len(str(int(value)))), ROUND_CEILING).create_decimal(repr(float(value))))


def _short(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text

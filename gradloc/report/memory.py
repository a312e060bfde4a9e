# SPDX-License-Identifier: Apache-2.0
"""Pauses garbage collection while rows are read and judged: there are many, and they form no cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause garbage collection; what was made is not looked at by later ones."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()

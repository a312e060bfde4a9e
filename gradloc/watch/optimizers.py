# SPDX-License-Identifier: Apache-2.0
"""Hook a loop's optimizer, and keep it from a step that is skipped."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from ..checks import require


def plain_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside of accelerate's, None for None.

    Raises:
        ValueError: where it is none.
    """
    if optimizer is None:
        return None
    found = getattr(optimizer, "optimizer", optimizer)
    is_one = hasattr(found, "param_groups") and hasattr(found, "zero_grad")
    require(is_one, "gradloc.Watch's optimizer", "one torch optimizer", type(optimizer).__name__)
    return found


def share_parameter(one: Any, other: Any) -> bool:
    """Return whether a parameter is in both optimizers, as where a loop has made one in place of the other."""

    def ids(optimizer: Any) -> set[int]:
        return {id(param) for group in optimizer.param_groups for param in group["params"]}

    return not ids(one).isdisjoint(ids(other))


def call_after_zero_grad(optimizer: Any, then: Callable[[], None]) -> None:
    """Call the function after each ``zero_grad`` of this optimizer."""
    zero_grad = optimizer.zero_grad

    @wraps(zero_grad)
    def zero_grad_and_then(*args: Any, **kwargs: Any) -> None:
        zero_grad(*args, **kwargs)
        then()

    optimizer.zero_grad = zero_grad_and_then


def call_after_closure(args: tuple[Any, ...], kwargs: dict[str, Any], then: Callable[[], None]) -> Any:
    """Return a step's arguments with a closure that calls the function at its end; None without a closure."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None

    def closure_and_then() -> Any:
        loss = closure()
        then()
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure_and_then}
    return (args[0], closure_and_then, *args[2:]), kwargs


class Withheld:
    """The parameters that optimizers are kept from in a step that is skipped.

    torch's skip each parameter without a gradient. Others may take it for granted that there is one.
    """

    def __init__(self) -> None:
        self._groups: list[tuple[dict[str, Any], Any]] = []

    def take(self, optimizer: Any) -> None:
        if not type(optimizer).__module__.startswith("torch."):
            for group in optimizer.param_groups:
                self._groups.append((group, group["params"]))
                group["params"] = []

    def give_back(self, *_: Any) -> None:
        while self._groups:
            group, params = self._groups.pop()
            group["params"] = params

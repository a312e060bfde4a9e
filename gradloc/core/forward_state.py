# SPDX-License-Identifier: Apache-2.0
"""Save and restore the state that a forward changes outside of its inputs and weights.

That is the random state, buffers such as batch norm's statistics, and values that modules keep in plain attributes.
"""

import copy
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.nn.parallel import DistributedDataParallel


class RngState:
    """Random state of this process: torch's on the CPU and the accelerator, Python's, NumPy's where it is imported.

    Args:
        device: of the model.
        generators: that the model draws from itself: torch's, Python's or NumPy's.
    """

    def __init__(self, device: torch.device, generators: Sequence[Any] = ()):
        self._module = None if device.type == "cpu" else torch.get_device_module(device.type)
        self.cpu = torch.get_rng_state()
        self.accelerator = None if self._module is None else self._module.get_rng_state()
        self._python = random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self._own = [(generator, _state_of(generator)) for generator in generators]

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self._module is not None:
            self._module.set_rng_state(self.accelerator)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for generator, state in self._own:
            _state_of(generator, state)


def _state_of(generator: Any, *new: Any) -> Any:
    """Return a generator's state, or set it."""
    for get, put in (("get_state", "set_state"), ("getstate", "setstate")):  # torch and NumPy's old one, Python
        if hasattr(generator, get):
            return getattr(generator, put if new else get)(*new)
    if new:
        generator.bit_generator.state = new[0]
    return generator.bit_generator.state


def generators_in(model: torch.nn.Module) -> list[Any]:
    """Return the generators that modules keep as attributes, or their code as globals."""
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    kinds = (torch.Generator, random.Random, *((numpy.Generator, numpy.RandomState) if numpy else ()))
    files = {type(owner).__module__ for owner in model.modules()}
    homes = [vars(sys.modules[file]) for file in files if file in sys.modules and not file.startswith("torch.")]
    known = (value for home in [*map(vars, model.modules()), *homes] for value in home.values())
    return list({id(value): value for value in known if isinstance(value, kinds)}.values())


_Place = tuple[dict[str, Any], str]
"""A dict in which a module keeps a value, and the value's name there."""

_PLAIN = (int, float, bool, complex, str, type(None), torch.Tensor)
_CONTAINERS = (list, dict, set)
_WRAPPERS = ("torch.nn.parallel", "torch.distributed")
_OF_ENGINES = ("ds_", "applied_pre_backward")  # DeepSpeed's own, on each module of the model
_OF_TORCH = frozenset(vars(torch.nn.Module())) - {"training"}


def plain_attributes(model: torch.nn.Module) -> Iterator[_Place]:
    """Yield the plain attributes that modules keep state in, such as a running maximum: tensors, numbers, and lists,
    dicts and sets of these.

    None of a wrapper's, which keeps there whether ranks reduce.
    """
    for owner in model.modules():
        kind = type(owner).__module__
        for name, value in () if kind.startswith(_WRAPPERS) else vars(owner).items():
            is_own = name not in _OF_TORCH and not name.startswith(_OF_ENGINES)
            is_state = is_own and isinstance(value, _PLAIN + _CONTAINERS) and not _is_freed(value)
            if is_state and not (kind.startswith("torch.") and name.startswith("_")):
                yield vars(owner), name


def _is_freed(value: Any) -> bool:
    """Return whether this is one of FSDP1's views of weights that are not gathered now."""
    return isinstance(value, torch.Tensor) and value.numel() > 0 and not value.untyped_storage().size()


def _mark(value: Any) -> Any:
    """Return a mark that differs once the value was changed in place; batch norm's kernels do not count all writes."""
    if isinstance(value, torch.Tensor):
        return 0 if value.is_inference() else value._version
    if isinstance(value, dict):
        return [(id(key), id(each)) for key, each in value.items()]
    return [id(each) for each in value] if isinstance(value, list | set) else None


class SavedValues:
    """Present values of some attributes and buffers, to be put back into the objects that hold them now.

    Args:
        places: of the values that a copy is made of.
        kept: of tensors that nothing writes to, which need none.
    """

    def __init__(self, places: Iterable[_Place], kept: Iterable[_Place] = ()):
        self._saved = [(place, name, place[name], self._copied(place[name])) for place, name in places]
        self._saved += [(place, name, place[name], place[name]) for place, name in kept]

    @staticmethod
    def _copied(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore every value that was replaced or changed in place."""
        for place, name, value, copied in self._saved:
            if place.get(name) is not value:
                place[name] = value
            if isinstance(value, torch.Tensor):
                if value is not copied and not _is_freed(value) and not torch.equal(value, copied):
                    value.copy_(copied)
            elif isinstance(value, list):
                value[:] = copied
            elif isinstance(value, dict | set):
                value.clear()
                value.update(copied)


class MovingState:
    """Learns in a model's first forwards which attributes and buffers move, and saves these before each later forward.

    A model without such state pays nothing from the fourth forward on.
    """

    _NUM_FORWARDS = 3
    _MOST = 4096  # entries of a list, dict or set that is copied before each forward

    def __init__(self) -> None:
        self._places: dict[tuple[int, str], _Place] = {}
        self._in_place: set[tuple[int, str]] = set()
        """Tensors that are written to, and so have to be copied."""
        self._marks: dict[tuple[int, str], tuple[Any, Any]] = {}
        self._num_seen = 0

    def before_forward(self, model: torch.nn.Module) -> SavedValues:
        """Return the state that the next forward begins with."""
        if self._num_seen < self._NUM_FORWARDS:
            self._num_seen += 1
            self._learn(model)
        copied, kept = list[_Place](), list[_Place]()
        for key, (place, name) in self._places.items():
            value = place.get(name)
            has_graph = isinstance(value, torch.Tensor) and value.grad_fn is not None
            is_long = isinstance(value, _CONTAINERS) and len(value) > self._MOST
            if name in place and not has_graph and not is_long:
                is_kept = isinstance(value, torch.Tensor) and key not in self._in_place
                (kept if is_kept else copied).append((place, name))
        return SavedValues(copied, kept)

    def _learn(self, model: torch.nn.Module) -> None:
        """Compare with the previous forward, and add what differs."""
        if any(isinstance(owner, FSDP1) for owner in model.modules()):
            return  # its views of weights are attributes, and are others in each forward
        marks: dict[tuple[int, str], tuple[Any, Any]] = {}
        buffers = ((owner._buffers, name) for owner in model.modules() for name in owner._buffers)
        for place, name in [*plain_attributes(model), *buffers]:
            key, value = (id(place), name), place[name]
            marks[key] = value, _mark(value)
            value_before, mark_before = self._marks.get(key, marks[key])
            if value is not value_before or marks[key][1] != mark_before:
                self._places[key] = place, name
                if value is value_before:
                    self._in_place.add(key)
        self._marks = marks if self._num_seen < self._NUM_FORWARDS else {}


class OwnBuffers:
    """Buffers of one module, such as batch norm's statistics, and whether a forward has moved them since."""

    def __init__(self, owner: torch.nn.Module):
        self.places: list[_Place] = [(owner._buffers, name) for name in owner._buffers]
        self._marks = self._now()

    def _now(self) -> list[tuple[int, Any]]:
        return [(id(place.get(name)), _mark(place.get(name))) for place, name in self.places]

    def have_moved(self) -> bool:
        return self._now() != self._marks


class ForwardState:
    """All state that a forward moves except ``.grad``: random state, these buffers, modules' plain attributes, and
    whether DDP's next forward broadcasts buffers, on which all ranks have to agree."""

    def __init__(
        self,
        device: torch.device,
        moving: Sequence[OwnBuffers] = (),
        model: torch.nn.Module | None = None,
        wrapper: torch.nn.Module | None = None,
    ):
        self._rng = RngState(device, [] if model is None else generators_in(model))
        places = [place for each in moving for place in each.places]
        if isinstance(wrapper, DistributedDataParallel):
            places.append((vars(wrapper), "require_forward_param_sync"))
        self._values = SavedValues([*places, *(() if model is None else plain_attributes(model))])

    def restore(self) -> None:
        self._values.restore()
        self._rng.restore()

# SPDX-License-Identifier: Apache-2.0
"""An adapter puts back what it replaced of another package, whatever happened meanwhile."""

import pytest
import torch

from gradloc.private_api import replaced


class Base:
    def step(self):
        return "base"


class Engine(Base):
    rate = 1

    @staticmethod
    def scale(value):
        return value


def test_an_objects_own_attributes_come_back_and_inherited_ones_show_again():
    engine = Engine()
    engine.rate = 2
    with replaced(engine, rate=3, step=lambda: "ours"):
        assert (engine.rate, engine.step()) == (3, "ours")
    assert (engine.rate, engine.step(), vars(engine)) == (2, "base", {"rate": 2})


def test_a_classs_static_method_is_one_again():
    with replaced(Engine, scale=staticmethod(lambda value: 2 * value)):
        assert Engine.scale(1) == Engine().scale(1) == 2
    assert Engine.scale(1) == Engine().scale(1) == 1


def test_a_modules_forward_is_its_own_again_after_a_failure():
    head = torch.nn.Linear(2, 2)
    before = head(torch.ones(1, 2))
    with pytest.raises(RuntimeError), replaced(head, forward=lambda hidden: hidden):
        assert torch.equal(head(torch.ones(1, 2)), torch.ones(1, 2))
        raise RuntimeError
    assert torch.equal(head(torch.ones(1, 2)), before)

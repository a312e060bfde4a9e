# SPDX-License-Identifier: Apache-2.0
"""The forecast by sizes alone, against bytes that are counted and against what a search reckons with."""

import pytest
import torch

from gradloc.core.memory_plans import COPIES, PLANS
from gradloc.forecast import MODELS, PCIE, PINNING, Layout, Load, forecast, model_of
from tests.world import World

BASE = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "tie_word_embeddings": False,
}
DEEP = BASE | {"hidden_size": 128, "intermediate_size": 384, "vocab_size": 512}
TIED = BASE | {"tie_word_embeddings": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
EXPERTS = BASE | EXPERTS | {"model_type": "qwen3_moe"}
HALF = {"dtype": "bfloat16"}
AGAIN = {"is_checkpointed": True}
SHARDS = {"plain": 1, "ddp": 1, "hsdp": 2}
MOST = {"held": 0.1, "trained": 0.1, "searched": 0.15}

CASES = [
    (2, "fsdp2", DEEP, HALF | AGAIN),
    (2, "fsdp1", EXPERTS, {}),
    (1, "plain", BASE, {"length": 256} | AGAIN),
    (2, "ddp", DEEP, {}),
    (2, "fsdp2", BASE, {"adapters": 4}),
    (1, "plain", BASE, {}),
    (1, "plain", DEEP, AGAIN),
    (1, "plain", TIED, {}),
    (1, "plain", BASE, {"adapters": 4} | AGAIN),
    (2, "fsdp1", BASE, {}),
    (2, "fsdp2", BASE, {}),
    (2, "fsdp2", TIED, HALF),
    (2, "fsdp2", BASE, {"length": 256} | AGAIN),
    (4, "fsdp2", DEEP, {}),
    (4, "hsdp", BASE, {}),
]


@pytest.fixture(scope="module")
def world_of(bare_world):
    """A world of so many ranks."""
    made = {2: bare_world}
    yield lambda size: made.setdefault(size, World(size))
    for size, world in made.items():
        if size != 2:
            world.close()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "layout", "config", "given"), CASES)
def test_it_is_near_what_is_counted(world_of, size, layout, config, given):
    counted = world_of(size).run("tests.core.counted.count", config=config, layout=layout, **given)[0]
    assert counted["events"] == 1
    model, half = model_of("the model", config), given.get("dtype") == "bfloat16"
    rank = given.get("adapters", 0)
    told = forecast(
        model,
        Layout(
            size,
            SHARDS.get(layout, size),
            whole_bytes=4 if layout == "ddp" else 0,
            trained=model.adapted(rank) if rank else 1.0,
        ),
        Load(2 * given.get("length", 64), 2, 2 if half else 4, "is_checkpointed" in given),
    )
    wanted = {"held": told.held, "trained": told.trained, "searched": told.device(PLANS[0])}
    off = {name: size / counted[name] - 1 for name, size in wanted.items()}
    print(size, layout, {name: f"{each:+.1%}" for name, each in off.items()})
    assert all(abs(off[name]) <= most for name, most in MOST.items()), off
    reckoned = counted["need"]
    for name in ("shards", "state", "pinned_state") if not rank else ("shards", "state"):
        assert getattr(told.need, name) == pytest.approx(getattr(reckoned, name), rel=0.1), name


@pytest.mark.full
@pytest.mark.parametrize("config", [BASE, DEEP, TIED, EXPERTS], ids=["base", "deep", "tied", "experts"])
def test_a_model_has_as_many_weights_as_its_config_says(config):
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert model_of("the model", config).weights == pytest.approx(sum(p.numel() for p in made.parameters()), rel=0.005)


PUBLISHED = {
    "0.5B": 494_032_768,
    "1.5B": 1_543_714_304,
    "7B": 7_615_616_512,
    "32B": 32_763_876_352,
    "72B": 72_706_203_648,
    "235B": 235_093_634_560,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_by_name_has_as_many_weights_as_its_checkpoint(name):
    model = MODELS[name]
    small = 2 * 128 if model.experts else model.queries + 2 * model.keys  # norms of a head's width, or biases
    assert model.weights + model.layers * small == PUBLISHED[name]


@pytest.mark.parametrize(("number", "spare"), [(0, 0), (1, -1), (1, 0), (2, 0), (None, -1)])
def test_a_card_gets_the_first_way_that_fits_with_a_twentieth_to_spare(number, spare):
    told = forecast(model_of("the model", BASE), Layout(16, shards=16), Load(1024))
    exact = told.device(PLANS[{0: 0, 1: 0 if spare else 1, 2: 2}.get(number, 3)]) / 0.95
    assert told.plan_for(exact + spare * 4096) is (None if number is None else PLANS[number])


def test_a_config_without_a_size_is_refused_by_name():
    with pytest.raises(ValueError, match="config.json must name vocab_size, and does not: name a size by --model"):
        model_of("mine", {name: value for name, value in BASE.items() if name != "vocab_size"})


def test_what_moves_to_the_host_leaves_the_device_and_takes_its_time():
    told = forecast(model_of("the model", BASE), Layout(16, shards=16), Load(1024))
    assert told.device(PLANS[0]) - told.device(PLANS[1]) == told.need.state
    assert told.device(PLANS[1]) - told.device(PLANS[2]) == 2 * told.need.shards
    assert told.node(PLANS[0]) == 0 and told.node(PLANS[2]) == 8 * (told.need.pinned_state + told.need.pinned_copies)
    moved = told.need.state + COPIES * told.need.shards
    pinned = told.need.pinned_state + told.need.pinned_copies
    assert 0 == told.seconds(PLANS[0]) < told.seconds(PLANS[1]) < told.seconds(PLANS[2])
    assert told.seconds(PLANS[2]) == pytest.approx(2 * moved / PCIE + pinned / PINNING), (
        "there and back, and pinned once"
    )
    offloaded = forecast(model_of("the model", BASE), Layout(16, shards=16, is_offloaded=True), Load(1024))
    assert offloaded.held == 0 < offloaded.node(PLANS[0]) and offloaded.device(PLANS[0]) < told.device(PLANS[0])

# SPDX-License-Identifier: Apache-2.0
"""Plant two faults in each of transformers' causal language models that can be made tiny, and read what is named.

    python -m lab.benchmarks.architectures                    # all, in float32; some minutes
    python -m lab.benchmarks.architectures llama mamba --out FOLDER

Each model is trained by a plain loop under ``gradloc.Watch``, which knows nothing of it. One fault is a token whose
loss weighs 3,000 times as much, the other a learning rate that is too large for one step. The truth is the same run
without the fault. Writes architectures.json.
"""

import logging
import math
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from tqdm import tqdm

import gradloc
from lab.benchmarks.run import Parser, finish
from lab.experiments.verdict import read_events

ROWS, LENGTH, MICRO_BATCHES, VOCABULARY = 2, 10, 3, 64
STEPS, SPIKE, PLACE = 7, 6, (2, 4)
"""Optimizer steps, the one that spikes, and the planted token's row and position in it."""
WORTH = 3000.0
RATES = (1.0, 100.0, 300.0, 1e3, 1e4)
"""Factors of the learning rate; the smallest that makes a spike is taken."""
LOUD = 5.0
"""Least norm of a spike, in multiples of the largest before."""

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    family: group.get("settings", {})
    for group in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    for family in group["families"].split()
}
"""transformers' models -> what makes each tiny, in addition to :data:`SIZES`."""


class Run(NamedTuple):
    """One run of :data:`STEPS` steps."""

    norms: list[float]
    """Before clipping."""
    weights: torch.Tensor
    """All of them, flat, after the step that spikes."""
    events: list[dict[str, Any]]


def train(family: str, worth: float = 1.0, rate: float = 1.0, folder: str = "", action: str = "observe") -> Run:
    """Train a tiny model of a family.

    Args:
        family: one of :data:`FAMILIES`.
        worth: weight of the planted token's loss.
        rate: times the learning rate in the step before the spike.
        folder: of the events; empty: no watch.
        action: the watch's; its threshold is learned from the run without a fault.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if folder:
        tau = LOUD * max(train(family).norms) * math.sqrt(ROWS * LENGTH * MICRO_BATCHES)
        gradloc.Watch(model, optimizer, folder, action=action, trigger={"tau": tau})
    torch.manual_seed(7)
    norms, weights = [], torch.zeros(0)
    for number in range(1, STEPS + 1):
        optimizer.zero_grad()
        ids = torch.randint(
            1, VOCABULARY, (MICRO_BATCHES * ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(number)
        )
        weight = torch.ones(len(ids), LENGTH)
        weight[PLACE] = worth if number == SPIKE else 1.0
        for part in torch.arange(len(ids)).split(ROWS):
            logits = model(input_ids=ids[part, :-1]).logits.flatten(0, 1)
            losses = torch.nn.functional.cross_entropy(logits, ids[part, 1:].flatten(), reduction="none")
            (losses * weight[part].flatten()).sum().div(weight.numel()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.param_groups[0]["lr"] = 1e-3 * (rate if number == SPIKE - 1 else 1.0)
        optimizer.step()
        if number == SPIKE:
            weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    events = read_events(Path(folder)) if folder else []
    return Run(norms, weights, [event for event in events if event["step"]["global_step"] == SPIKE])


def measure(family: str) -> dict[str, Any]:
    """Return what was named under both faults, and whether that is right; None for a fault that made no spike."""
    plain, without, usual = train(family, WORTH), train(family, 0.0), max(train(family).norms)
    spiking = (rate for rate in RATES if not train(family, rate=rate).norms[SPIKE - 1] < LOUD * usual)
    rate = next(spiking, None)
    with tempfile.TemporaryDirectory() as folder:
        observed = train(family, WORTH, folder=f"{folder}/observe")
        masked = train(family, WORTH, folder=f"{folder}/mask", action="mask")
        jumped = None if rate is None else train(family, rate=rate, folder=f"{folder}/rate")
    return {
        "token": all(answer(run) == ["batch", [PLACE]] for run in (observed, masked)),
        "observe_is_equal": torch.equal(observed.weights, plain.weights) and observed.norms == plain.norms,
        "mask_is_off_by": float((masked.weights - without.weights).abs().max()),
        "learning_rate": jumped and answer(jumped) == ["last_update", []],
    }


def answer(run: Run) -> list[Any]:
    """Return the link at fault and the places of the tokens that are accused."""
    if len(run.events) != 1:
        return ["no event", []]
    (event,) = run.events
    return [event["fault"]["at"], [(each["row"], place) for each in event["culprits"] for place in each["positions"]]]


def sentence(record: dict[str, Any]) -> str:
    """Say how many answers of a record are right."""
    found = record["families"].values()
    rates = [each["learning_rate"] for each in found if each["learning_rate"] is not None]
    equal = sum(each["observe_is_equal"] for each in found)
    return (
        f"{len(found)} causal language models of transformers {record['versions']['transformers']} were made tiny. "
        f"A planted token is named alone in {sum(each['token'] for each in found)}. A learning rate that is too large "
        f"for one step is found in {sum(rates)} of {len(rates)} that spiked. `observe` is bit for bit the loop itself "
        f"in {equal}."
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure the families, and write their record."""
    import transformers

    options = Parser("architectures", __doc__)
    options.add_argument("families", nargs="*", default=[*FAMILIES], help="as transformers calls them; default: all")
    given = options.parse_args(arguments)
    logging.getLogger("gradloc").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    families = {family: measure(family) for family in tqdm(given.families)}
    record = {"versions": versions, "families": families}
    finish(given, record, sentence(record))


if __name__ == "__main__":
    main()

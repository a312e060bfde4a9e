# SPDX-License-Identifier: Apache-2.0
"""Measure cells: history first, then the plant, the searches, and what the oracle says of them."""

from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gradloc.core.history import NormHistory
from lab.benchmarks.localization import pretrained
from lab.benchmarks.localization.corpus import load, split, text, trained
from lab.benchmarks.localization.plan import Cell
from lab.benchmarks.localization.published import formula_cost
from lab.benchmarks.localization.scenarios import PLANTS, SCENARIOS, Planted, Planter, count_scenario
from tests.toy_model import SIZES, Batch, Oracle, healthy_batch
from tests.world import World

_HEALTHY_STEPS = {True: 17, False: 20}  # of the pretrained model, whose every pass takes seconds, and of the others
_HISTORY = dict(window=128, warmup=16, num_deviations=6.0)  # the trigger's defaults in verl's yaml
_BUDGET = 128  # the published bisect_budget_steps
_MAX_CULPRITS = 8  # search.max_culprits' default
_LEAST = {True: 6.0, False: 4.0}  # likewise, kappa of one that must spike: the pretrained model's norms scatter more
_FLOOR = 4.0  # where the whole batch is scaled, the threshold over the same batch's norm before: the trigger's floor
_NOTABLE = 3.0  # times the typical coefficient, from which the search calls a batch scaled: the least it ever takes
_RANDOM_TOKENS = {True: 8, False: 24}  # likewise, of the oracle's pool, beside everything planted or named


class Bench:
    """Keeps ranks, models and histories between cells.

    Args:
        folder: where trained models are kept.
        device: ``cpu`` or ``cuda``.
        training_steps: of the models; None for what their size asks for.
    """

    def __init__(self, folder: Path, device: str, training_steps: int | None = None):
        self.folder = folder
        self.training_steps = training_steps
        self.device = device
        self.histories: dict[tuple, dict[str, Any]] = {}
        self._models: dict[str, tuple] = {}
        self._batches: tuple[tuple, list] = ((), [])
        self._world: World | None = None

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Everything about one cell, ready for JSON."""
        model, path, held = self._model(cell.model)
        history = self._history(cell)
        # seeds from 10,000 on: no spiked step is among those that the history was made of
        healthy = healthy_batch(model, held, cell.tokens, 10_000 + cell.seed)
        least = _LEAST[cell.model == pretrained.NAME]
        planter = Planter(model, healthy, history["median_norm"], cell.seed, least, cell.loss)
        plants = SCENARIOS | PLANTS
        plant = plants[cell.scenario] if cell.count is None else count_scenario(cell.count, cell.kappa)
        planted = plant(planter)
        threshold, typical = history["threshold"], {}
        if planted.healthy is not None or cell.has_history:
            ((norm, coefficient),) = self._healthy(cell, [planted.healthy or healthy], cell.micro_batches)
            threshold = threshold if planted.healthy is None else _FLOOR * norm
            typical = {"coefficient": (coefficient, _NOTABLE)} if cell.has_history else {}
        answers = self._ranks(cell.ranks).run(
            "lab.benchmarks.localization.worker.search_cell",
            cell=cell,
            weights=str(path),
            batch=planted.batch,
            threshold=threshold,
            typical=typical,
            limits={"budget": _BUDGET, "max_culprits": _MAX_CULPRITS},
            device=self.device,
        )
        answer = answers[0]
        if any(_named(a) != _named(answer) for a in answers):
            raise RuntimeError(f"the ranks disagree on the culprits of {cell}")
        self._judge(cell, planted, answer, Oracle(model, planted.batch, cell.loss))
        return {"cell": asdict(cell), "history": history, **answer}

    def _judge(self, cell: Cell, planted: Planted, answer: dict, oracle: Oracle) -> None:
        """Add recall, None where nothing was planted, false positives and cost; hold the planted against the oracle."""
        truth = set(planted.places)
        pool = {place for places in _named(answer).values() for place in places} | truth
        generator = torch.Generator().manual_seed(cell.seed)
        rows, length = planted.batch.labels.shape
        drawn = (_RANDOM_TOKENS[cell.model == pretrained.NAME],)
        for number in torch.randint(rows * length, drawn, generator=generator).tolist():
            pool.add(divmod(number, length))
        norms = oracle.norms(sorted(pool))
        others = [norm for place, norm in norms.items() if place not in truth]
        answer["oracle"] = {
            "pool": len(norms),
            "planted": len(truth),
            "smallest_planted": min((norms[place] for place in truth), default=None),
            "largest_other_in_pool": max(others, default=0.0),
        }
        per_rank = rows * length // (cell.ranks * cell.micro_batches)
        published = formula_cost(cell.micro_batches, cell.ranks, per_rank)
        answer["published_formula_f"] = published
        baseline = answer["strategies"].get("published")
        for found in answer["strategies"].values():
            named = {tuple(place) for culprit in found["culprits"] for place in culprit["places"]}
            found["recall"] = len(named & truth) / len(truth) if truth else None
            found["false_positives"] = len(named - truth)
            found["cost_f"] = found["forwards"] + 2 * found["backwards"]
            found["cost_ratio"] = found["cost_f"] / published
            found["wall_ratio"] = None if baseline is None else found["seconds"] / baseline["seconds"]
            exact = [
                abs(culprit["norm"] / norms[tuple(culprit["places"][0])] - 1)
                for culprit in found["culprits"]
                if culprit["is_exact"] and len(culprit["places"]) == 1
            ]
            found["largest_norm_error"] = max(exact, default=None)
            for culprit in found["culprits"]:
                if len(culprit["places"]) > 1:
                    first, last = culprit["places"][0], culprit["places"][-1]
                    culprit["places"] = [first, last]  # a span: its ends say it

    def _history(self, cell: Cell) -> dict[str, Any]:
        """The threshold that the trigger has learned on healthy steps of this set-up.

        The norm of a step does not depend on how its rows are dealt out to ranks and micro-batches,
        so one history serves all layouts of a model, precision, N and aggregation.
        """
        key = _set_up(cell)
        if key not in self.histories:
            model, _, held = self._model(cell.model)
            if self._batches[0] != (cell.model, cell.tokens):
                seeds = range(_HEALTHY_STEPS[cell.model == pretrained.NAME])
                batches = [healthy_batch(model, held, cell.tokens, seed) for seed in seeds]
                self._batches = (cell.model, cell.tokens), batches
            micro_batches = 1 if cell.model == pretrained.NAME else cell.micro_batches
            norms = [norm for norm, _ in self._healthy(cell, self._batches[1], micro_batches)]
            history = NormHistory(**_HISTORY)
            for norm in norms:
                history.observe(norm, is_spike=False)
            self.histories[key] = {
                "steps": len(norms),
                "median_norm": median(norms),
                "largest_norm": max(norms),
                "threshold": history.threshold(),
            }
        return self.histories[key]

    def _healthy(self, cell: Cell, batches: list[Batch], micro_batches: int) -> list[tuple[float, float]]:
        """The norm of each batch's step, and the median over the ranks of their median coefficients."""
        by_rank = self._ranks(cell.ranks).run(
            "lab.benchmarks.localization.worker.healthy_steps",
            cell=cell,
            weights=str(self._model(cell.model)[1]),
            micro_batches=micro_batches,
            batches=batches,
            device=self.device,
        )
        return [
            (steps[0][0], sorted(coefficient for _, coefficient in steps)[len(steps) // 2])
            for steps in zip(*by_rank, strict=True)
        ]

    def remember(self, cell: Cell, history: dict[str, Any]) -> None:
        """Take a history over from an earlier run's record of a cell."""
        self.histories[_set_up(cell)] = history

    def _model(self, name: str) -> tuple:
        if name == pretrained.NAME and name not in self._models:
            path = pretrained.folder(self.folder.parent)
            self._models[name] = load(name, path), path, pretrained.text(path)
        if name not in self._models:
            path = trained(name, self.folder, self.training_steps)
            held = split(text(SIZES[name].vocabulary))[1]
            self._models[name] = load(name, path), path, held
        return self._models[name]

    def _ranks(self, size: int) -> World:
        if self._world is None or self._world.size != size:
            self.close()
            self._world = World(size, self.device, timeout_s=1800)
        return self._world


def _set_up(cell: Cell) -> tuple:
    return cell.model, cell.dtype, cell.masters, cell.tokens, cell.aggregation


def _named(answer: dict[str, Any]) -> dict[str, list]:
    return {
        name: [tuple(place) for culprit in found["culprits"] for place in culprit["places"]]
        for name, found in answer["strategies"].items()
    }

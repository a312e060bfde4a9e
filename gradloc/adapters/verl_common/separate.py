# SPDX-License-Identifier: Apache-2.0
"""The separate analysis batch: verl's own training loop, run on one batch and stopped at the advantages.

A copy of the trainer whose loader holds a single batch walks through verl's loop: rollout, filter, reward, log-probs,
values, advantages, whatever else the loop does there, now or in a later version. Where the loop would go on to learn
from the batch, the copy hands it over instead. Nothing of the loop is written a second time.
"""

import copy
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from omegaconf import OmegaConf, open_dict


class _Prepared(Exception):
    """Carries the batch out of the loop."""


def hand_over(batch: Any, *_: Any) -> NoReturn:
    """In the place of what learns from the batch."""
    raise _Prepared(batch)


def prepared_by(walk: Callable[[], Any]) -> Any:
    """The batch that verl's loop hands over."""
    try:
        walk()
    except _Prepared as prepared:
        return prepared.args[0]
    raise RuntimeError("verl's training loop ended without offering its batch to the gradient analysis")


def drawn_prompts(trainer: Any, num_groups: int, seed: int) -> Any:
    """So many prompts as the loader of verl's trainer would hand them over.

    They are drawn with a random generator of their own, so the order of the training data stays what it is.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(trainer.train_dataset), generator=generator)[:num_groups].tolist()
    return trainer.train_dataloader.collate_fn([trainer.train_dataset[index] for index in chosen])


def twin_of(trainer: Any, changes: dict[str, Any]) -> Any:
    """The trainer with a config of its own, in which this is changed; it shares the workers."""
    twin = copy.copy(trainer)
    twin.config = copy.deepcopy(trainer.config)
    with open_dict(twin.config):
        for key, value in changes.items():
            OmegaConf.update(twin.config, key, value)
    if hasattr(trainer, "kl_ctrl_in_reward"):
        twin.kl_ctrl_in_reward = copy.deepcopy(trainer.kl_ctrl_in_reward)
    return twin

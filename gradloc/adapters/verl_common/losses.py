# SPDX-License-Identifier: Apache-2.0
"""Compute verl's losses under other settings, and find out how they average, by calling verl's own functions."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ...analysis.parts import terms_of
from ...core.forward_state import RngState
from ...core.step import MASK, Groups, LossReplay, Outputs
from ...explain.advice import options_of
from ...explain.cures import OF_MASK, loss_settings
from ...loop.batch import BatchView
from ...reweighting.advantages import reweight
from ...stabilize.config import SeqClipConfig, StabilizeConfig, TokenClipConfig
from ...stabilize.ratio_clip import TokenWeigher

ALPHA = 0.3
"""The alpha of Advantage Reweighting that the advice names."""
WEIGHTS = "rollout_is_weights"
"""verl's name of the factors on token losses: its rollout correction's, and those of our clips on ratios."""
_MAX_WEIGHT = 1.5
"""The bound that the cure ``truncate`` sets on the weights of the rollout correction."""
CORRECTIONS = ("weigh_tokens", *OF_MASK)
"""Cures that are verl's own rollout correction."""
_CORRECTION = "algorithm.rollout_correction."
_DIVIDING = ("grpo", "grpo_vectorized")
"""verl's advantage estimators that may divide by a group's standard deviation."""
_BY_SCORES = (*_DIVIDING, "rloo", "rloo_vectorized")
"""Advantage estimators whose advantages stay the same when tokens leave the loss."""
_BY_SEQUENCE = "seq-mean-token-mean"


def changed(config: Any, **values: Any) -> Any:
    """Return a copy of a frozen config with other values, by dotted names such as ``policy_loss.loss_mode``."""
    config = copy.copy(config)
    for name, value in values.items():
        name, _, inner = name.partition(".")
        value = changed(config[name], **{inner: value}) if inner else value
        if isinstance(config, MutableMapping):
            config[name] = value
        else:
            object.__setattr__(config, name, value)
    return config


def setting_of(config: Any, name: str) -> Any:
    """Return a value of one of verl's configs by its dotted name.

    Raises:
        LookupError, AttributeError: the config does not have it.
    """
    for part in name.split("."):
        config = config[part]
    return config


def estimator_of(algorithm: Any) -> str:
    """Return verl's name of the advantage estimator in the trainer's ``algorithm`` block."""
    return str(getattr(algorithm.adv_estimator, "value", algorithm.adv_estimator))


def advantage_groups(
    batch: BatchView, algorithm: Any, is_reweighted: bool, refused_cures: frozenset[str] = frozenset()
) -> Groups | None:
    """Return how the advantages of a batch that is about to be trained on were computed; None where it has none.

    ``algorithm`` is that block of the trainer's config, and ``is_reweighted`` says whether the advantages were scaled
    by the tokens' probabilities.
    """
    if batch.is_critics or batch.is_distilled:
        return None
    estimator = estimator_of(algorithm)
    groups = Groups(is_reweighted=is_reweighted, refused_cures=refused_cures | _beyond_the_loss(algorithm, estimator))
    if estimator not in _DIVIDING or is_reweighted or algorithm.use_kl_in_reward:
        return groups
    facts, uids = batch.facts, batch.labels.get("uid")
    if facts.rewards is None or uids is None:
        return groups
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    estimate, index = get_adv_estimator_fn(estimator), np.array(uids)
    scores = facts.rewards.float().unsqueeze(1)  # of one position, in place of a row's tokens
    mask = torch.ones_like(scores)

    def advantages(divides: bool) -> torch.Tensor:
        rewards = scores.clone()
        found = estimate(token_level_rewards=rewards, response_mask=mask, index=index, norm_adv_by_std_in_grpo=divides)
        return found[0].squeeze(1)

    is_divided = bool(algorithm.norm_adv_by_std_in_grpo)
    present, other = advantages(is_divided), advantages(not is_divided)
    has_tokens = facts.num_tokens > 0
    if not torch.allclose(facts.signal[has_tokens], present[has_tokens], rtol=1e-4, atol=1e-6):
        return groups  # something changed the advantages after the estimator
    return replace(groups, is_divided=is_divided, other_advantages=tuple(other.tolist()))


def _beyond_the_loss(algorithm: Any, estimator: str) -> frozenset[str]:
    """Return the corrections that would change more than this run's loss, or replace a correction of its own."""
    correction = algorithm.get("rollout_correction") or {}
    if correction.get("bypass_mode"):  # the loss itself corrects
        return frozenset(CORRECTIONS)
    own_settings = ("rollout_rs", "rollout_token_veto_threshold", "rollout_is_batch_normalize")
    has_own = any(correction.get(name) for name in own_settings)
    is_safe = estimator in _BY_SCORES and not algorithm.use_kl_in_reward and not has_own
    return frozenset() if is_safe else frozenset(OF_MASK)


def _corrected(settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """Return the weights, or the mask, of verl's rollout correction with these settings; None where it cannot apply."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask as correct

    changes = {name.removeprefix(_CORRECTION): each for name, each in settings.items() if name.startswith(_CORRECTION)}
    if "rollout_log_probs" not in tensors or (WEIGHTS in tensors and "rollout_is" in changes):
        return None
    old_log_probs, mask = tensors["old_log_probs"], tensors[MASK]
    if not mask.any():  # rows that fill a batch up, which verl's function refuses
        return {WEIGHTS: torch.ones_like(old_log_probs)} if "rollout_is" in changes else {MASK: mask}
    weights, mask, _ = correct(old_log_probs, tensors["rollout_log_probs"], mask, **changes)
    return {MASK: mask} if weights is None else {WEIGHTS: weights.batch[WEIGHTS]}


def _clipped(
    settings: StabilizeConfig, tensors: Mapping[str, torch.Tensor], log_prob: torch.Tensor, has_ratio_clips: bool
) -> torch.Tensor | None:
    """Return the weights that our clips on ratios give; None where they are on, or there are no rollout log-probs."""
    if has_ratio_clips or "rollout_log_probs" not in tensors:
        return None
    return TokenWeigher(settings).token_weights(tensors, log_prob, tensors.get(WEIGHTS), {})


_WEIGHT_CURES: dict[str, Callable[..., torch.Tensor | None]] = {
    # of the run's own correction, bounded
    "truncate": lambda tensors, *_: tensors[WEIGHTS].clamp(max=_MAX_WEIGHT) if WEIGHTS in tensors else None,
    "clip_tokens": partial(_clipped, StabilizeConfig(token_clip=TokenClipConfig(mode="clamp"))),
    "clip_sequences": partial(_clipped, StabilizeConfig(seq_clip=SeqClipConfig(mode="clamp"))),
}
"""Cure -> function of its weights on token losses; None where the run has the cure already, or lacks a tensor."""


def aggregation_mode(config: Any) -> str:
    """Return how the policy loss of verl's actor config averages tokens.

    In some releases some losses average over sequences whatever ``loss_agg_mode`` says.
    """
    by_token, by_sequence = (_policy_loss(config, mode) for mode in ("token-mean", _BY_SEQUENCE))
    return _BY_SEQUENCE if by_token == by_sequence else config.loss_agg_mode


def _counts_empty_rows(config: Any) -> bool:
    """Return whether the policy loss is a mean over all rows, even those without a token, as geo_mean's is."""
    row, empty_row = [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]
    return _policy_loss(config, _BY_SEQUENCE, [row]) != _policy_loss(config, _BY_SEQUENCE, [row, empty_row])


def _policy_loss(config: Any, mode: str, mask: Sequence[Any] = ((1.0, 0.0, 0.0), (1.0, 1.0, 1.0))) -> float:
    """Return the loss of two sequences with different advantages, by default of one token and of three."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    config = changed(config, global_batch_info={})
    mask = torch.tensor(mask)
    log_prob, advantages = torch.full_like(mask, -1.0), torch.tensor([[1.0], [3.0]])[: len(mask)] * mask
    policy_loss = get_policy_loss_fn(config.policy_loss.get("loss_mode", "vanilla"))
    inputs = {"old_log_prob": log_prob, "log_prob": log_prob, "advantages": advantages, "response_mask": mask}
    return float(policy_loss(**inputs, loss_agg_mode=mode, config=config)[0])


class ActorLoss(LossReplay):
    """A step of verl's actor that can compute its loss under other settings, from tensors that an adapter finds."""

    config: Any
    """verl's actor config."""
    has_ratio_clips: bool
    """Whether ``token_clip`` or ``seq_clip`` weigh its tokens."""

    def loss_inputs(self, micro_batch: int) -> Mapping[str, torch.Tensor]:
        """Return the tensors (B, T) that the loss reads, by verl's names."""
        raise NotImplementedError

    @property
    def without_kl(self) -> dict[str, Any] | None:
        return {"use_kl_loss": False} if self.config.use_kl_loss else None

    @property
    def without_entropy(self) -> dict[str, Any] | None:
        return {"entropy_coeff": 0} if self.config.entropy_coeff != 0 else None

    def tensors_under(self, name: str, micro_batch: int, groups: Groups | None) -> dict[str, torch.Tensor] | None:
        tensors, log_prob = self.loss_inputs(micro_batch), self.recorded(micro_batch).log_prob
        rows = self.rows(micro_batch)
        if "advantages" not in tensors or groups is None or len(rows) != len(log_prob):
            return None
        if name in CORRECTIONS:
            return _corrected(loss_settings(options_of(name, self.trainer_name)[""]), tensors)
        if name in _WEIGHT_CURES:
            weights = _WEIGHT_CURES[name](tensors, log_prob, self.has_ratio_clips)
            return None if weights is None else {WEIGHTS: weights}
        advantages = tensors["advantages"]
        if name == "reweight" and not groups.is_reweighted:
            return {"advantages": reweight(advantages, tensors["old_log_probs"], ALPHA)}
        toggle = "mean_only" if groups.is_divided else "divide"
        if name == toggle and groups.other_advantages:
            other = advantages.new_tensor([groups.other_advantages[row] for row in rows])
            return {"advantages": other.unsqueeze(1) * tensors[MASK]}
        return None


class AnalysedLoss(ActorLoss):
    """A step of verl's actor that knows how its loss averages, for the analyses."""

    def record_forwards(self, inputs: Iterable[Any]) -> None:
        """Run a forward of each micro-batch without a graph, and record it."""
        for index, each in enumerate(inputs):
            self.before_forward(each)
            with torch.no_grad():
                self.after_forward(self.forward(index))

    def average(self, micro_batch: int, term: str, selected: torch.Tensor) -> tuple[float, float]:
        """Return the share of selected tokens, bool (B, T), in a term's average, and their part of the term's value.

        Over all tokens and ranks the shares add up to 1, and the values to the batch's loss. A loss that is no sum over
        tokens has the value that it has on these tokens alone.
        """
        mode = aggregation_mode(self.config) if term == "task" else self.config.loss_agg_mode
        mask, terms = self.token_mask(micro_batch), terms_of(self)
        weight, is_sum = self.weight_of(micro_batch, term, mode)
        tokens, all_tokens = selected.sum(1).double(), mask.sum(1).double()
        if mode == "token-mean":
            share = float(tokens.sum() / all_tokens.sum())
        else:
            share = float((tokens / all_tokens.clamp(min=1)).sum() / (all_tokens > 0).sum())
        task = self._loss_of(selected, micro_batch, terms["task"])
        value = task if term == "task" else self._loss_of(selected, micro_batch, terms[term]) - task
        is_sum = is_sum or (term == "task" and _counts_empty_rows(self.config))
        return weight * share, value / self.num_ranks * (1.0 if is_sum else share)

    def _loss_of(self, selected: torch.Tensor, micro_batch: int, settings: Mapping[str, Any]) -> float:
        """Return the loss of the selected tokens alone under these settings."""
        recorded, rng = self.recorded(micro_batch), RngState(selected.device)
        with torch.no_grad():
            outputs = Outputs(recorded.log_prob, recorded.entropy)
            loss = self.loss_under(micro_batch, outputs, settings, {MASK: selected.long()})
        rng.restore()  # some losses draw random numbers: every term has the same
        return float(loss)

    @abstractmethod
    def weight_of(self, micro_batch: int, term: str, mode: str) -> tuple[float, bool]:
        """Return a micro-batch's weight in a term's average over the batch, and whether its loss is a sum over a
        constant instead of a mean, so that fewer tokens make it smaller."""


def token_weights(mask: torch.Tensor, aggregate: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return each token's weight in a loss, like the mask of response tokens (B, T).

    That is the derivative of verl's own aggregation of token losses (B, T), which is linear.
    """
    token_losses = torch.zeros_like(mask, dtype=torch.float32, requires_grad=True)
    (weights,) = torch.autograd.grad(aggregate(token_losses), token_losses)
    return weights.nan_to_num()

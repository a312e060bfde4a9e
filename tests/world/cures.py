# SPDX-License-Identifier: Apache-2.0
"""Compare what a search says of other settings with the same update run with them; runs inside a rank."""

import math
from contextlib import nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.world.harness import make_batch, make_trainer, part, step_class
from tests.world.settings import require
from tests.world.spikes import ON

ACTOR = "actor_rollout_ref.actor"
OFF_POLICY = [f"{ACTOR}.ppo_epochs=2"]
"""Then the loss takes the stored log-probs; the first epoch is looked at."""
NO_CLIP = [*OFF_POLICY, *(f"{ACTOR}.{name}=1e9" for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"))]
NO_DUAL_CLIP = [*OFF_POLICY, f"{ACTOR}.clip_ratio_c=1e9"]
KL = [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=10.0"]
GRPO = ["algorithm.adv_estimator=grpo"]

Edit = tuple[str, tuple[Any, ...], float]
"""A tensor of the batch, where in it, and the value that is put there."""

KINDS: dict[str, tuple[list[str], list[Edit]]] = {
    "pushed down": (NO_DUAL_CLIP, [("old_log_probs", (5, 3), -13.5), ("advantages", (5, 3), -1.0)]),
    "pushed up": (NO_CLIP, [("old_log_probs", (5, 3), -13.5), ("advantages", (5, 3), 1.0)]),
    "three pushed down": (
        [*NO_DUAL_CLIP, f"{ACTOR}.gradloc.search.max_steps=8"],
        [(*each, *rest) for at in ((2, 1), (5, 3), (12, 4)) for each, rest in (
            (("old_log_probs",), (at, -14.0)), (("advantages",), (at, -1.0)),
        )],
    ),
    "advantage": ([], [("advantages", (5, 3), 1e4)]),
    "advantage of a row, GSPO": ([f"{ACTOR}.policy_loss.loss_mode=gspo"], [("advantages", (5,), 1e4)]),
    "reference, mse": ([*KL, f"{ACTOR}.kl_loss_type=mse"], [("ref_log_prob", (9, 4), -500.0)]),
    "reference, k3": ([*KL[:1], f"{ACTOR}.kl_loss_coef=1e4"], [("ref_log_prob", (9, 4), -2.2)]),
    "reference, kl": ([*KL[:1], f"{ACTOR}.kl_loss_coef=1e4", f"{ACTOR}.kl_loss_type=kl"], []),
    "entropy": ([f"{ACTOR}.entropy_coeff=3000"], []),
    "far from the engine": (
        NO_DUAL_CLIP,
        [("old_log_probs", (5, 3), -13.5), ("rollout_log_probs", (5, 3), -13.5), ("advantages", (5, 3), -1.0)],
    ),
    "left by the policy": (
        NO_DUAL_CLIP,
        [("old_log_probs", (5, 3), -13.5), ("rollout_log_probs", (5,), -0.01), ("advantages", (5,), -1.0)],
    ),
    "weight": ([], [("rollout_is_weights", (5, 3), 1e4)]),
    "rewards, not divided": ([*GRPO, "algorithm.norm_adv_by_std_in_grpo=false"], [("rewards", (), 1e4)]),
    "rewards, divided": (GRPO, [("rewards", (), 1e-3), ("rollout_is_weights", (5, 3), 1e4)]),
    "a token the trainer does not know": (
        [*NO_DUAL_CLIP, *GRPO],
        [("old_log_probs", (5, 3), -13.5), ("rollout_log_probs", (5, 3), -0.01), ("advantages", (5, 3), -1.0)],
    ),
}  # fmt: skip
"""Settings and what is put into the batch; ``rewards`` scales them and makes the advantages from them as GRPO does."""
CERTAINLY = {
    "truncate": "weight",
    "clip_tokens": "far from the engine",
    "clip_sequences": "far from the engine",
    "weigh_tokens": "pushed down",
    "divide": "rewards, not divided",
    "mean_only": "rewards, divided",
    "veto": "a token the trainer does not know",
    "drop_sequences": "a token the trainer does not know",
    "off_policy_mask": "left by the policy",
    "reweight": "advantage",
    "cispo": "far from the engine",
    "sapo": "far from the engine",
    "gspo": "far from the engine",
    "kl_cov": "far from the engine",
    "gpg": "far from the engine",
    "by_sequence": "advantage",
}
"""Settings, and the spike under which each is measured, whether or not another would come first."""


CORRECTIONS = ("weigh_tokens", "veto", "drop_sequences")
"""Settings of verl's rollout correction."""


def edited(kind: str, cure: str = "", line: str = "") -> Any:
    """Return the batch of a kind, changed as the trainer would under this setting, where it is none of the loss's."""
    overrides, edits = KINDS[kind]
    batch = make_batch(rollout_noise=0.0 if {*OFF_POLICY} <= {*overrides} else None)  # which TRL goes by
    tensors = batch.batch
    tensors["ref_log_prob"] = tensors["old_log_probs"].clone()
    if any(name == "rollout_is_weights" for name, *_ in edits):
        tensors["rollout_is_weights"] = torch.ones_like(tensors["old_log_probs"])
    for name, where, value in edits:
        if name == "rewards":
            is_divided = "algorithm.norm_adv_by_std_in_grpo=false" not in overrides
            _reward(batch, value, {"divide": True, "mean_only": False}.get(cure, is_divided))
        else:
            tensors[name][where] = value
    if cure == "truncate":
        tensors["rollout_is_weights"] = tensors["rollout_is_weights"].clamp(max=1.5)
    if cure in CORRECTIONS:
        from omegaconf import OmegaConf

        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

        settings = OmegaConf.from_dotlist(line.split()).algorithm.rollout_correction
        batch, _ = compute_rollout_correction_and_add_to_batch(batch, settings)
    return batch


def _reward(batch: Any, scale: float, is_divided: bool) -> None:
    """Scale the rewards in place, and compute GRPO's advantages of them by the trainer's own rule."""
    rewards, mask = batch.batch["token_level_scores"].mul_(scale), batch.batch["response_mask"]
    if find_spec("verl"):
        from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

        given = {"index": batch.non_tensor_batch["uid"], "norm_adv_by_std_in_grpo": is_divided}
        batch.batch["advantages"] = compute_grpo_outcome_advantage(rewards, mask.float(), **given)[0]
    else:  # as TRL does
        pairs = rewards.sum(-1).view(-1, 2)
        centred = pairs - pairs.mean(1, keepdim=True)
        centred = centred / (pairs.std(1, keepdim=True) + 1e-4) if is_divided else centred
        batch.batch["advantages"] = centred.view(-1, 1) * mask


def grouped(algorithm: dict[str, Any], is_reweighted: bool, factor: float) -> dict[str, Any]:
    """Return the driver's groups of a batch with GRPO's advantages, times a factor; ``algorithm`` is of the config."""
    require(find_spec("verl") is not None, "a rollout correction is verl's")
    from omegaconf import OmegaConf

    batch = edited("rewards, divided")
    batch.batch["advantages"] *= factor
    known = {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True, "use_kl_in_reward": False, **algorithm}
    view = part("loop.batch").BatchView(batch.batch, batch.non_tensor_batch)
    return asdict(part("adapters.verl_common.losses").advantage_groups(view, OmegaConf.create(known), is_reweighted))


def corrected(name: str) -> dict[str, list[float]]:
    """Apply a setting of the rollout correction to a micro-batch that only fills a batch up: it changes nothing."""
    require(find_spec("verl") is not None, "a rollout correction is verl's")
    losses, cures = part("adapters.verl_common.losses"), part("explain.cures")
    assert name in losses.CORRECTIONS and name in cures.OF_BATCH
    tensors = dict(make_batch(rollout_noise=0.0).batch[:2])
    tensors["response_mask"] = torch.zeros_like(tensors["response_mask"])
    step = SimpleNamespace(
        loss_inputs=lambda index: tensors,
        recorded=lambda index: SimpleNamespace(log_prob=tensors["old_log_probs"]),
        rows=lambda index: [0, 1],
        has_ratio_clips=False,
        trainer_name=step_class().trainer_name,
    )
    made = losses.ActorLoss.tensors_under(step, name, 0, part("core.step").Groups())
    return {key: value.unique().tolist() for key, value in made.items()}


def passes(kind: str, dump_dir: str) -> dict[str, Any]:
    """Forwards and backwards of a search that may measure no setting, and of one that may measure two: as made, and as
    the event says the search took them."""
    Prober, found = part("core.probe").Prober, {}
    for allowed in ("0", "2"):
        probers: list[Any] = []

        def init(self: Any, *given: Any, of: Any = Prober.__init__, probers: list[Any] = probers) -> None:
            of(self, *given)
            probers.append(self)

        settings = [*KINDS[kind][0], f"{ACTOR}.grad_norm_threshold=640", f"{ACTOR}.gradloc.search.max_cures={allowed}"]
        with only_trying(""), mock.patch.object(Prober, "__init__", init):
            (event, *_) = make_trainer([*ON, *settings], f"{dump_dir}-{allowed}").update(edited(kind))["events"]
        search = event["search"]
        found[allowed] = {
            "made": [probers[0].num_forwards, probers[0].num_backwards],
            "said": [search["forwards"], search["backwards"]],
            "cures": event["cures"],
        }
    return found


def only_trying(name: str) -> Any:
    """While a search tries this setting alone, whatever its coefficients promise; empty: as always."""
    require(issubclass(step_class(), part("core.step").LossReplay), "of its loss no other setting is known")
    forced = {"MILDEST_FIRST": (name,), "CERTAIN": math.inf}
    return mock.patch.multiple(part("search.cures"), **forced) if name else nullcontext()


def healed(kind: str, overrides: list[str], dump_dir: str, only: str = "") -> dict[str, Any]:
    """A run that heals its spike, and one of the same updates under the setting that the event names."""

    def train(settings: list[str], folder: str, *cure: str) -> tuple[Any, list[dict[str, Any]]]:
        trainer = make_trainer(settings, folder)
        out = trainer.update(edited(kind, *cure))
        left = trainer.weights_hash(), torch.get_rng_state().numpy().tobytes()
        return (left, out["metrics"]["actor/grad_norm"][0]), out["events"]

    # of one epoch, in which all rows are of one mini-batch
    overrides = [*ON, f"{ACTOR}.grad_norm_threshold=640", *KINDS[kind][0], *overrides]
    with only_trying(only):
        ours, (event, *_) = train([*overrides, f"{ACTOR}.gradloc.action.mode=heal"], dump_dir)
    if not event["cures"]:
        return {"event": event}
    (cured, *_) = event["cures"]
    theirs, _ = train([*overrides, *_settings(cured)], f"{dump_dir}-again", cured["name"], cured["line"])
    return {"event": event, "healed": ours, "wanted": theirs}


def _settings(cured: dict[str, Any]) -> list[str]:
    return cured["line"].split() if find_spec("verl") else cured["line"].split(", ")


def measured(kind: str, overrides: list[str], dump_dir: str, only: str = "") -> dict[str, Any]:
    """One update; its event, and of each setting that was tried the norm of the same update run with it.

    ``only``: try this setting alone, whatever its coefficients promise.
    """
    overrides = [*ON, f"{ACTOR}.grad_norm_threshold=640", *KINDS[kind][0], *overrides]
    with only_trying(only):
        (event, *_) = make_trainer(overrides, dump_dir).update(edited(kind))["events"]
    truths = {}
    for cure in event["cures"] or ():
        off = [f"{ACTOR}.gradloc.action.mode=observe", f"{ACTOR}.gradloc.search.max_cures=0"]
        changed = [*overrides, *_settings(cure), *off]
        out = make_trainer(changed, f"{dump_dir}-again").update(edited(kind, cure["name"], cure["line"]))
        truths[cure["name"]] = out["metrics"]["actor/grad_norm"][0][0]
    is_measured = bool(only) and part("explain.cures").is_measured(only, step_class().trainer_name)
    found = {"event": event, "truths": truths, "is_measured": is_measured}
    return {**found, "rng": torch.get_rng_state().numpy().tobytes()}

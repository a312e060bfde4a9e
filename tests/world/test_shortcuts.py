# SPDX-License-Identifier: Apache-2.0
"""Shortcuts of the worlds give what verl's own parts give."""

ACTOR = "actor_rollout_ref.actor"


def test_a_config_is_what_hydra_composes(single):
    cases = [
        [f"{ACTOR}.spike_detection=true", f"{ACTOR}.grad_norm_threshold=640", f"{ACTOR}.bisect_dump_dir=/a folder"],
        ["trainer.health.policy_kl=[0.5,null]", f"{ACTOR}.checkpoint.save_contents=['model']", f"{ACTOR}.strategy=off"],
        ["+gradloc=safe", f"{ACTOR}.gradloc.stabilize.layer_clip.rule=adagc"],
    ]
    assert single.run("test_shortcuts.differing_configs", cases=cases) == [[]]


def test_the_mask_is_transformers_own(single):
    assert single.run("test_shortcuts.masks_are_equal") == [[True, True]]


def differing_configs(cases):
    """The cases that Hydra composes to something else; runs in a rank."""
    from pathlib import Path

    import hydra
    from omegaconf import OmegaConf

    import verl
    from tests.world.configs import config_of

    found = [config_of(overrides) for overrides in cases]
    with hydra.initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        whole = [hydra.compose("ppo_trainer", overrides=overrides) for overrides in cases]
    pairs = zip(cases, whole, found, strict=True)
    return [case for case, one, other in pairs if OmegaConf.to_yaml(one) != OmegaConf.to_yaml(other)]


def masks_are_equal():
    """With and without padding; runs in a rank."""
    import torch
    from transformers.masking_utils import sdpa_mask

    from tests.world.harness import make_batch, plain_mask

    padded = make_batch().batch["attention_mask"].bool()
    rows, length = padded.shape
    answers = []
    for mask in (padded, torch.ones_like(padded)):
        found, expected = (
            make(rows, torch.arange(length), length, attention_mask=mask) for make in (plain_mask, sdpa_mask)
        )
        answers.append(found is expected if expected is None else torch.equal(found, expected))
    return answers

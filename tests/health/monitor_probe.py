# SPDX-License-Identifier: Apache-2.0
"""The monitor on verl's own batches; runs in a rank, where verl is importable."""

import contextlib
import io
import json
import logging
import os
import tempfile

import numpy as np
import torch
from omegaconf import OmegaConf

from verl import DataProto
from verl.gradloc.adapters.verl07.trainer import TrainerHook, clip_limit
from verl.gradloc.adapters.verl_common.trainer import build_monitor
from verl.gradloc.health import HealthConfig
from verl.gradloc.health.monitor import Monitor
from verl.gradloc.loop.batch import BatchView

CALM = {"actor/grad_norm": 0.5, "actor/pg_loss": 0.01, "critic/score/mean": 0.4}


def proto_of(rewards):
    """A batch of 3 tokens a row; ``rewards`` are (uid, sum of the row's scores)."""
    scores = torch.zeros(len(rewards), 3)
    scores[:, -1] = torch.tensor([score for _, score in rewards])
    uids = np.array([uid for uid, _ in rewards], dtype=object)
    tensors = {"token_level_scores": scores, "response_mask": torch.ones(len(rewards), 3)}
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids})


def batch_of(rewards):
    """The same as the monitor takes it."""
    proto = proto_of(rewards)
    return BatchView(proto.batch, proto.non_tensor_batch)


def observed(rewards, metrics=(), has_uids=True, **settings):
    """The metrics after one observed step."""
    found, batch = {**CALM, **dict(metrics)}, batch_of(rewards)
    if not has_uids:
        del batch.labels["uid"]
    Monitor(HealthConfig(enable=True), 1.0, **settings).observe(batch, found, 1)
    return found


def config_of(**changes):
    """The parts of a trainer's config that the monitor reads."""
    made = {
        "trainer.health.enable": True,
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.actor": {"strategy": "fsdp2", "grad_clip": 1.0, "optim": {"clip_grad": 0.7}},
        **changes,
    }
    config = OmegaConf.create()
    for key, value in made.items():
        OmegaConf.update(config, key, value)
    return config


def clip_and_comparing(**changes):
    """What the monitor takes from a config."""
    config = config_of(**changes)
    monitor = build_monitor(config, clip_limit(config))
    clips = [m._limit for rule, m in monitor._judge._asked if rule.name == "clip_share"]
    return [clips[0] if clips else None, monitor._compares_rollouts]


def resumed():
    """States of a run of 20 calm steps and a jump: at once, and with a checkpoint in between."""
    answers = []
    for cut in (None, 15):
        monitor, states = Monitor(HealthConfig(enable=True), 1.0), []
        for step in range(1, 22):
            if step == cut:
                kept = json.loads(json.dumps(monitor.state()))
                monitor = Monitor(HealthConfig(enable=True), 1.0)
                monitor.load_state(kept)
            metrics = {**CALM, "actor/grad_norm": 500.0 if step == 21 else 0.5 + 0.01 * (step % 3)}
            monitor.observe(batch_of([("a", 1.0), ("a", 0.0)]), metrics, step)
            states.append(metrics["health/state"])
        answers.append(states)
    return answers


def checkpointed(folder):
    """The last judged step in a checkpoint, which verl saves before the step has its metrics."""
    hook = TrainerHook(monitor=Monitor(HealthConfig(enable=True), 1.0))
    kept = []
    for step in range(1, 5):
        if step == 3:
            hook.save(folder)
        hook.after_step(proto_of([("a", 1.0), ("a", 0.0)]), dict(CALM), step)
    with open(f"{folder}/gradloc.json") as file:
        kept.append(json.load(file)["health"]["judge"]["last_step"])
    resumed = TrainerHook(monitor=Monitor(HealthConfig(enable=True), 1.0))
    resumed.load(folder)
    kept.append(resumed.monitor.state()["judge"]["last_step"])
    return kept + [os.listdir(folder)]


def spoken():
    """Lines are printed by the monitor itself; the answer is only what follows them."""
    monitor = Monitor(HealthConfig(enable=True), 1.0)
    chi2, kl = "rollout_corr/chi2_token", "actor/ppo_kl"
    for step, extra in enumerate(({}, {chi2: 500.0}, {chi2: 500.0}, {chi2: 500.0, kl: 3.0}, {}, {}), 1):
        monitor.observe(batch_of([("a", 1.0), ("a", 0.0)]), {**CALM, **extra}, step)


PAIRS = [("a", 1.0), ("b", 0.0), ("a", 1.0), ("b", 1.0), ("c", 0.5), ("c", 0.5)]


def answer():
    """Everything that the tests ask: the answers, what was printed, and the log."""
    log = logging.StreamHandler(io.StringIO())
    logging.getLogger().addHandler(log)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            spoken()
            found = answers()
    finally:
        logging.getLogger().removeHandler(log)
    return found, printed.getvalue().splitlines(), log.stream.getvalue()


def answers():
    return {
        "share": observed(PAIRS),
        "given": observed(PAIRS, {"rollout/zero_variance_share": 0.125}),
        "single": observed([("a", 1.0), ("b", 1.0)]),
        "critic": observed(PAIRS, compares_rollouts=False),
        "broken": observed(PAIRS, has_uids=False),
        "nothing": observed(PAIRS, {name: None for name in CALM}, compares_rollouts=False),
        "resumed": resumed(),
        "checkpointed": checkpointed(tempfile.mkdtemp()),
        "fsdp": clip_and_comparing(),
        "megatron": clip_and_comparing(**{"actor_rollout_ref.actor.strategy": "megatron"}),
        "engine": clip_and_comparing(**{"trainer.use_legacy_worker_impl": "disable"}),
        "layers": clip_and_comparing(**{"actor_rollout_ref.actor.gradloc.stabilize.layer_clip.rule": "adagc"}),
        "unclipped": clip_and_comparing(**{"actor_rollout_ref.actor.grad_clip": None}),
        "gae": clip_and_comparing(**{"algorithm.adv_estimator": "gae"}),
        "off": [
            build_monitor(config_of(**{"trainer.health.enable": False}), 1.0) is None,
            build_monitor(config_of(**{"trainer.health": None}), 1.0) is None,
        ],
    }

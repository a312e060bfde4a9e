# SPDX-License-Identifier: Apache-2.0
"""The experiments there are: one entry here and one config, `experiments/NAME.yaml`, each.

Standard library only: `run_experiment.sh` reads it before anything is installed.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments import settings
from experiments.cpu import environment
from experiments.errors import UsageError
from experiments.experiment import Arm, Experiment, number, reads, writes

CONFIGS = Path(__file__).resolve().parent
_RUNAWAY = number("RUNAWAY_PENALTY_MULTIPLIER", "what a reward is multiplied by that has no end in time (1)")


def on_verl09(experiment: Experiment, **changes: Any) -> Experiment:
    """The form of an experiment for verl 0.9.1, with nothing patched: its config is NAME-verl09.yaml."""
    variables = tuple(variable for variable in experiment.variables if variable.name != _RUNAWAY.name)
    fresh = {"name": f"{experiment.name}-verl09", "variables": variables, "verls": ("0.9.1",), "is_installed": True}
    return replace(experiment, **{**fresh, **changes})


DEMO = Experiment(
    "demo",
    "the real trainer on a machine with no GPU, a planted spike, and the token that made it.",
    variables=(
        number("GRPO_MAX_GRAD_NORM", "the norm that gradients are clipped to (1)"),
        number("GRPO_TEMPERATURE", "the rollouts' temperature (1)"),
        number("GRPO_LEARNING_RATE", "the actor's learning rate (1e-4)"),
        _RUNAWAY,
    ),
    is_on_cpu=True,
    is_planted=True,
    verls=("0.7.0", "0.7.1"),
)
DEMO_VERL09 = on_verl09(DEMO)
DEMO_TRL = Experiment(
    "demo-trl",
    "the demo on TRL's GRPOTrainer, in two processes",
    imports=("torch", "trl", "datasets"),
    is_on_cpu=True,
    is_planted=True,
    script="experiments.trl.demo",
    settings=settings.TrlSettings,
    own=environment.TRL,
    started_by=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
)
DEMO_LOOP = Experiment(
    "demo-loop",
    "the demo in a plain PyTorch loop",
    imports=("torch",),
    is_on_cpu=True,
    is_planted=True,
    material="",
    script="experiments.loop.demo",
    settings=settings.LoopSettings,
    own=environment.LOOP,
)
TRAINERS = {"trl": DEMO_TRL, "loop": DEMO_LOOP}
"""The demo's forms for other trainers than verl."""

DEMO_LLM = DEMO.heir(
    "demo-llm",
    "the demo on a pretrained language model of 135 M weights, SmolLM2-135M-Instruct, with no GPU and no hub",
    number("GRPO_LEARNING_RATE", "the actor's learning rate (2e-6)"),
    imports=("torch", "ray", "hydra", "math_verify"),
    material="experiments.llm.build",
    is_planted=True,
)

DEMO_VLLM = DEMO_VERL09.heir(
    "demo-vllm",
    "the demo on verl 0.9.1 with vLLM as its rollout engine, on SmolLM2-135M-Instruct, with no GPU and no hub",
    number("GRPO_LEARNING_RATE", "the actor's learning rate (2e-6)"),
    imports=("torch", "ray", "hydra", "math_verify", "vllm"),
    material=DEMO_LLM.material,
    is_planted=True,
    verls=("0.9.1",),
)

DEMO_ASYNC = DEMO_VERL09.heir(
    "demo-async",
    "the demo on verl 0.9.1 with rollouts that go on while it trains: separate_async, a batch ahead",
    is_planted=True,
    verls=("0.9.1",),
)

PUBLISHED = Experiment(
    "gradloc-qwen3-4b",
    "the published experiment: Qwen3-4B-Instruct-2507, GRPO, 8 nodes of 8 GPUs, vLLM",
    variables=(
        reads("MODEL_PATH", "the folder with Qwen3-4B-Instruct-2507, weights and tokenizer"),
        reads("TRAIN_FILE", "a parquet file of prompts in verl's format, with reward_model.ground_truth"),
        writes("CKPTS_DIR", "a folder that every node sees, for checkpoints and for what GradLoc finds"),
    ),
    imports=("torch", "ray", "hydra", "vllm", "math_verify"),
)

PUBLISHED_VERL09 = on_verl09(PUBLISHED, imports=(*PUBLISHED.imports, "gradloc"))

_ACTOR = "actor_rollout_ref.actor"
_STABILIZE = f"{_ACTOR}.gradloc.stabilize"
_ACTION = f"{_ACTOR}.gradloc.action.mode"
_MASK = f"{_ACTION}=mask"

TOOL_LOOP = DEMO_VERL09.heir(
    "tool-loop",
    "a tool loop on verl 0.9.1 that appends a token to the loss which the policy never sampled, on SmolLM2",
    number("GRPO_LEARNING_RATE", "the actor's learning rate (2e-5)"),
    material=DEMO_LLM.material,
    verls=("0.9.1",),
    arms=(
        Arm("appended", "the end of the first turn, which the loop appends, is in the loss"),
        Arm("appended-mask", "the same, and the step without what is named", (_MASK,)),
        Arm(
            "left-out", "it is not: the twin", ("actor_rollout_ref.rollout.agent.default_agent_loop=calculator-masked",)
        ),
    ),
    seeds=(1,),
    summary_module="experiments.llm.wild",
)

EXPLOSION = DEMO.heir(
    "explosion",
    "a GRPO gradient explosion by an importance ratio of 100 000, and what safeguards do",
    number("GRPO_MAX_GRAD_NORM", "the norm that gradients are clipped to (1e9, so never)"),
    number("GRPO_LEARNING_RATE", "the actor's learning rate (4e-4)"),
    number("RUNAWAY_PENALTY_MULTIPLIER", "what a reward is multiplied by that has no end in time (0.3)"),
    arms=(
        Arm("healthy", "the same run with nothing stale", ("explosion.is_stale=false",)),
        Arm("unprotected", "no clip of any kind"),
        Arm("grad-clip", "gradients clipped to norm 1", ("knobs.max_grad_norm=1.0",)),
        Arm(
            "ppo-clip",
            "verl's own limits on the ratio, which the others switch off",
            (
                f"{_ACTOR}.clip_ratio=0.2",
                f"{_ACTOR}.clip_ratio_low=0.2",
                f"{_ACTOR}.clip_ratio_high=0.2",
                f"{_ACTOR}.clip_ratio_c=3.0",
            ),
        ),
        Arm(
            "token-clip",
            "tokens with a ratio to the rollout's policy over 5 have no say",
            (f"{_STABILIZE}.token_clip.mode=mask", f"{_STABILIZE}.token_clip.upper=5.0"),
        ),
        Arm(
            "layer-clip",
            "each layer's gradient clipped to twice its own moving average",
            (f"{_STABILIZE}.layer_clip.rule=adagc", f"{_STABILIZE}.layer_clip.warmup=8"),
        ),
        Arm(
            "skip-step",
            "no step when the norm is 6 standard deviations over the last ones",
            (f"{_STABILIZE}.skip_step.enable=true", f"{_STABILIZE}.skip_step.window=16"),
        ),
        Arm("mask", "the step without the tokens that gradloc names", (_MASK,)),
        Arm("heal", "the step under the first setting measured to heal it", (_MASK.replace("=mask", "=heal"),)),
        Arm(
            "conservative",
            "the post-mortem's conservative settings",
            (
                "knobs.max_grad_norm=0.5",
                "knobs.learning_rate=2.4e-4",
                "knobs.temperature=0.9",
                "knobs.runaway_penalty=0.4",
            ),
        ),
        Arm("safe", "the preset safe: a clip of tokens, a clip of layers", ("+gradloc=safe",)),
    ),
    summary_module="experiments.explosion.summary",
)

EXPLOSION_VERL09 = on_verl09(
    EXPLOSION,
    variables=EXPLOSION.variables,
    # demo-verl09 has chosen a preset already: another one takes its place.
    arms=tuple(replace(arm, overrides=tuple(text.lstrip("+") for text in arm.overrides)) for arm in EXPLOSION.arms),
)

_NO_CLIP = tuple(f"{_ACTOR}.clip_ratio{which}=1e9" for which in ("", "_low", "_high", "_c"))
_FAST = (f"{_ACTOR}.optim.lr=1e-4",)
_STALE = (*_FAST, f"{_ACTOR}.ppo_epochs=4", f"{_ACTOR}.ppo_mini_batch_size=2")
# Two mini-batches: with one, verl takes the ratio for 1 and never reads the rollouts' log-probs.
_BYPASS = (*_FAST, f"{_ACTOR}.ppo_mini_batch_size=2", "algorithm.rollout_correction.bypass_mode=true", *_NO_CLIP)
_HOT = ("actor_rollout_ref.rollout.temperature=1.5",)
_LONG = (*_FAST, "data.max_response_length=64", "actor_rollout_ref.rollout.temperature=0.5")
_NEGATIVE = "algorithm.adv_estimator=negative_only"
_REWARD_ERROR = ("wild.reward=error", "algorithm.norm_adv_by_std_in_grpo=false")

WILD = DEMO_LLM.heir(
    "wild",
    "a pretrained model under settings with which published runs explode, nothing planted: what spikes, and why",
    number("GRPO_LEARNING_RATE", "the actor's learning rate (1e-5)"),
    arms=(
        Arm("healthy", "GRPO as it should be: the twin of all others that have no twin of their own"),
        Arm("reward-error", "minus the squared error as the reward, not normalized: no lower bound", _REWARD_ERROR),
        Arm("reward-error-mask", "the same, and the step without what is named", (*_REWARD_ERROR, _MASK)),
        Arm("reward-error-normalized", "the same, with advantages in units of their group's spread", _REWARD_ERROR[:1]),
        Arm("learning-rate", "ten times the learning rate", _FAST),
        Arm("stale", "the same with four epochs of two mini-batches on each rollout, clipped as usual", _STALE),
        Arm("unclipped", "the same with no clip on the ratio", (*_STALE, *_NO_CLIP)),
        Arm("hot", "rollouts at temperature 1.5", _HOT),
        Arm("negative", "the same, wrong answers pushed down and right ones left alone", (*_HOT, _NEGATIVE)),
        Arm(
            "bf16",
            "a trainer in bfloat16, rollouts in float32 and their log-probs as the old ones, no clip",
            (*_BYPASS, f"{_ACTOR}.fsdp_config.dtype=bfloat16"),
        ),
        Arm("fp32", "the same with the trainer in float32", _BYPASS),
        Arm("long", "a reward for every word, and room for many, at temperature 0.5", (*_LONG, "wild.reward=length")),
        Arm("long-right", "the same with the reward for right answers", _LONG),
    ),
    seeds=(1,),
    summary_module="experiments.llm.wild",
)

_EIGHT_EPOCHS = (*_STALE, f"{_ACTOR}.optim.lr=3e-5", f"{_ACTOR}.ppo_epochs=8")
_WARM_EPOCHS = (*_STALE, "actor_rollout_ref.rollout.temperature=1.2")
_HOT_EPOCHS = (*_HOT, *_STALE, f"{_ACTOR}.ppo_epochs=2")
_EXPLODING = {
    "reward": ("minus the squared error as the reward, not normalized", _REWARD_ERROR[:1], _REWARD_ERROR[1:]),
    "no-clip": ("four epochs of two mini-batches on each rollout, no clip", _STALE, _NO_CLIP),
    "stale": ("eight epochs at a third of that rate, no clip", _EIGHT_EPOCHS, _NO_CLIP),
    "warm": ("four epochs, rollouts at temperature 1.2, no clip", _WARM_EPOCHS, _NO_CLIP),
    "hot": ("two epochs, rollouts at temperature 1.5, no clip", _HOT_EPOCHS, _NO_CLIP),
}
"""By arm: its meaning, what its healthy twin has, and what makes it explode."""


def _with_twins(name: str, meaning: str, healthy: tuple[str, ...], more: tuple[str, ...]) -> tuple[Arm, ...]:
    """An arm that explodes, the same with spikes masked, skipped or healed, and its healthy twin."""
    exploding = (*healthy, *more)
    modes = ("mask", "skip", "heal")
    acting = (Arm(f"{name}-{m}", f"the same, action.mode={m}", (*exploding, f"{_ACTION}={m}")) for m in modes)
    return Arm(name, meaning, exploding), *acting, Arm(f"{name}-twin", "its healthy twin", healthy)


WILD_LONG = WILD.heir(
    "wild-long",
    "what natural spikes are made of: five arms that explode, masked, skipped, healed, and their healthy twins",
    arms=tuple(arm for name, told in _EXPLODING.items() for arm in _with_twins(name, *told)),
    seeds=(1, 2, 3),
    summary_module="experiments.llm.natural",
    config=WILD.name,
    overrides=tuple(f"{_ACTOR}.gradloc.trigger.{key}=4" for key in ("max_events", "max_events_per_step")),
)

PRETRAIN = Experiment(
    "pretrain",
    "SmolLM2 goes on learning from plain text, one document in forty damaged: which peaks of the norm are theirs?",
    imports=("torch", "transformers"),
    is_on_cpu=True,
    material=DEMO_LLM.material,
    script="experiments.loop.pretrain",
    settings=settings.PretrainSettings,
)

BUCKETS_DEMO = DEMO.heir(
    "buckets-demo",
    "where the gradient comes from, by reward variance, with no GPU: GRPO, steps 1 and 5",
    number("GRPO_TEMPERATURE", "the rollouts' temperature (1.2)"),
)
BUCKETS_DEMO_PPO = BUCKETS_DEMO.heir(
    "buckets-demo-ppo", "buckets-demo with PPO: a critic, and half of the groups filtered out"
)
BUCKETS_RAGEN = Experiment(
    "buckets-ragen",
    "RAGEN's published gradient-analysis run: 3B model, PPO, 8 GPUs, 8x16 to train on, 128x16 to analyse",
    variables=(
        reads("MODEL_PATH", "the folder with Qwen2.5-3B, weights and tokenizer"),
        reads("TRAIN_FILE", "a parquet file of at least 128 prompts in verl's format"),
        writes("CKPTS_DIR", "a folder for checkpoints and analyses"),
    ),
    imports=("torch", "ray", "hydra", "vllm"),
)
QUARTILES_DEMO = DEMO.heir(
    "quartiles-demo", "which tokens' gradients dominate, by probability, with no GPU: GRPO, steps 1, 9 and 17"
)

BUCKETS_DEMO_VERL09, QUARTILES_DEMO_VERL09 = map(on_verl09, (BUCKETS_DEMO, QUARTILES_DEMO))

TWO_NODES = DEMO.heir(
    "two-nodes",
    "the demo on two Ray nodes with working folders of their own, and resumed: the tokens, and what lies where",
    nodes=2,
    arms=(
        Arm("spike", "three steps, a spike in the second, a checkpoint after the third"),
        Arm(
            "resumed",
            "from that checkpoint on, a spike in the fifth step",
            (
                "trainer.resume_mode=resume_path",
                "trainer.resume_from_path=${demo.run_dir}/../spike/checkpoints/global_step_3",
                "demo.steps=6",
                "demo.fault.first_step=5",
                "demo.fault.last_step=5",
            ),
        ),
    ),
    summary_module="experiments.cpu.places",
)

KK_BASELINE = Experiment(
    "kk-baseline",
    "Knights and Knaves as published (arXiv 2505.12929): Qwen2.5-7B-Instruct-1M, GRPO, 4 GPUs of 80 GB",
    variables=(
        reads("MODEL_PATH", "the folder with Qwen2.5-7B-Instruct-1M or Qwen2.5-3B-Instruct, weights and tokenizer"),
        reads("KK_DATA", "the folder that python -m experiments.kk.generate --people 3 4 5 6 7 wrote"),
        writes("CKPTS_DIR", "a folder for checkpoints"),
    ),
    imports=("torch", "ray", "hydra", "vllm"),
)
_AR, _LOPTI = "algorithm.advantage_reweighting.alpha", "algorithm.lopti"
_KK_METHODS = {
    "ar": (f"{_AR}=0.2",),
    "lopti": (f"{_LOPTI}.enable=true", f"{_LOPTI}.eta=0.4"),
    "ar-lopti": (f"{_AR}=0.3", f"{_LOPTI}.enable=true", f"{_LOPTI}.eta=0.5"),
}
"""The published ones, on top of kk-baseline."""
_ON_BASELINE = {name: {"config": KK_BASELINE.name, "overrides": overrides} for name, overrides in _KK_METHODS.items()}
KK_AR = KK_BASELINE.heir("kk-ar", "kk-baseline with Advantage Reweighting (alpha 0.2)", **_ON_BASELINE["ar"])
KK_LOPTI = KK_BASELINE.heir(
    "kk-lopti",
    "kk-baseline with Lopti (eta 0.4: tokens less likely than that are updated first)",
    **_ON_BASELINE["lopti"],
)
KK_AR_LOPTI = KK_BASELINE.heir(
    "kk-ar-lopti", "kk-baseline with both methods (alpha 0.3, eta 0.5)", **_ON_BASELINE["ar-lopti"]
)
# No patch brings the reward along.
_KK_REWARD = tuple(f"reward.custom_reward_function.{key}" for key in ("path=pkg://gradloc.rewards.kk", "name=score"))
KK_BASELINE_VERL09 = on_verl09(KK_BASELINE, config=KK_BASELINE.name, overrides=_KK_REWARD)
KK_AR_VERL09, KK_LOPTI_VERL09, KK_AR_LOPTI_VERL09 = (
    on_verl09(
        experiment,
        imports=(*experiment.imports, "gradloc"),
        # The preset has the settings; what looks for spikes stays off.
        overrides=(*_KK_REWARD, "+gradloc=on", f"{_ACTOR}.gradloc.enable=false", *experiment.overrides),
    )
    for experiment in (KK_AR, KK_LOPTI, KK_AR_LOPTI)
)
KK_DEMO = DEMO.heir(
    "kk-demo",
    "Knights and Knaves with no GPU: GRPO plain, with Advantage Reweighting, with Lopti, with both",
    number("GRPO_LEARNING_RATE", "the actor's learning rate (6e-4)"),
    number("RUNAWAY_PENALTY_MULTIPLIER", "nothing here, where rewards are the published ones"),
    imports=("torch", "ray", "hydra", "pysat"),
    material="experiments.kk.language",
    arms=(
        Arm("baseline", "GRPO"),
        Arm("ar", "Advantage Reweighting, alpha 0.2", _KK_METHODS["ar"]),
        Arm("lopti", "low-probability tokens first, eta 0.4", _KK_METHODS["lopti"]),
        Arm("ar-lopti", "both, alpha 0.3 and eta 0.5", _KK_METHODS["ar-lopti"]),
    ),
    seeds=(1, 2, 3),
    summary_module="experiments.kk.summary",
)
KK_DEMO_VERL09 = on_verl09(KK_DEMO)

_ALL = [entry for entry in list(globals().values()) if isinstance(entry, Experiment)]
ON_VERL09 = {entry.name.removesuffix("-verl09"): entry for entry in _ALL if entry.name.endswith("-verl09")}
"""By the experiment's name: its form for verl=0.9.1."""
EXPERIMENTS = {entry.name: entry for entry in _ALL if entry not in (*ON_VERL09.values(), *TRAINERS.values())}


def names() -> list[str]:
    """Every experiment's name, sorted."""
    return sorted(EXPERIMENTS)


def forms_of(experiment: Experiment) -> list[Experiment]:
    """The experiment, and its form for verl 0.9.1 if it has one."""
    return [experiment, *(form for name, form in ON_VERL09.items() if name == experiment.name)]


def form_for(experiment: Experiment, version: str | None, trainer: str) -> Experiment:
    """The experiment's form for that version of verl, or for another trainer; itself where none was asked for.

    Raises:
        UsageError: if it has none.
    """
    if trainer != "verl":
        if experiment is not DEMO or version is not None or trainer not in TRAINERS:
            listed = f"trainer={' or '.join(TRAINERS)}"
            raise UsageError(f"trainer={trainer} is for the demo alone, as {listed} and without verl=VERSION.")
        return TRAINERS[trainer]
    forms = forms_of(experiment)
    for form in forms:
        if version is None or version in form.verls:
            return form
    *known, last = (verl for form in forms for verl in form.verls)
    listed = f"{', '.join(known)} and {last}" if known else last
    raise UsageError(f"{experiment.name} runs on verl {listed}, not on {version}.")


def load(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        UsageError: if there is none.
    """
    base = name.removesuffix("-verl09")
    if base != name and base in ON_VERL09:
        raise UsageError(f"{name} is {base} on verl 0.9.1: write {base} verl=0.9.1.")
    if name not in EXPERIMENTS:
        hint = " (its config is there; experiments/catalog.py lacks it)" if (CONFIGS / f"{name}.yaml").exists() else ""
        raise UsageError(f"no experiment is called {name!r}{hint}: there are {', '.join(names())}.")
    return EXPERIMENTS[name]


def describe() -> str:
    """What `--list` prints."""
    lines = []
    for experiment in map(load, names()):
        lines.append(f"{experiment.name}: {experiment.summary}")
        _, *others = (verl for form in forms_of(experiment) for verl in form.verls)
        lines += [f"    verl={verl}: the same on that verl" for verl in others]
        lines += [f"    {variable.kind} {variable.name}: {variable.meaning}" for variable in experiment.variables]
        lines += [f"    arm {arm.name}: {arm.meaning}" for arm in experiment.arms]
    return "\n".join(lines)

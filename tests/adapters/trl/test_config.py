# SPDX-License-Identifier: Apache-2.0
"""Settings by keyword, YAML or command line, and the sentences that refuse wrong ones."""

from dataclasses import fields
from types import SimpleNamespace
from unittest import mock

import pytest
import transformers
import trl
from accelerate.utils import DistributedType

from gradloc.adapters.trl import config
from gradloc.adapters.trl.config import health_of, refuse, settings_of, setup_of
from gradloc.adapters.trl.watch import group_of
from gradloc.trl import GradLocConfig, GRPOConfig, attach
from tests.adapters.trl.harness import make


@pytest.mark.parametrize(
    "given, mode",
    [
        ("observe", "observe"),
        ("mask", "mask"),
        ({"action": {"mode": "skip"}}, "skip"),
        ('{"action": {"mode": "mask"}}', "mask"),
        (GradLocConfig(), "observe"),
        ("off", None),
        (False, None),
        ({"enable": False}, None),
    ],
)
def test_it_is_given_as_a_mode_as_settings_or_as_json(given, mode):
    settings = settings_of(given, "out")
    assert (settings and settings.action.mode) == mode
    assert settings is None or settings.root.endswith("/out/gradloc")


def test_a_folder_of_ones_own_is_kept(tmp_path):
    assert settings_of({"dump_dir": str(tmp_path)}, "out").root == str(tmp_path)


@pytest.mark.parametrize(
    "given, said",
    [
        ("maks", "gradloc must be off, observe, mask, heal, skip, abort, or settings by name, found 'maks'."),
        ({"acton": {}}, "unknown setting gradloc.acton: did you mean gradloc.action?"),
        (
            {"action": {"mode": "maks"}},
            "gradloc.action.mode must be one of observe, mask, heal, skip, abort, found 'maks'.",
        ),
        ({"trigger": {"tua": 1}}, "unknown setting gradloc.trigger.tua: did you mean gradloc.trigger.tau?"),
        ({"trigger": 3}, "gradloc must be a mode or settings by name, found 3."),
        ({"critic": "mask"}, "gradloc.critic must be off with TRL, whose trainers have none, found 'mask'."),
        (
            {"stabilize": {"skip_step": {"enable": True}}},
            "gradloc.stabilize must be left as it is: the stabilizers need",
        ),
    ],
)
def test_a_wrong_setting_is_refused_by_the_name_that_a_user_of_trl_gave_it(given, said):
    with pytest.raises(ValueError) as caught:
        settings_of(given, "out")
    assert str(caught.value).startswith(said)


def test_health_is_a_switch_or_settings():
    assert health_of(None) is None and health_of(True).enable and health_of({"warmup": 3}).warmup == 3
    with pytest.raises(ValueError, match="health must be true, false, or settings by name, found 'yes'"):
        health_of("yes")


def test_yaml_and_the_command_line_reach_it_through_the_config(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "output_dir: out\nuse_cpu: true\nbf16: false\ngradloc:\n  action: {mode: mask}\nhealth: true\n"
    )
    (of_yaml,) = trl.TrlParser(GRPOConfig).parse_args_and_config(["--config", str(tmp_path / "run.yaml")])
    assert settings_of(of_yaml.gradloc, "out").action.mode == "mask" and health_of(of_yaml.health).enable
    (of_line,) = trl.TrlParser(GRPOConfig).parse_args_and_config(
        ["--output_dir", "out", "--use_cpu", "--bf16", "False", "--gradloc", "skip"]
    )
    assert settings_of(of_line.gradloc, "out").action.mode == "skip"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return make("stock", str(tmp_path_factory.mktemp("stock")))


KEEPING = settings_of({"evidence": {"checkpoint": "before_step"}}, "out")
REFUSED = {
    "gradloc.evidence.checkpoint must be off where the model is sharded at load": {
        "model.config.distributed_config": SimpleNamespace(dp_replicate_size=1)
    },
    "accelerate's distributed type must be one process, DDP or FSDP2": {
        "accelerator.distributed_type": DistributedType.DEEPSPEED
    },
    "fsdp_version must be 2": {"accelerator.distributed_type": DistributedType.FSDP, "accelerator.is_fsdp2": False},
    "optim must be an optimizer that steps once, after the backward": {"args.optim": "galore_adamw_layerwise"},
    "optim must be an optimizer that steps once,": {"args.optim": "adalomo"},
    "tensor parallelism must be 1": {"get_tp_size": lambda: 2},
    "distributed_config.dp_replicate_size must be 1": {
        "model.config.distributed_config": SimpleNamespace(dp_replicate_size=2)
    },
    "torch_compile must be false": {"args.torch_compile": True},
    "model must be a model of text": {"_is_vlm": True},
    "gradient_as_bucket_view must be false": {"accelerator.ddp_handler": SimpleNamespace(gradient_as_bucket_view=True)},
}


class Changed:
    """An object of which some attributes are others."""

    def __init__(self, of, changed):
        self._of, self._changed = of, changed

    def __getattr__(self, name):
        if name in self._changed:
            return self._changed[name]
        deeper = {
            key.removeprefix(f"{name}."): value for key, value in self._changed.items() if key.startswith(f"{name}.")
        }
        found = getattr(self._of, name)
        return Changed(found, deeper) if deeper else found


@pytest.mark.parametrize("said", REFUSED)
def test_a_run_that_no_search_could_look_into_is_refused(trainer, said):
    refuse(setup_of(trainer), GradLocConfig())
    with pytest.raises(ValueError) as caught:
        refuse(setup_of(Changed(trainer, REFUSED[said])), KEEPING)
    assert str(caught.value).startswith(said) and 'gradloc="off" trains without' in str(caught.value)


def test_weights_are_kept_of_a_model_that_is_whole_and_a_sharded_one_is_searched(trainer):
    refuse(setup_of(trainer), KEEPING)
    sharded = Changed(trainer, {"model.config.distributed_config": SimpleNamespace(dp_replicate_size=1)})
    refuse(setup_of(sharded), GradLocConfig())


def test_a_plan_has_the_tokens_of_a_micro_batch_at_their_longest():
    plan = config.plan_of({"per_device_train_batch_size": 4, "max_completion_length": 1024}, gpus=1, gpus_per_node=1)
    assert plan.load.tokens == 4 * (512 + 1024)


def test_attaching_to_something_else_is_refused():
    with pytest.raises(ValueError, match="takes a trainer of TRL's GRPO, RLOO, SFT or DPO, found a builtins.int"):
        attach(3)


def test_a_trl_that_has_changed_what_this_hangs_on_is_refused_by_name():
    config.check_trl()
    assert config.TRANSFORMERS == transformers.__version__
    with mock.patch.object(trl.GRPOTrainer, "_compute_loss", lambda self, batch: None):
        with pytest.raises(
            RuntimeError, match=r"trl:GRPOTrainer._compute_loss takes \(self, batch\), expected \(self, model"
        ):
            config.check_trl()
    with mock.patch.object(config, "TOUCHED", {"trl.trainer.utils:gone": None}):
        with pytest.raises(
            RuntimeError, match="trl.trainer.utils:gone is gone; pip install trl==1.16.0 transformers==5.23.0, or train"
        ):
            config.check_trl()


RLOO = {"normalize_advantages": False, "beta": 0.0}
ESTIMATORS = [
    ({"scale_rewards": "group"}, "grpo"),
    ({"scale_rewards": "none"}, "grpo_mean"),
    ({"scale_rewards": "batch"}, None),
    ({"scale_rewards": "group", "multi_objective_aggregation": "normalize_then_sum"}, None),
    (RLOO, "rloo"),
    ({**RLOO, "normalize_advantages": True}, None),
    ({**RLOO, "beta": 0.05}, None),
]


@pytest.mark.parametrize(("args", "estimator"), ESTIMATORS)
def test_the_record_has_an_estimator_where_the_advantages_are_plainly_its_own(args, estimator):
    assert group_of(SimpleNamespace(num_generations=4, **args)) == {"estimator": estimator, "rollouts": 4}
    assert group_of(SimpleNamespace()) == {}, "no group of rollouts"


def test_no_argument_of_trl_s_is_taken_for_a_misspelt_one():
    made = (GRPOConfig, trl.SFTConfig, trl.DPOConfig, trl.RLOOConfig, trl.ModelConfig, trl.ScriptArguments)
    assert config.misspelt({field.name for each in made for field in fields(each)}) == []

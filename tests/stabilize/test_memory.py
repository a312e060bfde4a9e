# SPDX-License-Identifier: Apache-2.0
"""What the trainer keeps of the stabilizers between updates and checkpoints."""

from gradloc.stabilize.config import LayerClipConfig, SkipStepConfig, StabilizeConfig
from gradloc.stabilize.memory import StabilizerMemory, build_memory


def test_there_is_none_while_all_are_off_and_a_clip_that_is_replaced_is_said(capsys):
    assert build_memory(StabilizeConfig(), "actor.grad_clip", 1.0) is None
    assert build_memory(StabilizeConfig(skip_step=SkipStepConfig(enable=True)), "actor.grad_clip", 1.0) is not None
    assert capsys.readouterr().out == ""
    clip = LayerClipConfig(rule="adagc", warmup=7)
    assert build_memory(StabilizeConfig(layer_clip=clip), "actor.grad_clip", 0.5) is not None
    assert "rule=adagc replaces the clip at actor.grad_clip=0.5 after 7 opt" in capsys.readouterr().out


def test_what_was_learned_goes_into_the_checkpoint_and_to_the_workers_once_after_a_resume():
    before, after = StabilizerMemory(), StabilizerMemory()
    assert before.state() is None
    before.after_update({"steps": 3})
    assert before.state() == {"steps": 3} and before.to_send is None
    after.load_state(before.state())
    assert after.to_send == {"steps": 3}
    after.after_update({"steps": 4})
    assert after.to_send is None and after.state() == {"steps": 4}

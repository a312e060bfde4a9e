# SPDX-License-Identifier: Apache-2.0
"""What pages say of verl's own code is read from that code, or tried on it."""

import inspect
from pathlib import Path
from unittest import mock

from tests.adapters.verl07.test_page import OBSERVE, read_when_resumed


def test_peers_wait_as_long_as_torch_has_them_wait():
    from verl.utils import distributed
    from verl.workers.engine_workers import TrainingWorker

    assert "torch's own for verl 0.9" in OBSERVE
    assert "initialize_global_process_group_ray(timeout_second=None)" in inspect.getsource(TrainingWorker.__init__)
    with (
        mock.patch("torch.distributed.is_initialized", lambda: False),
        mock.patch("torch.distributed.init_process_group") as made,
    ):
        distributed.initialize_global_process_group_ray(timeout_second=None)
    assert made.call_args.kwargs["timeout"] is None


def test_a_checkpoint_resumes_without_gradloc_as_verl_reads_its_own_files_alone():
    from verl.trainer.ppo.v1 import trainer_base

    read = read_when_resumed(Path(trainer_base.__file__))
    assert set(read) == {'"actor"', "str(Role.Critic)", '"data.pt"', '"transfer_queue"'}


def test_what_only_the_workers_know_is_refused_before_the_first_rollout():
    from gradloc.adapters.verl09 import trainer
    from verl.trainer import main_ppo
    from verl.trainer.ppo.v1 import trainer_base

    class Theirs:
        def on_init_end(self):
            assert not watch.called

    class Ours(trainer._Watched, Theirs):
        def __init__(self):
            self.gradloc = mock.Mock(is_in_update=True, analysis=None, critic=None)

    with mock.patch.object(trainer.QueueUpdate, "watch") as watch:
        Ours().on_init_end()
    watch.assert_called_once_with()
    assert "self.on_init_end()" in inspect.getsource(trainer_base.PPOTrainer.init)
    calls = inspect.getsource(main_ppo)
    assert 0 < calls.index("self.trainer.init()") < calls.index("self.trainer.fit(")

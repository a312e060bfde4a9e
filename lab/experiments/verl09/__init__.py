# SPDX-License-Identifier: Apache-2.0
"""What verl 0.9's real trainer needs on a machine with no GPU, through verl's own registries.

- `platform`  a machine without an accelerator; loaded in every process by `VERL_USE_EXTERNAL_MODULES`
- `engine`    what vLLM needs there, for `demo-vllm`
- `megatron`  what Megatron-Core needs there, for the tests and the demo
- `rollout`   generates, behind verl's agent loop; loaded with the demo's `fault` by `model.external_lib`
- `weights`   the trainer's weights, to rollouts in processes of their own
- `rows`      a batch of its queue, in an order that does not change from run to run, as what plants something sees it
- `explosion`  what `lab.experiments.explosion` plants, through that rollout and the trainer; loaded likewise
"""

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "lab.experiments.verl09.platform",
    # verl registers its FSDP engine for "cuda" and "npu" only. Under the names of an NVIDIA GPU, a run without
    # one takes the very entries of the registry that a run with one takes, GradLoc's included.
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_ENGINE_VENDOR": "nvidia",
    # A dozen processes import verl, which takes a while: no more of them, and not behind everything else.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TQ_NUM_THREADS": "2",
    # vLLM's, where it is the rollout: its threads on no cores of their own, and little room for keys and values.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""Environment variables of every process of such a run."""

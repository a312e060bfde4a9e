# SPDX-License-Identifier: Apache-2.0
"""Run verl 0.9's real trainer on a machine without a GPU, through verl's registries.

- `platform`  a machine without an accelerator; loaded in every process by `VERL_USE_EXTERNAL_MODULES`
- `engine`    fixes for vLLM, used by `demo-vllm`
- `megatron`  fixes for Megatron-Core, for the tests and the demo
- `rollout`   generates behind verl's agent loop; loaded with the demo's `fault` by `model.external_lib`
- `weights`   transfers the weights to rollouts in other processes
- `rows`      reads a batch of its queue, in a reproducible order
- `explosion`  plants `lab.experiments.explosion`; loaded by `model.external_lib`
"""

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "lab.experiments.verl09.platform",
    # verl registers its FSDP engine for "cuda" and "npu" only. With the names of an NVIDIA GPU, a run without one
    # uses the same entries of the registry, GradLoc's included.
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_ENGINE_VENDOR": "nvidia",
    # Importing verl takes long: start no more processes than needed, at normal priority.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TQ_NUM_THREADS": "2",
    # vLLM, if it is the rollout: do not bind threads to cores, and use a small KV cache.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""Environment variables of every process of such a run."""

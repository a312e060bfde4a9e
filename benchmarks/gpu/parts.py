# SPDX-License-Identifier: Apache-2.0
"""What else has to hold on a GPU: the read-out of a real model's head, no waiting for the device, two on one card."""

import subprocess
import sys
import time
import warnings
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.counter import PACKAGE, DeviceCounter
from benchmarks.gpu.cells import MODELS, Bench
from benchmarks.localization.memory import wait
from benchmarks.run import REPO
from gradloc.core.precise import _has_wide_product, precise_readout

_POSITIONS = 512


def head_cell(size: str, device: torch.device) -> dict[str, Any]:
    """A transformers model's head in bfloat16, read out precisely: its log-probs against float64's, and the price."""
    if find_spec("transformers") is None:
        return {"skipped": "transformers is not installed", "is_ok": None}
    from transformers import AutoModelForCausalLM, Qwen3Config

    of = MODELS[size]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=of.vocabulary,
        hidden_size=of.width,
        intermediate_size=3 * of.width,
        num_hidden_layers=2,
        num_attention_heads=of.heads,
        num_key_value_heads=of.heads,
        head_dim=of.width // of.heads,
        tie_word_embeddings=False,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        tokens = torch.randint(of.vocabulary, (1, _POSITIONS))
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_pre_hook(lambda head, inputs: seen.append(inputs[0]))

    def seconds(is_precise: bool) -> tuple[torch.Tensor, float]:
        with torch.no_grad(), precise_readout(model, torch.bfloat16 if is_precise else torch.float32):
            logits = model(tokens).logits
            started = time.perf_counter()
            for _ in range(3):
                model(tokens)
            wait(device)
            return logits, (time.perf_counter() - started) / 3

    rounded, plain = seconds(False)
    precise, dear = seconds(True)
    hidden, weight = seen[0][0], model.lm_head.weight
    labels = tokens[0, :, None].roll(-1, 0)
    wanted = (hidden.double() @ weight.double().T).log_softmax(-1).gather(-1, labels)
    found = [logits[0].double().log_softmax(-1).gather(-1, labels) for logits in (precise, rounded)]
    errors = [float((log_prob - wanted).abs().max()) for log_prob in found]
    return {
        "error": errors[0],
        "error_of_bfloat16": errors[1],
        "times_forward": dear / plain,
        "in_tensor_cores": _has_wide_product(hidden, weight),
        "is_ok": errors[0] < 1e-5 < errors[1],
    }


def syncs_cell(bench: Bench) -> dict[str, Any]:
    """Where a healthy update and a search wait for the device; a healthy update may wait nowhere in gradloc."""
    step, spike, _ = bench.spiked("three")
    bench.space.clear()
    healthy = _waits(bench.device, bench.update)
    step.train()
    searched = _waits(bench.device, lambda: bench.search(step, spike))
    bench.space.clear()
    return {"healthy": healthy, "search": searched, "is_ok": not any(place.startswith("gradloc/") for place in healthy)}


def _waits(device: torch.device, work: Any) -> dict[str, int]:
    """Lines of gradloc that wait for the device, and how often: by torch's own warnings, or by counting on a CPU."""
    if device.type != "cuda":
        with DeviceCounter() as counter:
            work()
        return {f"gradloc/{place.strip()}": count for place, count in counter.places.most_common()}
    found: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchronizing" in str(warning.message):
            name = warning.filename
            ours = name.startswith(PACKAGE)
            found[f"{'gradloc/' + name.removeprefix(PACKAGE) if ours else name}:{warning.lineno}"] += 1
    return dict(found.most_common())


def two_cell(device: torch.device, size: str, num_tokens: int, out: Path) -> dict[str, Any]:
    """The first part by two processes on this one device, over gloo: agreement, sharding and gathers are real."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "benchmarks.gpu", "--device", device.type, "--size", size, "--parts", "first"]
    command += ["--tokens", str(num_tokens), "--out", str(out / "two")]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=REPO, **silent) as ranks:
        try:
            _, errors = ranks.communicate(timeout=600)
        finally:
            ranks.terminate()  # torchrun ends its processes, too
    said = errors.strip().splitlines()[-20:] if ranks.returncode else []
    return {"exit_code": ranks.returncode, "said": said, "is_ok": ranks.returncode == 0}

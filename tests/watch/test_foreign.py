# SPDX-License-Identifier: Apache-2.0
"""nano-gpt's training loop, which nobody wrote for us: six changed lines, and its spike is localized."""

import difflib
import importlib.util
import inspect
import json
import sys

import pytest
import torch

from tests.watch.test_harmless import events_in

CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
OURS = (
    "-watch.log_probs(lambda: gradloc.token_log_probs(model(x)[0], y), y >= 0, y).mean() if watch else model(x, y)[1]"
)
WATCH = 'watch = gradloc.Watch(model, optimizer, config.log_file + ".d", "mask")'
CHANGES = {
    "import torch\n": "import torch\nimport gradloc\n",
    "    backward: bool,\n": "    backward: bool, watch=None,\n",
    "            logits, loss = model(x, y)\n": f"            loss = {OURS}\n",
    "            backward=True,\n": "            backward=True, watch=watch,\n",
    "    train_ds = iter(": f"    {WATCH}\n    train_ds = iter(",
    f"        norm = {CLIP}\n": "        norm = watch.clip_grad_norm_(1.0)\n",
}
"""The package's line, and ours in its place."""
VOCABULARY, STEPS, SPOILED = 64, 240, 230


@pytest.fixture
def nano():
    """The package's own module."""
    return pytest.importorskip("nano_gpt.trainer", exc_type=ImportError)


@pytest.fixture
def changed(nano, monkeypatch):
    """The package's module with our lines."""
    source = inspect.getsource(nano)
    ours = source
    for line, new in CHANGES.items():
        assert ours.count(line) == 1, line
        ours = ours.replace(line, new)
    added = [line for line in difflib.ndiff(source.splitlines(), ours.splitlines()) if line.startswith("+ ")]
    assert len(added) == 6
    spec = importlib.util.spec_from_loader("nano_gpt.changed", loader=None)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    exec(compile(ours, "changed.py", "exec"), vars(module))
    return module


def batches():
    """x and y (2, 16), which count; in one micro-batch of one step a label is another one."""
    generator = torch.Generator().manual_seed(0)
    for number in range(2 * STEPS):
        ids = torch.randint(0, VOCABULARY - 20, (2, 1), generator=generator) + torch.arange(17)
        x, y = ids[:, :-1], ids[:, 1:].clone()
        if number == 2 * SPOILED + 1:
            y[1, 5] = VOCABULARY - 1
        yield x, y


@pytest.mark.full
@pytest.mark.slow
def test_six_lines_localize_its_spike(nano, changed, tmp_path):
    torch.manual_seed(0)
    from nano_gpt.config import GPTConfig, TrainConfig

    class NoTokenizer:
        """The loop asks for none where it draws no samples."""

    config = GPTConfig(block_size=16, vocab_size=VOCABULARY, n_layer=2, n_head=2, n_embd=32)
    model = nano.GPT(config, NoTokenizer())
    train_config = TrainConfig(
        total_batch_size=64,
        micro_batch_size=2,
        sequence_length=16,
        max_lr=1e-2,
        warmup_steps=2,
        max_steps=STEPS,
        log_file=str(tmp_path / "log"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    changed.train(model, optimizer, changed.WorkerState("cpu"), train_config, batches())
    events = events_in(tmp_path / "log.d")
    (event,) = [event for event in events if event["step"]["global_step"] == SPOILED + 1]
    (culprit,) = event["culprits"]
    assert (culprit["row"], culprit["positions"], culprit["token_ids"]) == (3, [5], [VOCABULARY - 1])
    assert event["certificate"]["verdict"] == "explained" and event["action"]["taken"] == "mask"
    assert event["cause"]["label"] == "unexpected_token", json.dumps(event["cause"])

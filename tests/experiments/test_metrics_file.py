# SPDX-License-Identifier: Apache-2.0
"""verl's `file` logger, made to take what verl itself gives it."""

import json

import pytest

torch = pytest.importorskip("torch")


def test_a_step_with_torch_scalars_is_on_disk_at_once(verl, tmp_path, monkeypatch):
    import lab.experiments.metrics_file  # noqa: F401
    from verl.utils.tracking import FileLogger

    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    logger = FileLogger("project", "experiment")
    logger.log({"a": torch.tensor(3), "b": 0.5}, step=1)
    written = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert written == {"step": 1, "data": {"a": 3, "b": 0.5}}
    logger.finish()

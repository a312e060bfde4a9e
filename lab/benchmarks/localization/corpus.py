# SPDX-License-Identifier: Apache-2.0
"""Text and shortly trained models: Python's own standard library, present wherever Python is.

A random network's gradients are not those of a language model: its token probabilities are all
alike. A minute of training on real text gives the spread of probabilities that matters here.
"""

import os
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch

from lab.benchmarks.localization import pretrained
from tests.toy_model import SIZES, Decoder, build, log_prob_of

_PIECE = re.compile(r"[A-Za-z]+|[0-9]|\n *|[^A-Za-z0-9]")
_TRAIN_SHARE = 0.9
TRAIN_STEPS = {"XS": 400, "S": 500, "M": 40}


def text(vocabulary: int, max_pieces: int = 1_200_000) -> torch.Tensor:
    """The standard library's top-level modules as token ids: 0 unknown, then by rank."""
    pieces: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        pieces += _PIECE.findall(path.read_text(encoding="utf-8", errors="replace"))
        if len(pieces) > max_pieces:
            break
    counts = sorted(Counter(pieces).items(), key=lambda item: (-item[1], item[0]))
    ids = {piece: rank + 1 for rank, (piece, _) in enumerate(counts[: vocabulary - 1])}
    return torch.tensor([ids.get(piece, 0) for piece in pieces])


def split(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is trained on, and what the benchmark's sequences are cut from."""
    at = int(_TRAIN_SHARE * len(tokens))
    return tokens[:at], tokens[at:]


def trained(name: str, folder: Path, steps: int | None = None) -> Path:
    """The file with the weights of a model of this size, trained now or left by an earlier run in ``folder``."""
    steps = TRAIN_STEPS[name] if steps is None else steps
    path = folder / f"model-{name}-{steps}.pt"
    if path.exists():
        return path
    train, _ = split(text(SIZES[name].vocabulary))
    model = build(name)
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps)
        starts = torch.randint(len(train) - 129, (16,), generator=generator)
        rows = torch.stack([train[s : s + 129] for s in starts.tolist()])
        loss = -log_prob_of(model(rows[:, :-1], rows.shape[1] - 1), rows[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    folder.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}")
    torch.save({"weights": model.state_dict()}, scratch)
    os.replace(scratch, path)
    return path


def load(name: str, path: Path) -> Decoder | pretrained.Pretrained:
    """The trained model, unsharded, in float32."""
    if name == pretrained.NAME:
        return pretrained.Pretrained(path)
    model = build(name)
    model.load_state_dict(torch.load(path, weights_only=True)["weights"])
    return model

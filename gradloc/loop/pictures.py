# SPDX-License-Identifier: Apache-2.0
"""The pictures among a vision-language model's inputs: kept whole for a replay, drawn for the report.

What a processor made of a picture is what the model saw, and all that the driver has. Without the processor it is drawn
from the layouts that are common: patches of two frames, merged two by two (Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4V), and
plain pixels (LLaVA, Gemma, InternVL). Processors centre and scale each colour; here the values' own range is stretched,
so shades differ a little from the original.
"""

import hashlib
import io
import math
from collections.abc import Sequence
from typing import Any

import torch

from .batch import BatchView

_MAX_KEPT = 512 * 2**20
_MAX_DRAWN = 32 * 2**20
_SIDE = 768
_MERGED, _FRAMES, _COLORS = 2, 2, 3


def inputs_of(batch: BatchView, row: int) -> dict[str, Any]:
    """Return the multi-modal inputs of one row, by verl's names; empty for text."""
    by_row = batch.labels.get("multi_modal_inputs")
    return {} if by_row is None else by_row[row] or {}


def kept_inputs(batch: BatchView, rows: Sequence[int]) -> tuple[dict[str, torch.Tensor], str | None]:
    """Return the multi-modal inputs of these rows that a bundle keeps.

    Returns:
        ``multi_modal.<number of the row here>.<name>``, as they are; and why there are none, where there should be.
    """
    kept: dict[str, torch.Tensor] = {}
    size = 0
    for number, row in enumerate(rows):
        for name, value in inputs_of(batch, row).items():
            if value is None:
                continue
            if not isinstance(value, torch.Tensor):
                return {}, f"{name} among the multi-modal inputs is a {type(value).__name__}, and only tensors are kept"
            size += value.nbytes
            if size > _MAX_KEPT:
                return {}, f"the multi-modal inputs of its micro-batches take more than {_MAX_KEPT >> 20} MiB"
            kept[f"multi_modal.{number}.{name}"] = value.detach().cpu().clone()
    return kept, None


class Album:
    """The pictures of one event as PNG files; rollouts of one prompt share theirs."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        """Files by name."""

    def add(self, inputs: dict[str, Any]) -> tuple[tuple[str, ...] | None, str | None]:
        """Draw the pictures of one prompt.

        Returns:
            The names of their files, None for text; and a sentence where some or all are missing.
        """
        if not inputs:
            return None, None
        names: list[str] = []
        pictures = _pictures(inputs)
        for picture in pictures:
            content = _png(picture)
            name = f"picture-{hashlib.sha256(content).hexdigest()[:12]}.png"
            if name not in self.files and sum(map(len, self.files.values())) + len(content) > _MAX_DRAWN:
                return tuple(names), (
                    f"{len(pictures) - len(names)} of {len(pictures)} pictures are left out: those of one event may "
                    f"take {_MAX_DRAWN >> 20} MiB."
                )
            self.files[name] = content
            names.append(name)
        note = None if pictures else f"Its inputs ({', '.join(inputs)}) hold no picture in a layout that is known here."
        return tuple(names), note


def _pictures(inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the pictures that can be drawn: uint8 (height, width, 3) each, at most 768 pixels a side."""
    pixels, grid = inputs.get("pixel_values"), inputs.get("image_grid_thw")
    if not isinstance(pixels, torch.Tensor):
        return []
    if isinstance(grid, torch.Tensor) and pixels.dim() == 2:
        sizes = grid.prod(1).tolist()
        if sum(sizes) != len(pixels):
            return []
        parts = zip(pixels.split(sizes), grid.tolist(), strict=True)
        pictures = [_from_patches(patches, *shape) for patches, shape in parts]
        return [_drawn(picture) for picture in pictures if picture is not None]
    if pixels.dim() in (4, 5) and pixels.shape[-3] == _COLORS:
        return [_drawn(picture) for picture in pixels.flatten(0, -4)]
    return []


def _from_patches(patches: torch.Tensor, frames: int, height: int, width: int) -> torch.Tensor | None:
    """Return the first frame, (3, height, width) in pixels, of patches (frames * height * width, 3 * 2 * side * side)
    that come in blocks of two by two."""
    side = math.isqrt(patches.shape[1] // (_COLORS * _FRAMES))
    if _COLORS * _FRAMES * side**2 != patches.shape[1] or height % _MERGED or width % _MERGED:
        return None
    blocks = (height // _MERGED, width // _MERGED, _MERGED, _MERGED)
    first = patches.view(frames, *blocks, _COLORS, _FRAMES, side, side)[0, ..., 0, :, :]
    return first.permute(4, 0, 2, 5, 1, 3, 6).reshape(_COLORS, height * side, width * side)


def _drawn(picture: torch.Tensor) -> torch.Tensor:
    stride = max(1, math.ceil(max(picture.shape[1:]) / _SIDE))
    small = picture.detach().float().cpu()[:, ::stride, ::stride].nan_to_num(0.0, 0.0, 0.0)
    low, high = small.aminmax()
    return ((small - low) / (high - low).clamp(min=1e-6) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()


def _png(picture: torch.Tensor) -> bytes:
    """Encode uint8 (height, width, 3) as a PNG file."""
    from PIL import Image  # where there are pictures, their processor needs it, too

    file = io.BytesIO()
    Image.fromarray(picture.numpy()).save(file, "PNG")
    return file.getvalue()

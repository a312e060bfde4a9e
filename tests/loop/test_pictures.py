# SPDX-License-Identifier: Apache-2.0
"""Pictures out of what a processor made of them, and what is said where there are none."""

import io
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from gradloc.loop import pictures
from gradloc.loop.batch import BatchView
from gradloc.loop.pictures import Album, kept_inputs

COLORS = np.linspace(0, 255, 112, dtype=np.uint8)
DRAWING = np.stack(
    [np.tile(COLORS[:84, None], (1, 112)), np.tile(COLORS, (84, 1)), np.full((84, 112), 90, np.uint8)], 2
)


def drawn(inputs):
    album = Album()
    names, note = album.add(inputs)
    return [np.asarray(Image.open(io.BytesIO(album.files[name]))) for name in names], note


@pytest.mark.full
def test_patches_of_the_real_processor_become_the_picture_again():
    from transformers import Qwen2VLImageProcessor

    made = Qwen2VLImageProcessor(min_pixels=28, max_pixels=10**6)([Image.fromarray(DRAWING)] * 2, return_tensors="pt")
    found, note = drawn(dict(made))
    assert note is None and len(found) == 2 and found[0].shape == DRAWING.shape
    for channel in (0, 1):  # shades are stretched, nothing is moved
        assert np.corrcoef(found[0][..., channel].ravel(), DRAWING[..., channel].ravel())[0, 1] > 0.999


def test_plain_pixels_are_drawn_and_large_ones_made_smaller():
    pixels = torch.from_numpy(DRAWING).permute(2, 0, 1)[None].float().repeat_interleave(10, -1)
    (found,), note = drawn({"pixel_values": pixels})
    assert note is None and found.shape == (84 // 2, 1120 // 2, 3)


def test_shades_are_stretched_from_black_to_white():
    shades = torch.tensor([[-2.0, 0.0], [2.0, float("nan")]]).expand(1, 3, 2, 2)
    (found,), _ = drawn({"pixel_values": shades})
    assert found[..., 0].tolist() == [[0, 128], [255, 128]] and (found == found[..., :1]).all()
    (plain,), _ = drawn({"pixel_values": torch.full((1, 3, 2, 2), 7.0)})
    assert not plain.any(), "one shade is black"


@pytest.mark.parametrize(("width", "shown"), [(768, 768), (769, 385), (1537, 513)])
def test_at_most_768_pixels_a_side_are_drawn(width, shown):
    for shape, wanted in (((2, width), (2, shown)), ((width, 2), (shown, 2))):
        (found,), _ = drawn({"pixel_values": torch.rand(1, 3, *shape)})
        stride = -(-width // 768)
        assert found.shape == tuple(-(-size // stride) for size in shape) + (3,) and max(found.shape) == max(wanted)


def test_what_is_not_known_or_too_much_is_said():
    unknown = "Its inputs (audio_features) hold no picture in a layout that is known here."
    assert drawn({"audio_features": torch.ones(3)}) == ([], unknown)
    with mock.patch.object(pictures, "_MAX_DRAWN", 100):
        found, note = drawn({"pixel_values": torch.rand(2, 3, 64, 64)})
    assert not found and note.startswith("2 of 2 pictures are left out: those of one event may take")


def test_a_bundle_keeps_inputs_as_they_are_up_to_a_limit():
    given = [{}, {"pixel_values": torch.rand(4, 96), "image_grid_thw": torch.tensor([[1, 2, 2]]), "none": None}]
    batch = BatchView({}, {"multi_modal_inputs": given})
    kept, why = kept_inputs(batch, [1, 0, 1])
    assert why is None and set(kept) == {f"multi_modal.{row}.{name}" for row in (0, 2) for name in list(given[1])[:2]}
    assert torch.equal(kept["multi_modal.2.pixel_values"], given[1]["pixel_values"])
    with mock.patch.object(pictures, "_MAX_KEPT", sum(value.nbytes for value in kept.values())):
        assert kept_inputs(batch, [1, 0, 1])[1] is None, "as much as may be"
    with mock.patch.object(pictures, "_MAX_KEPT", 2**21):
        given[1]["pixel_values"] = torch.zeros(2**20)
        assert kept_inputs(batch, [1]) == ({}, "the multi-modal inputs of its micro-batches take more than 2 MiB")
    given[1]["sizes"] = [1]
    assert kept_inputs(batch, [1])[1] == "sizes among the multi-modal inputs is a list, and only tensors are kept"
    assert kept_inputs(BatchView({}, {}), [0]) == ({}, None)


def test_a_picture_of_next_to_no_contrast_is_still_drawn_from_black_to_white():
    drawn = pictures._drawn(torch.tensor([0.0, 1e-6]).expand(3, 1, 2))
    assert drawn.tolist() == [[[0, 0, 0], [255, 255, 255]]]

# SPDX-License-Identifier: Apache-2.0
"""The palette of the page and of every figure.

Orange and blue differ for every kind of colour vision, and no meaning rests on colour alone. ``spike`` marks what adds
to the gradient or is too large, ``calm`` what is usual or pulls the other way. Fills are shaded by transparency.
"""

from types import SimpleNamespace

# fmt: off
LIGHT = SimpleNamespace(
    paper="#fbfaf7", card="#ffffff", ink="#1d1f23", muted="#5d636d", line="#e3e1da", soft="#cfd3da",
    spike="#b8500a", calm="#1f64a8", good="#2b6a4d", warn="#a8760a", danger="#b3261e", violet="#6b5b95",
    spike_fill="#f08a24", calm_fill="#569ee6",
)
"""Colours of the light page and of every figure."""
DARK = SimpleNamespace(
    paper="#14161a", card="#1b1e23", ink="#e8e6e1", muted="#a2a8b3", line="#2e323a", soft="#444b57",
    spike="#f2a65a", calm="#7db8f0", good="#7fcaa3", warn="#e0b354", danger="#f08a80", violet="#b3a4dc",
    spike_fill="#b85808", calm_fill="#2868b0",
)
# fmt: on


def variables(palette: SimpleNamespace) -> str:
    """Return the palette as CSS custom properties; the fills as ``--spike-rgb: r g b``."""
    made = []
    for name, colour in vars(palette).items():
        if name.endswith("_fill"):
            parts = " ".join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))
            made.append(f"--{name.removesuffix('_fill')}-rgb: {parts};")
        else:
            made.append(f"--{name}: {colour};")
    return " ".join(made)

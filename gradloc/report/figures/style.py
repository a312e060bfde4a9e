# SPDX-License-Identifier: Apache-2.0
"""Styles matplotlib's figures, and makes their SVG fit for the page.

In the page, colours follow the theme, ids are unique, and there is no inline style, which the security policy forbids.
"""

import io
import re
import xml.etree.ElementTree as ET

from matplotlib.figure import Figure

from .palette import LIGHT

COLOURS = {colour: f"var(--{name})" for name, colour in vars(LIGHT).items() if not name.endswith("_fill")}
SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"
ET.register_namespace("", SVG)
ET.register_namespace("xlink", XLINK)


def dress(figure: Figure, title: str) -> None:
    """Give a finished figure its title, and its axes the common style with horizontal lines."""
    figure.suptitle(title, color=LIGHT.ink, fontsize=13)
    for axes in figure.axes:
        axes.title.set(fontsize=10.5, color=LIGHT.ink)
        axes.tick_params(labelsize=8.5, colors=LIGHT.muted)
        axes.yaxis.get_offset_text().set_fontsize(8)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set(fontsize=9, color=LIGHT.muted)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(LIGHT.line)
        if not axes.yaxis_inverted():  # a matrix, whose rows run down, has no heights
            axes.grid(axis="y", color=LIGHT.line, linewidth=0.6)
            axes.set_axisbelow(True)
        legend = axes.get_legend()
        for text in legend.get_texts() if legend else ():
            text.set_color(LIGHT.muted)


def draw(figure: Figure, **options) -> str:
    """Write the figure as SVG, the same bytes each time: no date, no random ids."""
    import matplotlib

    sink = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gradloc"}):
        figure.savefig(sink, format="svg", metadata={"Date": None}, **options)
    return sink.getvalue()


def to_svg(figure: Figure, name: str, title: str) -> str:
    """Convert a figure in LIGHT's colours to an ``<svg>`` element in the colours of the page's theme.

    ``name`` begins every id inside, and is unique on the page; ``title`` is for screen readers.
    """
    root = ET.fromstring(draw(figure, transparent=True).encode("utf-8"))
    _strip(root)
    for element in list(root.iter()):
        _rewrite(element, name)
    root.set("role", "img")
    root.set("aria-label", title)
    for key in ("height", "version"):
        root.attrib.pop(key, None)
    root.set("width", root.get("viewBox", "0 0 0 0").split()[2])
    return ET.tostring(root, encoding="unicode")


def _strip(root: ET.Element) -> None:
    """Remove metadata, matplotlib's page-wide style rule, and empty groups."""
    for parent in list(root.iter())[::-1]:
        for child in list(parent):
            is_empty = child.tag == f"{{{SVG}}}g" and not len(child)
            if is_empty or child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                parent.remove(child)


def _rewrite(element: ET.Element, name: str) -> None:
    """Turn inline style into attributes, prefix ids, and use the theme's colours."""
    for declaration in element.attrib.pop("style", "").split(";"):
        key, _, value = (part.strip() for part in declaration.partition(":"))
        if key == "font":
            size = re.search(r"([\d.]+)px", value)
            element.set("font-size", size[1] if size else "10")
            if "bold" in value or "700" in value:
                element.set("font-weight", "600")
        elif key:
            element.set(key, value)
    element.attrib.pop("font-family", None)  # the page's own
    for key, value in list(element.attrib.items()):
        if key == "id":
            element.set(key, f"{name}-{value}")
        elif key == f"{{{XLINK}}}href" and value.startswith("#"):
            element.set(key, f"#{name}-{value[1:]}")
        elif value.startswith("url(#"):
            element.set(key, f"url(#{name}-{value[5:]}")
        elif value in COLOURS:
            element.set(key, COLOURS[value])

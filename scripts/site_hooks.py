# SPDX-License-Identifier: Apache-2.0
"""Hooks for mkdocs, whose sources are also shown on a forge: a menu, and links to files outside of docs/.

The menu is docs/README.md: its headings, and the pages that its tables link. A link to a file of the repository
outside of docs/ leads to a copy of it in the site, under ``repo/``.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")


def _linked(path: str) -> Iterator[str]:
    """Return the files that a page links, from the repository's root, without URLs."""
    for _, target, _ in LINK.findall((ROOT / path).read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("mailto:"):
            yield _file(path, target)


def _file(page: str, target: str) -> str:
    """Return the file of a page's link; a folder means its README."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    return posixpath.join(path, "README.md") if (ROOT / path).is_dir() else path


def _place(path: str) -> str:
    """Return the path of a repository's file in the site's sources."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repo/{path}"


def _origin(place: str) -> str:
    """Return the repository's file for a path in the site's sources."""
    return place.removeprefix("repo/") if place.startswith("repo/") else f"docs/{place}"


def on_config(config: Any) -> Any:
    """Return the menu: the index's headings, with each page under the last heading that links it."""
    sections: dict[str, dict[str, str]] = {}
    for part in re.split(r"^## ", (ROOT / "docs/README.md").read_text(encoding="utf-8"), flags=re.M)[1:]:
        named = re.findall(r"\[([^]]+)" + LINK.pattern, part)
        pages = {_place(_file("docs/README.md", target)): name[0].upper() + name[1:] for name, _, target, _ in named}
        sections = {title: {p: n for p, n in earlier.items() if p not in pages} for title, earlier in sections.items()}
        sections[part.splitlines()[0]] = pages
    menu = [{title: [{name: page} for page, name in pages.items()]} for title, pages in sections.items()]
    config.nav = ["README.md", *menu, {"Change it": ["repo/CONTRIBUTING.md", "repo/examples/README.md"]}]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside of docs/ that pages link, and those that these link in turn."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()] + ["CONTRIBUTING.md"]
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or not (ROOT / path).is_file():
            continue
        seen.add(path)
        if not path.startswith("docs/"):
            files.append(File.generated(config, _place(path), abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            waiting += _linked(path)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite links to the paths in the site's sources."""
    place = page.file.src_uri

    def moved(link: re.Match[str]) -> str:
        start, target, end = link.groups()
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        there = _place(_file(_origin(place), target))
        return start + posixpath.relpath(there, posixpath.dirname(place) or ".") + end

    return LINK.sub(moved, markdown)

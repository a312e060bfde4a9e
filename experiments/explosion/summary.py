# SPDX-License-Identifier: Apache-2.0
"""Compares the runs of the explosion: a table, a plot, and a page with both.

    python -m experiments.explosion.summary SUITE_DIR

It writes `summary.md`, `summary.png` and `summary.html` beside the runs' folders.
"""

import argparse
import base64
import html
import sys
from pathlib import Path

from experiments import suite
from experiments.errors import ExperimentError
from experiments.explosion import plot, readings, table

TWIN = "healthy"
"""The arm that the others are compared with, seed by seed."""


def collect(folder: Path):
    """The readings of the runs that ended well, the twin of each, and the runs that did not.

    Raises:
        ExperimentError: if the folder is not a suite, or a run that ended well cannot be read.
    """
    cells = suite.read(folder)["cells"]
    well = [cell for cell in cells if cell["exit_code"] == 0]
    found = {cell["folder"]: readings.read(folder / cell["folder"], cell["folder"], cell["meaning"]) for cell in well}
    by_seed = {cell["seed"]: found[cell["folder"]] for cell in well if cell["arm"] == TWIN}
    twins = {cell["folder"]: by_seed[cell["seed"]] for cell in well if cell["seed"] in by_seed}
    return list(found.values()), twins, [c["folder"] for c in cells if c["exit_code"] != 0]


def page(cells: list[list[str]], picture: bytes, runs: list[readings.Reading], folder: Path) -> str:
    """One HTML file: table, plot, and each run's report, where something spiked in it."""

    def title(run):
        name, report = html.escape(run.name), f"{run.name}/report.html"
        return f'<a href="{html.escape(report)}">{name}</a>' if (folder / report).is_file() else name

    def line(tag, texts):
        return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>"

    body = "\n".join(line("td", row) for row in cells)
    links = "\n".join(f"<li>{title(run)}: {html.escape(run.meaning)}</li>" for run in runs)
    image = base64.b64encode(picture).decode()
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>The explosion, safeguard by safeguard</title>
<style>body {{ font: 15px/1.5 sans-serif; margin: 2em; max-width: 90em }}
table {{ border-collapse: collapse }}
td, th {{ border: 1px solid #ccc; padding: .2em .6em; text-align: left }}
pre {{ white-space: pre-wrap }} img {{ max-width: 100% }}</style>
<h1>The explosion, safeguard by safeguard</h1>
<table>{line("th", table.HEADER)}
{body}</table>
<pre>{html.escape(table.LEGEND)}</pre>
<img alt="Gradient norm, reward and distance from the healthy twin, step by step"
src="data:image/png;base64,{image}">
<ul>{links}</ul>
</html>
"""


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite_dir", type=Path)
    folder = parser.parse_args(argv).suite_dir
    try:
        runs, twins, failed = collect(folder)
        if not runs:
            raise ExperimentError(f"no run in {folder} ended well: there is nothing to compare.")
        cells = table.rows(runs, twins)
        picture = plot.draw(runs, twins)
    except ExperimentError as error:
        print(f"summary: {error}", file=sys.stderr)
        return error.exit_code
    print(f"\n{table.as_text(cells)}\n\n{table.LEGEND}")
    if failed:
        print(f"without {', '.join(failed)}, which did not end well")
    (folder / "summary.md").write_text(f"{table.as_markdown(cells)}\n", encoding="utf-8")
    (folder / "summary.png").write_bytes(picture)
    (folder / "summary.html").write_text(page(cells, picture, runs, folder), encoding="utf-8")
    print(f"page:    {folder / 'summary.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Send verdicts to each of verl's trackers through the client that verl's ``Tracking`` has opened.

``rl_insight`` takes numbers only: like every tracker it gets the ``gradloc/*`` metrics, and no verdict.
"""

import html
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..record import Event
from ..record.store import plain
from .lines import COLUMNS, table_rows

_VERDICT, _CULPRITS = "gradloc/verdict", "gradloc/culprits"


def _wandb(client: Any, events: list[Event], step: int) -> None:
    if client.run is None:
        return
    paragraphs = "".join(f"<p>{html.escape(_verdict(event))}</p>" for event in events)
    payload = _by_model(events, client.Html(paragraphs), client.Table(list(COLUMNS), table_rows(events)))
    # with its step given, the entry is joined with the step's metrics, which the trainer logs later
    client.log(payload, step=step)


def _tensorboard(client: Any, events: list[Event], step: int) -> None:
    for event in events:
        client.writer.add_text(_VERDICT, _escape_markdown(_verdict(event)), step)
    client.writer.flush()


def _swanlab(client: Any, events: list[Event], step: int) -> None:
    table = client.echarts.Table()
    rows = [["" if cell is None else cell for cell in row] for row in table_rows(events)]
    table.add(headers=list(COLUMNS), rows=rows)
    verdict = client.Text("\n".join(_verdict(event) for event in events))
    client.log(_by_model(events, verdict, table), step=step)


def _clearml(client: Any, events: list[Event], step: int) -> None:
    import clearml

    task = clearml.Task.current_task()
    if task is None:
        return
    reporter = task.get_logger()
    for event in events:
        reporter.report_text(f"gradloc: {_verdict(event)}")
    reporter.report_table(title="gradloc", series="culprits", iteration=step, table_plot=_data_frame(events))


def _trackio(client: Any, events: list[Event], step: int) -> None:
    trackio = _trackio_module(client)
    table = trackio.Table(dataframe=_data_frame(events))
    text = trackio.Markdown("\n\n".join(_escape_markdown(_verdict(event)) for event in events))
    trackio.log(_by_model(events, text, table), step=step)


def _file(client: Any, events: list[Event], step: int) -> None:
    culprits = [dict(zip(COLUMNS, plain(row), strict=True)) for row in table_rows(events)]
    client.log({_VERDICT: [_verdict(event) for event in events], _CULPRITS: culprits}, step)


SENDERS: dict[str, Callable[[Any, list[Event], int], None]] = {
    "wandb": _wandb,
    "vemlp_wandb": _wandb,
    "tensorboard": _tensorboard,
    "swanlab": _swanlab,
    "clearml": _clearml,
    "trackio": _trackio,
    "file": _file,
}
"""Functions of (client, events, global step) by name in ``trainer.logger``, as cheap as logging a step's metrics."""


# ---- slow uploads, from another thread


def slow_sender(name: str, uploads: bool) -> Callable[[list[Event]], None] | None:
    """Return a function that sends events to a tracker too slowly for the trainer's thread; None if none is needed.

    Call it on the run's own thread. MLflow sends each artifact in a request of its own, and its fluent functions know
    only the run of their thread.

    Args:
        name: the tracker's.
        uploads: whether the record, which has the text around culprits, goes with the verdict.
    """
    if name != "mlflow":
        return None
    import mlflow

    run = mlflow.active_run()
    return None if run is None else lambda events: _mlflow(mlflow.MlflowClient(), run.info.run_id, events, uploads)


def _mlflow(client: Any, run_id: str, events: list[Event], uploads: bool) -> None:
    for event in events:
        client.log_text(run_id, _verdict(event), f"gradloc/{event.event_id}/verdict.txt")
        if uploads:
            client.log_dict(run_id, plain(event), f"gradloc/{event.event_id}/event.json")
    rows = table_rows(events)
    if rows:
        columns = {name: [row[index] for row in rows] for index, name in enumerate(COLUMNS)}
        client.log_table(run_id, columns, "gradloc/culprits.json")


def upload_folder(client: Any, folder: Path) -> None:
    """Upload an event's folder as an artifact of the W&B run."""
    if client.run is None:
        return
    artifact = client.Artifact(f"gradloc-{client.run.id}-{folder.name}", type="gradloc-event")
    artifact.add_dir(str(folder))
    client.log_artifact(artifact)


def _wandb_alert(client: Any, title: str, text: str) -> None:
    if client.run is not None:
        client.alert(title=title, text=text)


def _trackio_alert(client: Any, title: str, text: str) -> None:
    _trackio_module(client).alert(title=title, text=text)


ALERTS: dict[str, Callable[[Any, str, str], None]] = {
    **dict.fromkeys(("wandb", "vemlp_wandb"), _wandb_alert),
    "trackio": _trackio_alert,
}
"""Functions of (client, title, text) for trackers that can alert."""


def _trackio_module(client: Any) -> Any:
    """Return trackio's module, which is verl 0.7's client and within verl 0.9's."""
    return getattr(client, "trackio", client)


def _data_frame(events: list[Event]) -> Any:
    """Return the table of the events' culprits, one row each."""
    import pandas as pd

    return pd.DataFrame(table_rows(events), columns=list(COLUMNS))


def _by_model(events: list[Event], verdict: Any, culprits: Any) -> dict[str, Any]:
    """Name both entries by model, for a tracker joins all entries of a step: a critic's are ``gradloc/critic_*``."""
    prefix = "gradloc/critic_" if events[0].model == "critic" else "gradloc/"
    return {f"{prefix}verdict": verdict, f"{prefix}culprits": culprits}


def _verdict(event: Event) -> str:
    return event.verdict or ""


def _escape_markdown(text: str) -> str:
    return "".join("\\" + char if char in "\\`*_{}[]()#+-.!|<>~$" else char for char in text)

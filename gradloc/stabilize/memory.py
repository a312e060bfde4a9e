# SPDX-License-Identifier: Apache-2.0
"""The trainer's part of the stabilizers: what they have learned goes into checkpoints, the workers have no file."""

from typing import Any

from .config import StabilizeConfig


def build_memory(settings: StabilizeConfig, clip_key: str, grad_clip: Any) -> "StabilizerMemory | None":
    """The memory of the actor's stabilizers, None while all are off; says which clip layer_clip stands in for.

    ``clip_key`` is the trainer's setting of the bound on the global norm.
    """
    if not settings.is_on:
        return None
    clip = settings.layer_clip
    if clip.rule != "off":  # also where a preset has chosen it: the user's own clip is not what bounds the step
        print(
            f"gradloc: gradloc.stabilize.layer_clip.rule={clip.rule} takes the place of the clip at "
            f"{clip_key}={grad_clip} after {clip.warmup} optimizer steps: each {clip.group} is clipped by its own "
            "history; rule=off keeps yours.",
            flush=True,
        )
    return StabilizerMemory()


class StabilizerMemory:
    """Keeps what the actor's stabilizers have learned."""

    def __init__(self) -> None:
        self._latest: dict[str, Any] | None = None
        self.to_send: dict[str, Any] | None = None
        """What the workers have to be told with the next update: on the first after a resume."""

    def after_update(self, learned: dict[str, Any] | None) -> None:
        """Take the state that the first process gave back; all have the same."""
        self._latest, self.to_send = learned, None

    def state(self) -> dict[str, Any] | None:
        """JSON-ready content, for the checkpoint; None before the first update."""
        return self._latest

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Take over what :meth:`state` gave."""
        self._latest = self.to_send = state

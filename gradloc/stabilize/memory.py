# SPDX-License-Identifier: Apache-2.0
"""The trainer's part of the stabilizers: it puts what they have learned into checkpoints, the workers have no file."""

from typing import Any

from .config import StabilizeConfig


class StabilizerMemory:
    """Holds the state of the actor's stabilizers; None before the first update."""

    def __init__(self) -> None:
        self._latest: dict[str, Any] | None = None
        self.to_send: dict[str, Any] | None = None
        """The state that the workers need with the first update after a resume."""

    def after_update(self, learned: dict[str, Any] | None) -> None:
        """Keep the first process's state; all have the same."""
        self._latest, self.to_send = learned, None

    def state(self) -> dict[str, Any] | None:
        """Return the content for the checkpoint, ready for JSON."""
        return self._latest

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Restore what :meth:`state` gave."""
        self._latest = self.to_send = state


def build_memory(settings: StabilizeConfig, clip_key: str, grad_clip: Any) -> StabilizerMemory | None:
    """Return the memory, or None while all stabilizers are off; says that layer_clip replaces the clip at
    ``clip_key``.
    """
    if not settings.is_on:
        return None
    clip = settings.layer_clip
    if clip.rule != "off":  # a preset may have chosen it, and then the user's own clip no longer bounds the step
        print(
            f"gradloc: gradloc.stabilize.layer_clip.rule={clip.rule} replaces the clip at {clip_key}={grad_clip} "
            f"after {clip.warmup} optimizer steps: each {clip.group} is clipped by its own history; rule=off keeps "
            "yours.",
            flush=True,
        )
    return StabilizerMemory()

# SPDX-License-Identifier: Apache-2.0
"""Validate the settings under ``actor_rollout_ref.actor.gradloc.stabilize`` when the run starts."""

from dataclasses import dataclass, field
from typing import ClassVar

from ..checks import POSITIVE, SWITCH, checked, integer, number, one_of, or_null, require, setting

_KEY = "actor_rollout_ref.actor.gradloc.stabilize"
_UPPER = or_null(
    number("", lambda value: value >= 1),
    "null (no bound) or a number of at least 1, the ratio of a policy that did not change",
)
_LOWER = or_null(
    number("", lambda value: 0 < value <= 1),
    "null (no bound) or in (0, 1], with 1 the ratio of a policy that did not change",
)


@dataclass(frozen=True)
class _RatioClipConfig:
    """Bounds on pi_theta / pi_rollout, and what happens outside of them."""

    block: ClassVar[str]

    mode: str = setting("off", one_of("off", "mask", "clamp"))
    """``mask``: outside of the bounds the weight is 0. ``clamp``: it is bound / ratio above, ratio / bound below."""
    upper: float | None = setting(None, _UPPER)
    """Largest ratio; null: no upper bound."""
    lower: float | None = setting(None, _LOWER)
    """Smallest ratio; null: no lower bound."""

    def check(self) -> None:
        """Check that there is a bound where one is asked for."""
        block = self.block
        require(
            self.mode == "off" or self.upper is not None or self.lower is not None,
            f"{_KEY}.{block}.upper",
            f"a number while {block}.mode={self.mode} and {block}.lower=null (there is no bound otherwise)",
            self.upper,
        )


@checked(f"{_KEY}.token_clip")
@dataclass(frozen=True)
class TokenClipConfig(_RatioClipConfig):
    """A bound on every token's pi_theta / pi_rollout."""

    block = "token_clip"
    upper: float | None = setting(5.0, _UPPER)


@checked(f"{_KEY}.seq_clip")
@dataclass(frozen=True)
class SeqClipConfig(_RatioClipConfig):
    """A bound on the geometric mean of a sequence's ratios: one ratio and one weight per sequence."""

    block = "seq_clip"
    upper: float | None = setting(1.1, _UPPER)


@checked(f"{_KEY}.layer_clip")
@dataclass(frozen=True)
class LayerClipConfig:
    """Clipping of each layer's gradient against that layer's own recent norms, in place of the global clip."""

    rule: str = setting("off", one_of("off", "adagc", "zscore"))
    """Clip each layer by its own recent norms instead of the global clip. ``adagc``: at a factor over the moving
    average of its clipped norms (arXiv 2502.11034). ``zscore``: at robust standard deviations above the median of its
    log-norms."""
    group: str = setting("layer", one_of("layer", "kind", "tensor"))
    """What is clipped together: a ``layer``, a ``kind`` of module, or each ``tensor``. FSDP1 needs
    ``fsdp_config.use_orig_params=true`` for the last two."""
    relative_factor: float = setting(2.0, number("a number of at least 1", lambda value: value >= 1))
    """``adagc``: how many times the moving average a norm may be."""
    beta: float = setting(0.98, number("in [0, 1)", lambda value: 0 <= value < 1))
    """``adagc``: weight of the past in the moving average."""
    warmup: int = setting(100, integer(2))
    """Optimizer steps with the global clip at ``grad_clip``, which start the statistics."""
    window: int = setting(128, integer(8))
    """``zscore``: optimizer steps of norms to remember."""
    num_deviations: float = setting(6.0, POSITIVE)
    """``zscore``: robust standard deviations that a log-norm may be above its median."""


@checked(f"{_KEY}.skip_step")
@dataclass(frozen=True)
class SkipStepConfig:
    """No optimizer step when its norm is many standard deviations above the last ones: OLMo-core's rule."""

    enable: bool = setting(False, SWITCH)
    """Skip a step whose norm is far above recent ones."""
    window: int = setting(128, integer(4))
    """Optimizer steps of norms to remember; half of them are needed first."""
    num_deviations: float = setting(6.0, POSITIVE)
    """Skip a step from this many standard deviations above the mean."""


@checked(_KEY)
@dataclass(frozen=True)
class StabilizeConfig:
    """Everything under ``actor.gradloc.stabilize``."""

    token_clip: TokenClipConfig = field(default_factory=TokenClipConfig)
    seq_clip: SeqClipConfig = field(default_factory=SeqClipConfig)
    layer_clip: LayerClipConfig = field(default_factory=LayerClipConfig)
    skip_step: SkipStepConfig = field(default_factory=SkipStepConfig)

    @property
    def weighs_tokens(self) -> bool:
        """Whether tokens are weighed by ratios, for which log-probs of the rollout are needed."""
        return self.token_clip.mode != "off" or self.seq_clip.mode != "off"

    @property
    def is_on(self) -> bool:
        """Whether any stabilizer is on."""
        return self.weighs_tokens or self.layer_clip.rule != "off" or self.skip_step.enable

# SPDX-License-Identifier: Apache-2.0
"""The settings under ``actor_rollout_ref.actor.gradloc.stabilize``, validated when the run starts."""

from dataclasses import dataclass, field

from ..checks import POSITIVE, SWITCH, closed, integer, number, one_of, or_null, require, setting

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

    mode: str = setting("off", one_of("off", "mask", "clamp"))
    """``off``; ``mask``: what is outside of the bounds gets no weight; ``clamp``: the weight bound / ratio above and
    ratio / bound below."""
    upper: float | None = setting(None, _UPPER)
    """Largest ratio, at least 1; null for no upper bound."""
    lower: float | None = setting(None, _LOWER)
    """Smallest ratio, in (0, 1]; null for no lower bound."""

    def check(self) -> None:
        """There is a bound where one is asked for."""
        key = "token_clip" if isinstance(self, TokenClipConfig) else "seq_clip"
        require(
            self.mode == "off" or self.upper is not None or self.lower is not None,
            f"{_KEY}.{key}.upper",
            f"a number while {key}.mode={self.mode} and {key}.lower=null (there is no bound otherwise)",
            self.upper,
        )


@closed(f"{_KEY}.token_clip")
@dataclass(frozen=True)
class TokenClipConfig(_RatioClipConfig):
    """A bound on every token's pi_theta / pi_rollout."""

    upper: float | None = setting(5.0, _UPPER)


@closed(f"{_KEY}.seq_clip")
@dataclass(frozen=True)
class SeqClipConfig(_RatioClipConfig):
    """A bound on the geometric mean of a sequence's ratios: one ratio and one weight per sequence."""

    upper: float | None = setting(1.1, _UPPER)


@closed(f"{_KEY}.layer_clip")
@dataclass(frozen=True)
class LayerClipConfig:
    """Clipping of each layer's gradient against that layer's own recent norms, in place of the global clip."""

    rule: str = setting("off", one_of("off", "adagc", "zscore"))
    """``off``; ``adagc``: a factor over the moving average of the layer's clipped norms (arXiv 2502.11034);
    ``zscore``: robust standard deviations over the median of its log-norms."""
    group: str = setting("layer", one_of("layer", "kind", "tensor"))
    """The group that one factor clips: a ``layer``, a ``kind`` of module, or each ``tensor`` alone."""
    relative_factor: float = setting(2.0, number("a number of at least 1", lambda value: value >= 1))
    """``adagc``: a norm may be this many times the moving average."""
    beta: float = setting(0.98, number("in [0, 1)", lambda value: 0 <= value < 1))
    """``adagc``: weight of the past in the moving average, in [0, 1)."""
    warmup: int = setting(100, integer(2))
    """Optimizer steps with verl's global clip at ``grad_clip``, from which the statistics start."""
    window: int = setting(128, integer(8))
    """``zscore``: optimizer steps whose norms are remembered."""
    num_deviations: float = setting(6.0, POSITIVE)
    """``zscore``: robust standard deviations of the log-norm above its median that a norm may have."""


@closed(f"{_KEY}.skip_step")
@dataclass(frozen=True)
class SkipStepConfig:
    """No optimizer step when its norm is many standard deviations above the last ones: OLMo-core's rule."""

    enable: bool = setting(False, SWITCH)
    """Whether to skip such steps."""
    window: int = setting(128, integer(4))
    """Optimizer steps whose norms are remembered; the rule needs half of them before it may skip."""
    num_deviations: float = setting(6.0, POSITIVE)
    """Standard deviations above the mean from which a step is skipped."""


@closed(_KEY)
@dataclass(frozen=True)
class StabilizeConfig:
    """Everything under ``actor.gradloc.stabilize``."""

    token_clip: TokenClipConfig = field(default_factory=TokenClipConfig)
    seq_clip: SeqClipConfig = field(default_factory=SeqClipConfig)
    layer_clip: LayerClipConfig = field(default_factory=LayerClipConfig)
    skip_step: SkipStepConfig = field(default_factory=SkipStepConfig)

    @property
    def weighs_tokens(self) -> bool:
        """Whether log-probs of the rollout are needed."""
        return self.token_clip.mode != "off" or self.seq_clip.mode != "off"

    @property
    def is_on(self) -> bool:
        """Whether anything of it is."""
        return self.weighs_tokens or self.layer_clip.rule != "off" or self.skip_step.enable

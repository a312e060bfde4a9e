# SPDX-License-Identifier: Apache-2.0
"""The settings under ``actor_rollout_ref.actor.gradloc.stabilize``, validated when the run starts."""

from dataclasses import dataclass, field
from typing import Any

from ..checks import closed, is_int, is_number, require

__all__ = ["LayerClipConfig", "SeqClipConfig", "SkipStepConfig", "StabilizeConfig", "TokenClipConfig"]

_KEY = "actor_rollout_ref.actor.gradloc.stabilize"
_MODES = ("off", "mask", "clamp")
_RULES = ("off", "adagc", "zscore")
_GROUPS = ("layer", "kind", "tensor")


def _require(ok: bool, key: str, expected: str, found: Any) -> None:
    require(ok, f"{_KEY}.{key}", expected, found)


def _without_yaml_booleans(config: Any, name: str) -> None:
    """YAML reads a bare ``off`` as false."""
    if getattr(config, name) is False:
        object.__setattr__(config, name, "off")


@dataclass(frozen=True)
class _RatioClipConfig:
    """Bounds on pi_theta / pi_rollout, and what happens outside of them."""

    mode: str
    upper: float | None
    lower: float | None

    def _check(self, key: str) -> None:
        _without_yaml_booleans(self, "mode")
        _require(self.mode in _MODES, f"{key}.mode", f"one of {', '.join(_MODES)}", self.mode)
        upper, lower = self.upper, self.lower
        _require(
            upper is None or (is_number(upper) and upper >= 1),
            f"{key}.upper",
            "null (no bound) or a number of at least 1, the ratio of a policy that did not change",
            upper,
        )
        _require(
            lower is None or (is_number(lower) and 0 < lower <= 1),
            f"{key}.lower",
            "null (no bound) or in (0, 1], with 1 the ratio of a policy that did not change",
            lower,
        )
        _require(
            self.mode == "off" or upper is not None or lower is not None,
            f"{key}.upper",
            f"a number while {key}.mode={self.mode} and {key}.lower=null (there is no bound otherwise)",
            upper,
        )


@closed(f"{_KEY}.token_clip")
@dataclass(frozen=True)
class TokenClipConfig(_RatioClipConfig):
    """A bound on every token's pi_theta / pi_rollout."""

    mode: str = "off"
    """``off``; ``mask``: tokens outside of the bounds get no weight; ``clamp``: the weight bound / ratio above and
    ratio / bound below."""
    upper: float | None = 5.0
    """Largest ratio, at least 1; null for no upper bound."""
    lower: float | None = None
    """Smallest ratio, in (0, 1]; null for no lower bound."""

    def __post_init__(self):
        self._check("token_clip")


@closed(f"{_KEY}.seq_clip")
@dataclass(frozen=True)
class SeqClipConfig(_RatioClipConfig):
    """A bound on the geometric mean of a sequence's ratios."""

    mode: str = "off"
    """As in ``token_clip``, with one ratio and one weight per sequence."""
    upper: float | None = 1.1
    """Largest mean ratio, at least 1; null for no upper bound."""
    lower: float | None = None
    """Smallest mean ratio, in (0, 1]; null for no lower bound."""

    def __post_init__(self):
        self._check("seq_clip")


@closed(f"{_KEY}.layer_clip")
@dataclass(frozen=True)
class LayerClipConfig:
    """Clipping of each layer's gradient against that layer's own recent norms, in place of the global clip."""

    rule: str = "off"
    """``off``; ``adagc``: a factor over the moving average of the layer's clipped norms (arXiv 2502.11034);
    ``zscore``: robust standard deviations over the median of its log-norms."""
    group: str = "layer"
    """What is clipped together: a ``layer``, a ``kind`` of module, or each ``tensor`` alone."""
    relative_factor: float = 2.0
    """``adagc``: a norm may be this many times the moving average."""
    beta: float = 0.98
    """``adagc``: weight of the past in the moving average, in [0, 1)."""
    warmup: int = 100
    """Optimizer steps with verl's global clip at ``grad_clip``, from which the statistics start."""
    window: int = 128
    """``zscore``: optimizer steps whose norms are remembered."""
    num_deviations: float = 6.0
    """``zscore``: robust standard deviations of the log-norm above its median that a norm may have."""

    def __post_init__(self):
        _without_yaml_booleans(self, "rule")
        _require(self.rule in _RULES, "layer_clip.rule", f"one of {', '.join(_RULES)}", self.rule)
        _require(self.group in _GROUPS, "layer_clip.group", f"one of {', '.join(_GROUPS)}", self.group)
        factor, beta = self.relative_factor, self.beta
        _require(is_number(factor) and factor >= 1, "layer_clip.relative_factor", "a number of at least 1", factor)
        _require(is_number(beta) and 0 <= beta < 1, "layer_clip.beta", "in [0, 1)", beta)
        for name, least in (("warmup", 2), ("window", 8)):
            value = getattr(self, name)
            _require(is_int(value, least), f"layer_clip.{name}", f"an integer of at least {least}", value)
        _require(
            is_number(self.num_deviations) and self.num_deviations > 0,
            "layer_clip.num_deviations",
            "a positive number",
            self.num_deviations,
        )


@closed(f"{_KEY}.skip_step")
@dataclass(frozen=True)
class SkipStepConfig:
    """No optimizer step when its norm is many standard deviations above the last ones: OLMo-core's rule."""

    enable: bool = False
    """Whether to skip such steps."""
    window: int = 128
    """Optimizer steps whose norms are remembered; the rule needs half of them before it may skip."""
    num_deviations: float = 6.0
    """Standard deviations above the mean from which a step is skipped."""

    def __post_init__(self):
        _require(isinstance(self.enable, bool), "skip_step.enable", "true or false", self.enable)
        _require(is_int(self.window, 4), "skip_step.window", "an integer of at least 4", self.window)
        _require(
            is_number(self.num_deviations) and self.num_deviations > 0,
            "skip_step.num_deviations",
            "a positive number",
            self.num_deviations,
        )


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

# SPDX-License-Identifier: Apache-2.0
"""The slow obvious versions: plain Python over lists, sharing no code with what they check."""

import math
from statistics import mean, median, variance


def global_clip(norms, grad_clip):
    """The one factor of torch's global clip, for every layer."""
    total = math.hypot(*norms.values())
    return dict.fromkeys(norms, min(1.0, grad_clip / (total + 1e-6)))


def adagc(steps, *, factor, beta, warmup, grad_clip):
    """Per step the factor of every layer. ``steps``: per step {layer: norm}, all above 0."""
    average, answers = {}, []
    for number, norms in enumerate(steps):
        if number < warmup:
            factors = global_clip(norms, grad_clip)
            for layer in norms:
                clipped = factors[layer] * norms[layer]
                average[layer] = clipped if layer not in average else min(average[layer], clipped)
        else:
            factors = {}
            for layer in norms:
                factors[layer] = min(1.0, factor * average[layer] / norms[layer])
                clipped = factors[layer] * norms[layer]
                average[layer] = beta * average[layer] + (1 - beta) * clipped
        answers.append(factors)
    return answers


def zscore(steps, *, window, num_deviations, warmup, grad_clip):
    """Per step the factor of every layer, from robust deviations of the log-norms taken."""
    kept, flagged, answers = {}, {}, []
    for number, norms in enumerate(steps):
        factors = global_clip(norms, grad_clip)
        for layer in norms:
            of_layer = kept.setdefault(layer, [])
            run = flagged.setdefault(layer, [])
            if number >= warmup:
                recent = of_layer[-window:]
                center = median(recent)
                sigma = max(1.4826 * median([abs(value - center) for value in recent]), 0.05)
                limit = math.exp(center + num_deviations * sigma)
                factors[layer] = min(1.0, limit / norms[layer])
            taken = math.log(factors[layer] * norms[layer])
            if number < warmup or factors[layer] == 1.0:
                of_layer.append(taken)
                run.clear()
                continue
            run.append(taken)
            if len(run) == 8:  # so many in a row: the level has moved
                kept[layer] = list(run)
                run.clear()
        answers.append(factors)
    return answers


def skip_step(norms, *, window, num_deviations):
    """Per norm whether its step is skipped: OLMo's rule, with the norms before it."""
    answers = []
    for number, value in enumerate(norms):
        before = [other for other in norms[:number] if math.isfinite(other)][-window:]
        if len(before) < window // 2 or not math.isfinite(value):
            answers.append(False)
            continue
        answers.append(value > mean(before) + num_deviations * math.sqrt(variance(before)))
    return answers


def token_weights(log_ratios, masks, *, level, mode, upper, lower):
    """One weight per token, from rows of log-ratios and 0/1 masks."""
    rows = []
    for log_ratio, mask in zip(log_ratios, masks, strict=True):
        counted = [value for value, is_counted in zip(log_ratio, mask, strict=True) if is_counted]
        of_row = mean(counted) if counted else 0.0
        row = []
        for value in log_ratio:
            ratio = math.exp(max(-20.0, min(20.0, of_row if level == "geometric" else value)))
            weight = 1.0
            if upper is not None and ratio > upper:
                weight = 0.0 if mode == "mask" else upper / ratio
            if lower is not None and ratio < lower:
                weight = 0.0 if mode == "mask" else ratio / lower
            row.append(weight)
        rows.append(row)
    return rows

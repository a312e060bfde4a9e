# SPDX-License-Identifier: Apache-2.0
"""Numbers as logs spell them, and what trainers call the metrics that the rules know by verl's names."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from sys import intern
from typing import Any

from ...record.files import NAME
from .recording import MAX, MEAN

STEPS = tuple(
    "global_step global_steps training/global_step train/global_step trainer/global_step global_iter global_iteration "
    "step train/step current_steps global_step/max_steps train_step training_step opt_step optimizer_step iteration "
    "iter it num_updates update n_updates total_train_updates training_iteration counters/updates env_step total_steps "
    "total_timesteps _step".split()
)
"""Names of a step, the surest first: a ``step`` may begin anew in each epoch, and W&B's ``_step`` counts calls of
its own."""

ALIASES = {
    "actor/entropy": "entropy entropy_loss mean_entropy_loss entropy_mean mean_entropy policy_entropy "
    "approx_entropy entropy_avg h h_pi",
    "actor/kl_loss": "kl kl_loss kl_mean kl_div mean_kl reference_kl",
    "actor/ppo_kl": "ppo_kl approx_kl approxkl_avg policy_approxkl_avg",
    "actor/pg_loss": "pg_loss policy_loss act_loss loss_policy_avg actor_loss loss lm_loss training_loss train_loss "
    "train_inner_loss crossentropyloss cross_entropy_loss ce_loss total_loss tot_loss loss_total loss_mean avg_loss "
    "loss_step lm_loss_value xent cost rmse_trn trl mse perplexity ppl",
    "critic/vf_loss": "vf_loss value_loss v_loss critic_loss value_function_loss mean_value_function_loss "
    "loss_value_avg",
    "actor/pg_clipfrac": "pg_clipfrac clip_ratio clip_ratio_region_mean clipfrac_avg policy_clipfrac_avg",
    "response_length/mean": "response_length response_len_mean response_length_mean completion_length "
    "completions_mean_length mean_generation_length mean_gen_tokens_per_sample",
    "response_length/clip_ratio": "completions_clipped_ratio truncated_ratio truncated_rate response_clip_ratio",
    "rollout/zero_variance_share": "frac_reward_zero_std",
    "rollout_corr/log_prob_abs_diff": "train_rollout_logprob_abs_diff sampling_sampling_logp_difference_mean "
    "logprob_abs_diff log_prob_abs_diff rollout_train_logprob_abs_diff rollout_logprobs_abs_diff",
    "rollout_corr/kl": "gen_kl_error generation_kl_error mismatch_kl mismatch_kl_mean correction_kl kl_sample_train_v1",
    "rollout_corr/k3_kl": "correction_k3_kl",
    "rollout_corr/chi2_token": "correction_chi2_token",
    "rollout_corr/rollout_is_mean": "sampling_importance_sampling_ratio_mean tis correction_is_weight_mean",
    "rollout_corr/rollout_is_eff_sample_size": "correction_ess",
}
"""verl's names, and what other trainers call the same, as :func:`_plain` spells it."""
REWARD = "critic/score/mean"
_REWARD_WORDS = {"reward", "rewards", "rew", "score", "scores"}
_OF_REWARD = {*"mean avg average total raw task all env ep episode episodic".split()}
"""Words that a reward's name may have next to one of these; any other says that it is a part or a spread of it."""
LOSS = "actor/pg_loss"
_SECOND = {"ppl", "perplexity", "mse"}
"""Names of what is trained for, next to which a loss may be logged."""
_LOSS = re.compile(
    r"(?:^|_)(?:(?:m?log)?loss(?:es)?|crossentropy|cross_entropy|nll|xent|trl|(?:info_?)?nce|bce|ce|neg_?elbo|nelbo|mse|mae|rmse|s?l1|smooth_?l1|huber|hinge|triplet|bpr)(?:_|$)|^l_(?!r)[a-z]"
    r"|^[dg]_(?:a|b|gan|l1|real|fake)$|^(?:cycle|idt)_[ab]$"  # pix2pix' and CycleGAN's
)
ADVERSARIAL = re.compile(
    r"(?i:gen|generator|disc?|discriminator)(?![a-z])|(?<![A-Za-z0-9])(?:[Ll]oss|err)?_?[DdGg](?![A-Za-z])"
)
"""In the name of a GAN's loss."""
_NO_LOSS = re.compile(
    r"(?<![a-z])(?:eval|val|valid|validation|test)|aux|(?<!cross)(?<!cross[_ -])entropy|"
    r"balanc|bbox|_cls|rpn|mask|scale|value|critic|z_loss|mtp"
)
"""Names of losses that belong to an evaluation or to one part of the model."""
_OF_DETECTION = re.compile(r"bbox|_cls|rpn|mask")
"""Parts of a detector's loss: where its sum is not logged, the first stands for it."""
_KNOWN = {alias: name for name, aliases in ALIASES.items() for alias in aliases.split()}
_PARTS = re.compile(
    r"^(?:train|training|metrics|optim|trainer|stats|rollout|actor|policy|objective|(?:pp|grp)o_actor(?:_update)?)_"
)
_WRAPPED = re.compile(
    r"\s*(?:(?P<call>[A-Za-z_][\w.]*\()\s*)?(?:\[\s*)?"  # tensor( np.float64( [
    r"(?P<value>[-+]?(?:[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?))"
    r"(?:\s*\])?(?(call)(?:,[^()]*)?\)?|(?:/[^()]*)?)\s*(?:(?:%|m?s|it/s|tokens/s|GiB|GB|x)\s*)?",
    re.IGNORECASE,
)
_DECIMALS = re.compile(r"\d\.(\d+)(?:[eE][-+]\d\d)?\s*$")
_LONGEST_NUMBER = 200
"""Characters of a number that is spelled as a call, with a unit or a total."""
_NORM = re.compile(
    r"grad(?:ient)?s?(?:l2|total|global|\d{1,3}|inf)*norm|gnorm|norm(?:of)?grad|gradientl2|gradl2|l2grad|\bgrdn\b"
)
_NEARLY_NORM = re.compile("norm|grad|gn|grdn")  # what each name of a norm holds: most others need no further look
_BARE_NORM = re.compile(r"(?:total|global|l2)?norm(?:l2|total)?|grad|gn(?:all|total|global|l2)?")
"""Whole names of norms that do not say "gradient"."""
_SETTING = re.compile(
    r"max_?grad_?norm|(?<!pre)(?<!pre[_-])clip_?grad_?norm|threshold|limit|finite|norm_?clip$|norm_?(?:std|var)$",
    re.IGNORECASE,
)
_PART = re.compile(
    r"after_?clip|post_?clip|(?<!un)clipped|critic|value|ref|disc|layer|encoder|decoder|embed|head|\.(?:weight|bias)"
    r"|[/._](?:\d+|[qkv])[/._]"
)
"""Words in the name of a norm of one part of the weights."""


def number(text: Any, is_decimal_comma: bool = False) -> float | None:
    """Return a number as a log spells it; None where it is none.

    >>> number("tensor(0.25, device='cuda:0')"), number("np.float64(1e-06)"), number("24.44s"), number(True)
    (0.25, 1e-06, 24.44, None)
    >>> number("1.234,5", is_decimal_comma=True), number("1,234.5"), number("5/100"), number("0,49"), number("info")
    (1234.5, 1234.5, 5.0, None, None)
    """
    if isinstance(text, bool):
        return None
    if is_decimal_comma and "," in text and text.rfind(".") < text.rfind(","):
        text = text.replace(".", "").replace(",", ".")
    try:
        return float(text)
    except (TypeError, ValueError, OverflowError):
        is_short = isinstance(text, str) and len(text) <= _LONGEST_NUMBER
        wrapped = _WRAPPED.fullmatch(text) if is_short else None
        return float(wrapped["value"].replace(",", "")) if wrapped else None


def may_lack_digits(text: str, above: Sequence[str]) -> bool:
    """Return whether the number at the end of a text that stops there may go on, by the same metric's numbers above.

    >>> may_lack_digits("0.481", ["0.402", "0.377", "0.9"]), may_lack_digits("90", ["0.402", "0.377", "0.9"])
    (False, True)
    """
    decimals = [len(number.strip().partition(".")[2]) for number in above]
    ends = _DECIMALS.search(text)  # of more decimals than eight an exponent may follow
    return not (ends and len(decimals) > 2 and 8 > len(ends[1]) >= max(decimals))


def numbers(data: Mapping[Any, Any], prefix: str = "", made: dict[str, float] | None = None) -> dict[str, float]:
    """Return the entries that are numbers, or spell one; of nested ones, those inside, added to ``made``.

    >>> numbers({"step": 7, "metrics": [{"name": "loss", "value": 2.0}]})
    {'step': 7.0, 'loss': 2.0}
    """
    made = {} if made is None else made
    for key, value in data.items():
        name = f"{prefix}{key}"
        if len(name) > NAME:
            continue
        if isinstance(value, Mapping):
            numbers(value, f"{name}/", made)
        elif (known := number(value)) is not None:
            made[intern(name)] = known
        elif isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
            for one in filter(None, map(one_value, value)):
                made |= one
    return made


def step_of(values: Mapping[str, float | None]) -> int | None:
    """Return the step that a row says it is of.

    >>> step_of({"loss": 0.1, "Global Iter": 7.0})
    7
    """
    name = step_name(values)
    return None if name is None else as_step(values[name])


def step_name(names: Collection[str]) -> str | None:
    """Return the name of the step among names, the surest; None where none is one.

    >>> step_name(["loss", "train step", "_step"]), step_name(["Iteration"]), step_name(["batch"])
    ('train step', 'Iteration', None)
    >>> step_name(["it", "lr"]), step_name(["opt_step", "loss"])
    ('it', 'opt_step')
    """
    found = next((name for name in STEPS if name in names), None)
    if found in (None, STEPS[-1]):
        plain = {_plain_step(name): name for name in names if len(name) < 24 and name != found}
        found = next((plain[name] for name in STEPS if name in plain), found)
    return found


@lru_cache(maxsize=4096)
def _plain_step(name: str) -> str:
    return re.sub(r"[\s.-]+", "_", name.lower()).strip('"_').removeprefix("train_").removeprefix("time/")


KEYS = tuple("metricname metric_name metric.name attribute_path metric key tag title name".split())
"""The fields that name a metric where each row holds one value, then the fields that qualify it."""
_MORE = tuple("variant series context metric.context runcontext subset split".split())
VALUES = tuple("value metricvalue metric_value metric.value float_value y".split())
_RUNS = tuple("run_id run.hash run_hash run_name run experiment_key experimentkey task".split())


def long_columns(names: Iterable[Any]) -> tuple[str, list[str], str | None] | None:
    """Return the fields of the value, of the metric's name and of the run's, where an entry or row holds one value.

    >>> long_columns(["task", "iter", "metric", "variant", "value"]), long_columns(["step", "loss", "name"])
    (('value', ['metric', 'variant'], 'task'), None)
    """
    plain = {str(name).strip().lower(): str(name) for name in names}
    value, key, run = (next((plain[name] for name in known if name in plain), None) for known in (VALUES, KEYS, _RUNS))
    if value is None or key is None:
        return None
    more = (plain[name] for name in plain if name in _MORE or name.startswith("metric.context."))  # the last are Aim's
    return value, [key, *more], run


def leaves(entry: Mapping[str, Any], depth: int = 4) -> dict[str, Any]:
    """Return the texts and numbers of an entry by their own names, wherever in it they are, the outermost first."""
    made = {name: value for name, value in entry.items() if isinstance(value, str | int | float)}
    for inner in entry.values() if depth else ():
        made = (leaves(inner, depth - 1) if isinstance(inner, Mapping) else {}) | made
    return made


def points(entry: Any, step: int | None = None, name: str = "", depth: int = 5) -> Iterator[tuple[int, str, float]]:
    """Yield step, metric and value of each point in an entry, whose step and name may be around it.

    >>> [*points({"path": ["train", "loss"], "values": [{"value": 2.0, "step": 1}, {"value": 1.5, "step": 2}]})]
    [(1, 'train/loss', 2.0), (2, 'train/loss', 1.5)]
    """
    if isinstance(entry, list):
        for each in entry if depth else ():
            yield from points(each, step, name, depth - 1)
    elif isinstance(entry, Mapping):
        own = step_of({key: known for key, value in entry.items() if (known := number(value)) is not None})
        step = step if own is None else own
        named = next((entry[key] for key in (*KEYS, "path") if key in entry), None)
        named = "/".join(map(str, named)) if isinstance(named, list) else named
        name = named if isinstance(named, str) and len(named) <= NAME else name
        value = next((number(entry[key]) for key in VALUES if key in entry), None)
        if one := one_value(entry):
            ((name, value),) = one.items()
        if value is not None and step is not None and name:
            yield step, intern(name), value
        for inner in entry.values() if depth else ():
            if isinstance(inner, Mapping | list):
                yield from points(inner, step, name, depth - 1)


def one_value(entry: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the one metric of such an entry; None where it is another kind."""
    found = long_columns(entry)
    if found is None or not isinstance(entry[found[1][0]], str):
        return None
    value, keys, _ = found
    known = number(entry[value])
    return {} if known is None else {"/".join(str(entry[key]) for key in keys if entry[key]): known}


def as_step(value: float | None) -> int | None:
    """Return a number as a step; None where it is none."""
    return int(value) if value is not None and abs(value) < 2**53 else None


@lru_cache(maxsize=4096)  # asked of the same few names in every row
def is_norm(name: str) -> bool:
    """Return whether a metric's name looks like a gradient norm, and not like a limit of one.

    >>> is_norm("Grad. Norm"), is_norm("train/global_gradient_norm"), is_norm("max_grad_norm"), is_norm("loss")
    (True, True, False, False)
    >>> is_norm("grad_2.0_norm_total"), is_norm("train/norm"), is_norm("layer norm"), is_norm("train/grad_l2")
    (True, True, False, True)
    """
    squeezed = re.sub(r"[^a-z0-9]", "", name.lower())
    if not _NEARLY_NORM.search(squeezed) or _SETTING.search(name):
        return False
    return bool(_NORM.search(squeezed) or _BARE_NORM.fullmatch(_plain(name).replace("_", "")))


def norm_of(counts: Mapping[str, int]) -> str | None:
    """Return the metric that holds the gradient norms: the actor's, else the one that looks like it; ``counts`` says
    how many values each metric has.

    None when no name looks like a gradient norm, or several do and none has twice the values of each other.

    >>> norm_of({"grad_2.0_norm/h.0.weight": 9, "grad_2.0_norm_total": 9}), norm_of({"norm": 4, "GradNorm": 1})
    ('grad_2.0_norm_total', 'norm')
    """
    norms = [name for name in counts if is_norm(name)]
    for known in (MAX, MEAN):
        if known in norms:
            return known
    stems = {_STATISTIC.sub("", name) for name in norms}
    if len(stems) == 1 and len(norms) > 1:  # grad_norm (mean) and grad_norm (max)
        norms = [name for name in norms if "max" in name.lower()] or norms
    norms = [name for name in norms if not _PART.search(name.lower())] or norms
    for is_surer in _SURER:
        surer = [name for name in norms if is_surer(name)]
        if surer and 2 * max(map(counts.get, surer)) > max(map(counts.get, norms)):
            norms = surer
    most = [name for name in norms if all(counts[name] >= 2 * counts[other] for other in norms if other != name)]
    return most[0] if len(most) == 1 else None


_STATISTIC = re.compile(r"\W*_?(?:max|mean|avg|min|median)\W*$", re.IGNORECASE)
_SURER = (
    lambda name: _plain(name) == "grad_norm",
    lambda name: "total" in name.lower() or "global" in name.lower(),
    lambda name: not re.search(r"\d", name),
    lambda name: not _BARE_NORM.fullmatch(_plain(name).replace("_", "")),
)
"""Tests that prefer some of several norms' names, unless these have less than half the values."""


def listed(names: Iterable[str], most: int = 12) -> str:
    """Return names in one line, the first ones."""
    names = [name for name in names if not name.startswith("_")]
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest if names else "none"


def is_training_loss(name: str) -> bool:
    """Return whether a metric is a loss of training, or of a part of the model.

    >>> is_training_loss("Mean value_function loss"), is_training_loss("eval/loss"), is_training_loss("loss_scale")
    (True, False, False)
    >>> is_training_loss("train/neg_elbo"), is_training_loss("elbow")
    (True, False)
    """
    plain = _plain(name)
    is_other = re.search(r"(?:^|_)(?:eval|val|valid|validation|test)_|^(?:eval|valid|test)|scale", plain) is not None
    return not is_other and (_LOSS.search(plain) is not None or plain == "value")


def is_gan_loss(name: str) -> bool:
    """Return whether a metric is a loss of a GAN's generator or discriminator, which may be called by its letter.

    >>> is_gan_loss("loss_D"), is_gan_loss("G"), is_gan_loss("D_acc"), is_gan_loss("loss")
    (True, True, False, False)
    """
    return ADVERSARIAL.search(name) is not None and (is_training_loss(name) or len(name) == 1)


def canonical(counts: Mapping[str, int]) -> dict[str, str]:
    """verl's name -> the name in the log, for the metrics that another trainer calls otherwise; ``counts`` says how
    many values each metric has.
    """
    most = max(counts.values(), default=0)

    def is_rare(name: str) -> bool:
        """Return whether it is logged as seldom as an evaluation."""
        return 4 * counts[name] < most

    own: dict[str, str] = {}
    # "raw" is before a group's mean is taken off; a perplexity may be infinite where the loss is not
    order = {
        name: (is_rare(name), "raw" not in name, _plain(name) in _SECOND, "ret" in name, len(name)) for name in counts
    }
    for name in sorted(counts, key=order.__getitem__):
        known = REWARD if is_reward(name) else _KNOWN.get(_plain(name))
        if known is not None and known not in counts and not re.match("eval|val(?!ue)|test", name):
            own.setdefault(known, name)
    if not {LOSS, REWARD} & {*own, *counts} and (goals := sorted(filter(_REWARD_OF_A_GOAL.fullmatch, counts))):
        own[REWARD] = goals[0]
    if (LOSS not in own or is_rare(own[LOSS])) and LOSS not in counts and "actor/loss" not in counts:
        losses = [name for name in counts if _LOSS.search(_plain(name)) and not _NO_LOSS.search(name.lower())]
        losses = losses or [name for name in counts if is_training_loss(name) and _OF_DETECTION.search(name.lower())]
        losses = losses or ([] if {LOSS, REWARD} & {*own, *counts} else _evaluated_too(counts))
        if losses:
            own[LOSS] = min(losses, key=lambda name: (is_rare(name), *_rank(name)))
    return own


def _evaluated_too(names: Iterable[str]) -> list[str]:
    """Return the names of training that an evaluation has as well and that are no score: a loop's own losses.

    >>> _evaluated_too(["recon", "val_recon", "train_acc", "val_acc", "lr"]), _evaluated_too(["train", "valid"])
    (['recon'], ['train'])
    """
    words = {name: _words(name) for name in names}
    evaluated = {frozenset(its - _EVALUATIONS - _TRAINING) for its in words.values() if its & _EVALUATIONS}
    own = {name: its - _TRAINING for name, its in words.items() if not its & _EVALUATIONS}
    return [name for name, its in own.items() if its in evaluated and not _NO_EVALUATED.search(name.lower())]


def evaluations_of(name: str, names: Iterable[str]) -> list[str]:
    """Return which of ``names`` is the evaluation of a metric of training; of none with its words alone, those of
    several sets of data.

    >>> evaluations_of("train/loss", ["lr", "eval/loss", "eval/code/loss"]), evaluations_of("recon", ["val_acc"])
    (['eval/loss'], [])
    >>> evaluations_of("loss", ["eval_code_loss", "eval_math_loss", "eval_math_accuracy"])
    ['eval_code_loss', 'eval_math_loss']
    """
    own = _words(name) - _TRAINING
    words = {other: _words(other) for other in names}
    rest = {other: its - _EVALUATIONS - _TRAINING for other, its in words.items() if its & _EVALUATIONS}
    return [other for other, its in rest.items() if its == own][:1] or [
        other for other, its in rest.items() if its > own
    ]


def _words(name: str) -> set[str]:
    return {*_plain(name).split("_")}


_TRAINING = {"train", "training"}
_EVALUATIONS = {*"eval evaluation val valid validation test dev".split()}
_NO_EVALUATED = re.compile(
    r"acc|auc|roc|f1|iou|dice|\bmap|bleu|rouge|score|rew|prec|recall|psnr|ssim|r2|success|time|sec|size|num|speed|epoch|step|iter|episode|count|sample|frame|total"
)
"""Words of metrics that grow as a model gets better, or say nothing of it."""


def _rank(name: str) -> tuple[bool, bool, int]:
    """Return how far a loss is from that of the whole model: the least is it."""
    words = {*_plain(name).split("_")}
    return not words & {"total", "task", "train", "overall", "main"}, bool(words & _ADDED), len(name)


_ADDED = {*"mae rmse mse l1 kd kl distill distillation reg regularization".split()}
_ADDED |= {*"recon mmd aux commit style perceptual adv disc smooth tv".split()}
"""Words of losses that are added to the model's own."""


_REWARD_OF_A_GOAL = re.compile(r"rewards?[_/](?:goal|task|agent|env|player)_?\d*", re.IGNORECASE)
"""One of several rewards, where a run has none of all."""


def is_reward(name: str) -> bool:
    """Return whether a metric is the mean reward.

    >>> [is_reward(name) for name in ("Total rewards mean", "return", "reward_std", "reward/format", "returns/mean")]
    [True, True, False, False, False]
    """
    words = _plain(name).split("_")
    rest = {word for word in words if word not in _REWARD_WORDS and not word.isdecimal()}  # mean 100 episode reward
    is_return = bool({"return", "ret"} & rest)
    return sum(word in _REWARD_WORDS for word in words) + is_return == 1 and rest - {"return", "ret"} <= _OF_REWARD


def _plain(name: str) -> str:
    """Return a metric's name in small letters, without what says that it is of training.

    >>> _plain("train/Grad. Norm"), _plain("rollout/raw_reward"), _plain("MeanRew")
    ('grad_norm', 'raw_reward', 'mean_rew')
    """
    words = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", name).lower()  # MeanRew
    return _PARTS.sub("", re.sub(r"[^a-z0-9]+", "_", words).strip("_"))

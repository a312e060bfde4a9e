# SPDX-License-Identifier: Apache-2.0
"""Events of every kind: every cause, verdict, action, trainer and number of culprits, shares of every worth."""

from gradloc.record import CAUSES
from tests.report.builder import UNTRUSTED, make_culprit, make_event
from tests.report.not_tokens import causes

STEP = 40
TRAINERS = ("verl 0.7.0", "verl 0.9.1", "trl 1.16.0")
NUMBERS = {
    "advantage_over_typical": 14577.6,
    "ratio_over_typical": 62.6,
    "jacobian_over_typical": 9.1,
    "kl_over_typical": 44.0,
    "is_weight_over_typical": 5.0,
    "error_over_typical": 5e4,
}
NOISY = {
    "closure": 0.95,
    "closure_error": 0.04,
    "is_trusted": True,
    "micro_batches": [[0.0, 0.01], [0.0, 0.0], [0.1, 0.84]],
}


def _event(**parts) -> dict:
    """An event of which parts are replaced, or where they are a dict are updated."""
    made = make_event(STEP)
    made["run"] = {"project": "all", "experiment": "kinds", "trainer": parts.pop("trainer", "verl 0.9.1")}
    for name, value in parts.items():
        is_changed = isinstance(value, dict) and isinstance(made.get(name), dict)
        made[name] = made[name] | value if is_changed else value
    return made


def _caused(label: str, **changes) -> dict:
    return make_culprit(cause={"label": label, "numbers": NUMBERS}, **changes)


def _many(count: int, **changes) -> list[dict]:
    return [make_culprit(3 + at, token=f" t{at}", share=0.9 / count, **changes) for at in range(count)]


def _sibling(reward: float) -> dict:
    return {"row": 1, "sequence_id": "3c0f:2", "reward": reward, "advantage": 0.8, "num_tokens": 9}


def kinds() -> dict[str, dict]:
    """An event's record by what is special about it."""
    inexact = {"is_exact": False, "share_error": 0.01}
    found = {f"cause {label}": _event(culprits=[_caused(label)]) for label in CAUSES}
    found |= {f"beside {name}": event | {"run": {"trainer": "verl 0.9.1"}} for name, event in causes().items()}
    found |= {f"made by {trainer}": _event(trainer=trainer) for trainer in TRAINERS}
    found["made by nobody knows"] = _event(run={"project": None, "experiment": None, "trainer": None})
    for verdict in ("undecided", "not_explained"):
        certificate = {"verdict": verdict, "reason": "the bound is wide", "norm_after": 61.3}
        found[verdict] = _event(certificate=certificate)
        found[f"{verdict}, several"] = _event(certificate=certificate, culprits=_many(3))
    for taken in ("mask", "skip", "abort"):
        found[f"taken {taken}"] = _event(action={"requested": taken, "taken": taken})
        found[f"taken {taken}, several"] = _event(action={"requested": taken, "taken": taken}, culprits=_many(2))
    found["mask became skip"] = _event(action={"requested": "mask", "taken": "skip", "reason": "too many tokens"})
    for shares, name in ((UNTRUSTED, "untrusted"), (NOISY, "noisy"), (None, "not measured")):
        found[f"shares {name}"] = _event(shares=shares)
        found[f"shares {name}, read off"] = _event(shares=shares, culprits=[make_culprit(**inexact)])
        found[f"shares {name}, several"] = _event(shares=shares, culprits=_many(3, **inexact))
    found["share over all"] = _event(culprits=[make_culprit(share=1.86)])
    found["share unknown"] = _event(culprits=[make_culprit(share=None)])
    found["share negative"] = _event(culprits=[make_culprit(share=1.2), make_culprit(5, share=-0.3)])
    for norm in ("NaN", "Infinity"):
        culprit = _caused("non_finite", share=None, grad_norm=norm)
        found[f"norm {norm}"] = _event(trigger={"grad_norm": norm, "kind": "non_finite"}, culprits=[culprit])
    for span, positions in (("segment", [3, 4, 5]), ("sequence", list(range(8)))):
        found[f"a {span}"] = _event(culprits=[make_culprit(span=span, positions=positions)])
    found["a token and a segment"] = _event(
        culprits=[make_culprit(), make_culprit(5, span="segment", positions=[5, 6])]
    )
    found["14 culprits"] = _event(culprits=[make_culprit(3, token=f" t{at}", rank=0, share=0.05) for at in range(14)])
    found["more culprits left"] = _event(
        certificate={"verdict": "not_explained", "norm_after": 61.3},
        search={"status": "max_culprits", "num_more": 4, "more_norm": 60.0},
    )
    found["critic"] = _event(model="critic", culprits=[_caused("value_outlier", value=0.2, value_target=9.0)])
    found["rehearsal"] = _event(trigger={"kind": "forced", "threshold": None}, certificate={"threshold": None})
    found["adaptive"] = _event(trigger={"kind": "adaptive"})
    found["a wide bound"] = _event(certificate={"norm_after": 1.38, "error_bound": 2.562})
    found["what is left unknown"] = _event(
        certificate={"norm_after": None, "verdict": "undecided", "reason": "it failed"}
    )
    found["clipped"] = _event(
        consequence={"grad_clip": 1.0, "clip_scale": 0.00134, "culprit_share": 0.75, "healthy_norm": 0.001}
    )
    found["odd reward"] = _event(culprits=[make_culprit(reward=90.0, siblings=[_sibling(1.0), _sibling(0.0)])])
    found["odd advantage"] = _event(culprits=[make_culprit(siblings=[_sibling(1.0), _sibling(0.0)])])
    found["never sampled"] = _event(culprits=[_caused("not_sampled", rollout_log_prob=0.0, log_prob=-12.0)])
    found["no text"] = _event(culprits=[make_culprit(tokens=None, text_before=None, text_after=None, prompt=None)])
    found["nothing, out of budget"] = _event(culprits=[], search={"status": "budget_exhausted"})
    for index, event in enumerate(found.values()):
        step = event["step"]["global_step"]
        event["event_id"], event["folder"] = f"kind{index:03d}-step{step}", f"events/kind{index:03d}"
    return found

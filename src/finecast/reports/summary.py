"""A report in sentences: the verdict, the ops that limit precision, the next faster plan.

Law: each sentence says only what the content has; one that cannot be said is left out. They
are for readers who know neither finecast nor the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from finecast.engines.exact import RELATIVE_ERROR
from finecast.measure.racing import WAITING_COUNTS
from finecast.naming import an, enumerated, excluding, number_of, percent, percents
from finecast.numbers.thresholds import MODELLED_GAIN, SAME_TIME
from finecast.planning.contributions import shared_rest
from finecast.plugin import title_of
from finecast.reports.base import expected_text

_MOST_DECISIONS: Final = 3
"""Decisions inside the model that are named."""
_MOST_EXCLUDED: Final = 3
"""Ops that are decided together and named in an option; a longer one is not read."""
_FAR_OFF: Final = 4.0
"""Predicted errors are told to be wrong from this factor on. Of 160 plans of real models all
were within 2.8 (``docs/prediction.md``)."""
_NEGLIGIBLE: Final = 1e-5
"""Relative errors below this are about those of fp32 itself, and count as this much."""
_FP32: Final = "fp32"
_INT8: Final = "int8"
_INT8_STEPS: Final = 2**8 - 1
_AS_GOOD: Final = {"size": "small", "memory": "small"}
"""What a better plan by an objective is, other than fast."""

_COUNTED: Final = {
    "throughput": ("calls_per_s", 1.0, "{now} calls a second are served instead of {was}"),
    "size": ("size_bytes", 1e6, "the model is {now} MB instead of {was}"),
    "memory": ("memory_bytes", 1e6, "{now} MB are in memory instead of {was}, as estimated"),
}
"""By objective what is counted: its name among the measurements, its unit, and the words."""


def summary_of(
    content: Mapping[str, Any],
    limiting: Sequence[Mapping[str, Any]],
    kept: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Sentences: ``verdict``, ``limits`` and ``kept`` with ops, ``next_faster``.

    Args:
        content: All else that is known of the plan.
        limiting: The units of ``content`` in reduced precision that cause most of the error.
        kept: The units in fp32 that would gain the most time in a lower format.
    """
    off = prediction_off(content["result"])
    heading = [_heading(content, limiting), *([f"But {off}."] if off else [])]
    return {
        "verdict": _verdict(content),
        "answers": _answers(content, limiting),
        "heading": " ".join(heading),
        "limits": [_named(content, unit, _limit) for unit in limiting if unit["ops"]],
        "kept_heading": _kept_heading(kept),
        "kept": [_named(content, unit, _gained) for unit in kept if unit["ops"]],
        "decisions": _decisions(content["result"]),
        "next_faster": next_faster(content["result"], content["plan"]["digest"])
        or _none_faster(content["result"]),
    }


def _decisions(found: Mapping[str, Any] | None) -> list[str]:
    """The decisions inside the model that change, a few ops, the largest shares first."""
    changed = [one["text"] for one in (found or {}).get("decisions", ()) if one["changed"]]
    return [f"{text}." for text in changed[:_MOST_DECISIONS]]


def _ops(content: Mapping[str, Any]) -> str:
    """How many ops have a lower format, and what the plan says of ports and a KV cache."""
    counts = content["plan"]["counts"]
    low = {label: count for label, count in counts.items() if label != _FP32}
    total = sum(counts.values())
    declared = "; ".join(content["plan"].get("declared", ()))
    named = f"in {' or '.join(low)}" if low else "in a lower format"
    ops = f"{sum(low.values())} of {number_of(total, 'op')} {named}"
    return f"{ops} ({declared})" if declared else ops


def _verdict(content: Mapping[str, Any]) -> str:
    result, ops = content["result"], _ops(content)
    if result is None or "baseline" not in result:
        told = "Its speed and accuracy are in the study of its run, which is not beside it."
        return f"This plan has {ops}. {told}"
    if result["verdict"] != "improved":
        return f"The model stays as it is: {result['why']}."
    before, after = result["baseline"], result["tuned"]
    told = f"modelled for {result['target']}" if result.get("target") else "measured"
    return (
        f"With {ops} a call takes {_ms(after['latency_ms'])} instead of"
        f" {_ms(before['latency_ms'])} (x{result['speedup']:.2f} as fast, {told}),"
        f" {_counted(result)}and {result['metric']}"
        f" {_kept(before['metric'], after['metric'])}."
    )


def _answers(content: Mapping[str, Any], limiting: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a person asks first, a sentence each.

    How much faster is it, what does it lose here and elsewhere, which ops cost that, and what
    is there to do next? Empty where no search is known.
    """
    result = content["result"]
    if result is None or "baseline" not in result:
        return []
    if result["verdict"] != "improved":
        return [_verdict(content), "Use the model given: no other one was written."]
    return [
        _speed(content, result),
        _loss(result),
        _costs(content, limiting),
        _next(content, limiting),
    ]


def _speed(content: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    before, after = result["baseline"], result["tuned"]
    engine = content["plan"]["engine"]
    where = f"modelled for {result['target']}" if result.get("target") else "measured"
    where += f" in {title_of(engine)}" if engine and not result.get("target") else ""
    return (
        f"A call takes {_ms(after['latency_ms'])} instead of {_ms(before['latency_ms'])}:"
        f" x{result['speedup']:.2f} as fast{_range(result)}, {where}, {_counted(result)}with"
        f" {_ops(content)}.{_waiting(result)}"
    )


def _waiting(result: Mapping[str, Any]) -> str:
    """That times are longer than calls take by themselves; empty if they are not."""
    notes = (result.get("conditions") or {}).get("timing_notes") or ()
    waited = any(WAITING_COUNTS in text for text in notes)
    if not waited:
        return ""
    return (
        " Other processes ran beside it: its milliseconds include waiting for them, its speed"
        " does not."
    )


def _range(result: Mapping[str, Any]) -> str:
    """Between which speeds that of single processes is."""
    speeds = result.get("speedups") or ()
    if len(speeds) < 2:
        return ""
    return f" ({min(speeds):.2f} to {max(speeds):.2f} in {len(speeds)} processes)"


def _loss(result: Mapping[str, Any]) -> str:
    was, now = result["baseline"]["metric"], result["tuned"]["metric"]
    samples = (result.get("conditions") or {}).get("samples")
    of = f" on your {number_of(samples, 'sample')}" if samples else ""
    here = f"Its {result['metric']}{of} {_kept(was, now)}"
    certificate, elsewhere = result.get("certificate"), result.get("elsewhere")
    if certificate:
        there = (
            f"new data of the same kind lose at most {_figure(certificate['bound'])}, at"
            f" {percent(certificate['confidence'])} confidence"
        )
    elif elsewhere:
        figures = (elsewhere[key] for key in ("metric", "loss", "deviation"))
        there = f"on new data of the same kind expect {expected_text(*figures)}"
    else:
        why = result.get("not_estimated")
        because = f", as {why}" if why else ""
        there = (
            f"what it loses on new data was not estimated{because}: --confidence guarantees a"
            " limit"
        )
    return f"{here}; {there}."


def _costs(content: Mapping[str, Any], limiting: Sequence[Mapping[str, Any]]) -> str:
    known = [one for one in limiting if one["ops"]]
    shares: list[str] = []
    for how, key in (("measured", "measured_share"), ("predicted", "share")):
        named = [
            f"{one[key]:.0%} from {content['ops'][_main_op(one)]['name']} ({one['type']})"
            for one in known
            if (one["measured_share"] is None) is (key == "share")
        ]
        shares += [f"{how} {enumerated(named)}"] if named else []
    if not shares:
        return _heading(content, limiting)
    low = [unit for unit in content["units"] if unit["type"] != _FP32]
    rest = shared_rest(
        one["share"] if one["measured_share"] is None else one["measured_share"] for one in low
    )
    shares += [rest] if rest else []
    return f"Where its squared output error comes from: {'; '.join(shares)}."


def _next(content: Mapping[str, Any], limiting: Sequence[Mapping[str, Any]]) -> str:
    result = content["result"]
    written = result.get("output")
    check = "write it by its save()"
    if written:
        check = "run it by the code below"
        if result.get("lock"):
            check = f"on the machine that will run it, call finecast verify {written}"
    costly = next((unit["ops"] for unit in limiting if unit["ops"]), [])
    more = "let finecast blame find the ops to keep in fp32"
    if costly:
        option = excluding([content["ops"][i]["name"] for i in costly])
        more = f"tune with {option if len(costly) <= _MOST_EXCLUDED else '--exclude'}"
        more += ", which keeps in fp32 what costs the most accuracy"
    faster = "see the plans that were tried"
    if not result.get("next_faster"):
        faster = "no plan that was considered is faster"
    return f"Next: {check}. If it loses too much, {more}; if too little is gained, {faster}."


def _counted(found: Mapping[str, Any]) -> str:
    """What the plan gains by an objective other than latency; empty if that was minimised."""
    before, after = found["baseline"], found["tuned"]
    key, unit, what = _COUNTED.get(found["objective"], ("", 1.0, ""))
    if before.get(key) is None or after.get(key) is None:
        return ""
    was, now = (f"{one[key] / unit:.3g}" for one in (before, after))
    return f"{what.format(now=now, was=was)} (x{found['gain']:.2f}), "


def _kept(before: float | None, after: float | None) -> str:
    was, now = _figure(before), _figure(after)
    if before is None:
        return f"is {now}"  # such as a ratio to the error of fp32, which has none
    return f"stays {now}" if was == now else f"is {now} instead of {was}"


def _heading(content: Mapping[str, Any], limiting: Sequence[Mapping[str, Any]]) -> str:
    if not limiting:
        if any(unit["error"] for unit in content["units"]):
            return "No op in reduced precision adds to the predicted error."
        reason = (
            "the errors of single ops do not add up to the plan's, as where rows are compared"
            " as a set, or were not predicted; finecast blame measures them"
            if content["units"]
            else "no search was kept with this plan"
        )
        return f"Which ops limit precision is not known: {reason}."
    ops = "op" if len(limiting) == 1 else f"{len(limiting)} ops"
    costs = "costs" if len(limiting) == 1 else "cost"
    return (
        f"The {ops} in reduced precision that {costs} the most accuracy, by the share of the"
        " squared error of the model's output:"
    )


def _kept_heading(kept: Sequence[Mapping[str, Any]]) -> str:
    if not kept:
        return ""
    ops = "op" if len(kept) == 1 else f"{len(kept)} ops"
    return f"The {ops} in fp32 that would gain the most time in a lower format:"


def _named(
    content: Mapping[str, Any],
    unit: Mapping[str, Any],
    text: Callable[[Mapping[str, Any], Mapping[str, Any]], str],
) -> dict[str, Any]:
    return {
        "op": _main_op(unit),
        "share": unit["share"],
        "measured_share": unit["measured_share"],
        "text": text(content, unit),
    }


def _main_op(unit: Mapping[str, Any]) -> int:
    """The op that a unit is named by."""
    main: int = unit["ops"][0] if unit["main"] is None else unit["main"]
    return main


def _what(content: Mapping[str, Any], unit: Mapping[str, Any]) -> str:
    first = content["ops"][_main_op(unit)]
    others = len(unit["ops"]) - 1
    with_it = f" (decided with {number_of(others, 'other op')})" if others else ""
    return f"{first['name']}, {an(first['op'])}{with_it},"


def _limit(content: Mapping[str, Any], unit: Mapping[str, Any]) -> str:
    """How one unit in reduced precision limits accuracy, and what is known of the cause."""
    own, errors, casts = unit["type"], unit["error"], unit["casts_ms"]
    gain = ""
    if unit["saved_ms"].get(own):
        gain = _gain(unit["saved_ms"][own], casts.get(own, 0.0))
    if unit["measured"] is None:
        before, after = percents(errors[own], errors[_FP32])
        share = f"{unit['share']:.0%} of the squared error"
        fall = f"In fp32 the error of the model's output is predicted to fall from {before}"
    else:
        before, after = percents(*unit["measured"])
        share = f"{unit['measured_share']:.0%} of the squared error"
        share += f" ({unit['share']:.0%} predicted)"
        fall = f"In fp32 the error of the model's output fell from {before}"
    return (
        f"{_what(content, unit)} is in {own}: {share}. {fall} to {after}.{gain}"
        f"{_cause(content, unit, own)}"
    )


def _gained(content: Mapping[str, Any], unit: Mapping[str, Any]) -> str:
    """What one unit in fp32 would gain in its fastest format, and what that would cost."""
    errors, (label, saved) = unit["error"], next(iter(unit["saved_ms"].items()))
    rise = "."
    if label in errors and _FP32 in errors:
        before, after = percents(errors[_FP32], errors[label])
        rise = (
            f", and raise the predicted error of the model's output from {before} to {after}."
            f"{_cause(content, unit, label)}"
        )
    return f"{_what(content, unit)} stays in fp32: {label} would save {_ms(saved)}{rise}"


def _gain(saved_ms: float, casts_ms: float) -> str:
    """What a format saves, as the sum of its kernel's time and that of its casts."""
    text = f" By the profile of kernels it saves {_ms(saved_ms)}"
    if casts_ms:
        casts = _ms(abs(casts_ms))
        casts = (
            f"less {casts} of casts"
            if casts_ms > 0
            else f"and its neighbours are spared casts of {casts}"
        )
        text += f": {_ms(saved_ms + casts_ms)} in its kernel, {casts}"
    return f"{text}."


def _cause(content: Mapping[str, Any], unit: Mapping[str, Any], label: str) -> str:
    """What is known of the cause of a unit's error in a format, in sentences."""
    alone = unit["alone"].get(label)
    if not alone or not any(alone.values()):
        return " Only the size of the error is known, not its cause."
    activations, weights = _share(alone["activations"]), _share(alone["weights"])
    return (
        f" If this alone were in {label}, the output would err by {activations} for its"
        f" activations and by {weights} for"
        f" {_whose(content, unit)}.{_range_of_input(content, unit, label)}"
    )


def _whose(content: Mapping[str, Any], unit: Mapping[str, Any]) -> str:
    """Whose weights a unit's are: an op that a unit is named by may have none of its own."""
    weighted = {
        i
        for i in unit["ops"]
        for v in content["ops"][i].get("inputs", ())
        if content["values"][v]["from"] == "constant"
    }
    own = not weighted or _main_op(unit) in weighted
    return "its weights" if own else "the weights decided with it"


def _range_of_input(content: Mapping[str, Any], unit: Mapping[str, Any], label: str) -> str:
    """How many numbers of the first input that was observed become zero in a format."""
    main = content["ops"][_main_op(unit)]
    values = (content["values"][i] for i in main.get("inputs", ()))
    seen = [v for v in values if v["from"] != "constant" and v.get("facts")]
    if not seen:
        return ""
    facts = seen[0]["facts"]
    low, high = (min(facts["lowest"], 0.0), max(facts["highest"], 0.0))
    limits = {name: fmt["to_zero_up_to"] for name, fmt in content["formats"].items()}
    limits[_INT8] = (high - low) / _INT8_STEPS / 2
    if label not in limits or not facts["count"] or not math.isfinite(limits[label]):
        return ""
    binades = enumerate(facts["binades"], start=facts["first"] + 1)
    lost = sum(n for top, n in binades if 2.0**top <= limits[label])
    step = f" with a step of {2 * limits[label]:.3g}" if label == _INT8 else ""
    zero = (
        f": {_share(lost / facts['count'])} of its numbers, or more, are too small and become"
    )
    return (
        f" Its input '{seen[0]['name']}' is in {facts['lowest']:.3g} to {facts['highest']:.3g}"
        + (f"{zero} zero in {label}{step}." if lost else ".")
    )


# Why a plan with a faster median may not be chosen.
_EQUALLY_FAST: Final = (
    "of plans whose times are less than 3% apart, or not known better than that, the more"
    " accurate one is chosen"
)


def prediction_off(found: Mapping[str, Any] | None) -> str:
    """That a plan's output error is far from the predicted one; empty where it is not.

    Args:
        found: What ``tune`` found, as ``--json`` prints it; None if nothing was searched.
    """
    errors = (found or {}).get("relative_error") or {}
    if not errors.get("outputs") or not _is_relative(errors):
        return ""
    both = (errors["predicted"], errors["measured"])
    predicted, measured = (math.nan if error is None else error for error in both)
    if not math.isfinite(predicted + measured):
        return ""
    times = max(measured, _NEGLIGIBLE) / max(predicted, _NEGLIGIBLE)
    if max(times, 1 / times) < _FAR_OFF:
        return ""
    how = f"{times:.3g} times" if times > 1 else f"1/{1 / times:.3g} of"
    return (
        f"the output error is {how} the predicted one: errors of single ops do not add up in"
        " this model, and those predicted for other plans may be as far off"
    )


def _is_relative(errors: Mapping[str, Any]) -> bool:
    """Whether measured errors are relative ones, as those that are predicted of roundings."""
    return errors.get("figure", RELATIVE_ERROR) == RELATIVE_ERROR


def next_faster(found: Mapping[str, Any] | None, digest: str) -> str:
    """How much faster the next faster plan was, in the same races, and what it would cost.

    Args:
        found: What ``tune`` found, as ``--json`` prints it; None if nothing was searched.
        digest: The plan that was chosen.
    """
    one = None if found is None else found.get("next_faster")
    if found is None or one is None:
        return ""
    own = next((c for c in found["candidates"] if c["plan"] == digest), None)
    # The last race takes longer and is more precise than the first one of all plans.
    last = _times_as_good(one.get("final_benchmark"), own and own.get("final_benchmark"))
    times = last or _times_as_good(one, own)
    predicted = _predicted(one, own)
    if times and times < MODELLED_GAIN:
        return ""  # by the races it is as fast, whatever was predicted
    same = MODELLED_GAIN if found.get("target") else SAME_TIME
    if not times and predicted and predicted < same:
        return ""
    good, chosen = f"as {_AS_GOOD.get(found['objective'], 'fast')}", "as the chosen one"
    how = "predicted to be faster"
    if times:
        how = f"x{times:.2f} {good} {chosen}"
        how += f" ({_EQUALLY_FAST})" if last else ""
    elif one.get("gain"):
        how = f"x{one['gain']:.2f} {good} as {_FP32}"
    elif predicted:
        how = f"predicted to be x{predicted:.2f} {good} {chosen}"
    measured = (one.get("measured") or {}).get("relative_error")
    error = f"; its output error is {'' if measured else 'predicted as '}"
    error += _share(one["predicted"]["relative_error"] if measured is None else measured)
    error = error if _is_relative(found.get("relative_error") or {}) else ""
    conditions = found.get("conditions") or {}
    scored = f"it scored {_figure(one['metric'])}"
    side = "below" if conditions.get("higher_is_better", True) else "above"
    missed = f"{scored}, {side} {accuracy_asked(found)}"
    if kept_here(one["metric"], conditions):
        missed = f"{scored} on these data, within {accuracy_asked(found)}, but "
        confidence = conditions.get("confidence")
        missed += (
            f"could not be certified at {percent(confidence)} confidence"
            if confidence
            else "is expected to lose more on new data"
        )
    known = {
        None: f"it was not evaluated on all data{error}",
        True: f"{scored}, within {accuracy_asked(found)}, too{error}",
        False: missed,
    }[one["passed"]]
    return f"The next faster plan, {one['name']}, was {how}: {known}."


def _none_faster(found: Mapping[str, Any] | None) -> str:
    """That the chosen plan is the fastest one; empty if nothing was chosen."""
    if found is None or found["verdict"] != "improved" or not found["candidates"]:
        return ""
    plans = number_of(len(found["candidates"]), "plan")
    return f"There is no next faster plan: this one is the best of {plans} considered."


def _predicted(one: Mapping[str, Any], own: Mapping[str, Any] | None) -> float | None:
    """How many times as good as the chosen plan another is predicted to be, if it is known."""
    costs = [
        (c["predicted"].get("ms") or c["predicted"].get("bytes")) if c else None
        for c in (own, one)
    ]
    return costs[0] / costs[1] if costs[0] and costs[1] else None


def _times_as_good(
    one: Mapping[str, Any] | None, own: Mapping[str, Any] | None
) -> float | None:
    """How many times as good as the chosen plan another was; None if not in one race."""
    both = one and own and one.get("gain") and own.get("gain")
    return one["gain"] / own["gain"] if one and own and both else None


def kept_here(metric: float | None, conditions: Mapping[str, Any]) -> bool:
    """Whether a plan that did not pass meets the limit on the data given.

    It then lacks a certificate, where one was asked for, or is expected to lose more on other
    data.

    Args:
        metric: Its metric on all data; None if that is not known.
        conditions: Those of the search: ``target_metric``.
    """
    least = conditions.get("target_metric")
    if metric is None or least is None:
        return False
    return metric >= least if conditions.get("higher_is_better", True) else metric <= least


def accuracy_asked(found: Mapping[str, Any]) -> str:
    """The criterion in words."""
    conditions = found.get("conditions") or {}
    least = conditions.get("target_metric")
    if least is None:
        return "your limit"
    side = ">=" if conditions.get("higher_is_better", True) else "<="
    return f"your limit ({found['metric']} {side} {_figure(least)})"


def _share(value: float | None) -> str:
    return "an unknown amount" if value is None else percent(value)


def _figure(value: float | None) -> str:
    return "not known" if value is None else f"{value:.6g}"


def _ms(value: float | None) -> str:
    if value is None:
        return "an unknown time"
    if value >= 1e3:
        return f"{value / 1e3:.3g} s"
    return f"{value:.3g} ms" if value >= 1 else f"{1e3 * value:.3g} us"

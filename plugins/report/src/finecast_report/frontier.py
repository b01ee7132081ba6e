"""The frontier of a search as a picture: speed against error, with every plan that was tried.

Law: the picture is drawn from what ``tune --json`` prints alone, so that one drawn from a file
of earlier is the same. It is one SVG without scripts and without a request to anywhere; what
comes from a model is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from finecast.reports import kept_here
from finecast.terminal import safe

_WIDTH: Final = 720
_HEIGHT: Final = 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 56, 52
_STYLE: Final = """
svg { background: #fff; font: 13px system-ui, sans-serif; }
text { fill: #333; } .title { font-size: 15px; font-weight: 600; }
.grid { stroke: #e3e3e3; } .predicted { fill: none; stroke: #888; stroke-dasharray: 4 3; }
.timed { fill: #7a8aa0; } .passed { fill: #1a7f37; } .failed, .uncertified { fill: #c62f2f; }
.chosen { fill: none; stroke: #1a7f37; stroke-width: 2; }
.anchor { stroke: #b26a00; stroke-dasharray: 2 2; }
@media (prefers-color-scheme: dark) {
  svg { background: #15181d; } text { fill: #d8dce2; } .grid { stroke: #2c323b; }
  .passed { fill: #4cc264; } .chosen { stroke: #4cc264; }
  .failed, .uncertified { fill: #ff7b72; }
  .anchor { stroke: #e3a34a; }
}"""
_KINDS: Final = {
    "timed": "not tried on all data",
    "passed": "keeps the accuracy on all data",
    "failed": "misses it",
    "uncertified": "is not certified",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotPoint:
    """A plan in the picture.

    Attributes:
        error: Relative output error: measured, or predicted where the plan was not run.
        speed: How many times as fast as fp32.
        kind: What is known of the plan: a key of the legend.
        name: What the plan is called.
    """

    error: float
    speed: float
    kind: str
    name: str


def points_of(found: Mapping[str, Any]) -> list[PlotPoint]:
    """The plans that were timed, of what ``tune --json`` prints."""
    baseline, conditions = found["baseline"]["latency_ms"], found.get("conditions") or {}
    scale = _last_over_first(found)
    points = [PlotPoint(error=0.0, speed=1.0, kind="passed", name="fp32")]
    for plan in found["candidates"]:
        errors = (plan["measured"]["relative_error"], plan["predicted"]["relative_error"])
        error = next((e for e in errors if e is not None), None)
        last = plan.get("final_benchmark")
        latency_ms = last["latency_ms"] if last else scale * (plan["latency_ms"] or 0.0)
        if latency_ms and error is not None:
            kind = {None: "timed", True: "passed", False: "failed"}[plan["passed"]]
            proves = kind == "failed" and conditions.get("confidence")
            if proves and kept_here(plan.get("metric"), conditions):
                kind = "uncertified"
            speed = baseline / latency_ms
            points.append(PlotPoint(error=error, speed=speed, kind=kind, name=plan["name"]))
    return points


def _last_over_first(found: Mapping[str, Any]) -> float:
    """The chosen plan's time in the last race over that in the first; 1 if not in both.

    Times of other plans in the first race are multiplied by it: what two races say of one plan
    differs by some percent.
    """
    for plan in found["candidates"]:
        if not plan["changes"] and plan.get("final_benchmark") and plan["latency_ms"]:
            ratio: float = plan["final_benchmark"]["latency_ms"] / plan["latency_ms"]
            return ratio
    return 1.0


def baselines_of(found: Mapping[str, Any]) -> list[tuple[str, float]]:
    """What the engine lowers by itself: name and speed. Its output error is not measured."""
    baseline = found["baseline"]["latency_ms"]
    return [
        (a["name"], baseline / a["latency_ms"]) for a in found["baselines"] if a["latency_ms"]
    ]


def predicted_of(found: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Error and speed of each step of the frontier, as predicted.

    Predicted times are those of the ops that have a choice. What all other ops take is the
    same in each plan, and is known from the time of the fp32 model. A search for the fewest
    bytes predicts no times.
    """
    steps = [step["predicted"] for step in found["frontier"]]
    if not steps or steps[0].get("ms") is None:
        return []
    baseline = found["baseline"]["latency_ms"]
    rest = baseline - steps[0]["ms"]
    return [(s["relative_error"], baseline / max(s["ms"] + rest, 1e-9)) for s in steps]


def picture(found: Mapping[str, Any], title: str) -> str:
    """The frontier as an SVG.

    Args:
        found: What ``tune --json`` prints.
        title: The line above the picture, such as the model's name.
    """
    points, predicted, baselines = points_of(found), predicted_of(found), baselines_of(found)
    errors = [p.error for p in points] + [error for error, _ in predicted]
    speeds = [p.speed for p in points] + [speed for _, speed in (*predicted, *baselines)]
    scale = _Scale.of(errors, speeds)
    line = " ".join(f"{scale.x(e):.1f},{scale.y(s):.1f}" for e, s in predicted)
    parts = [
        f'<text class="title" x="{_LEFT}" y="22">{_text(title)}</text>',
        *scale.axes(),
        f'<polyline class="predicted" points="{line}"/>',
        *(_level(scale, name, speed) for name, speed in baselines),
        *(_dot(scale, p) for p in points),
        *_chosen(scale, points, found),
        *_legend(points, dashed=bool(predicted)),
    ]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        f' role="img" aria-label="{_text(title)}">\n<style>{_STYLE}</style>\n{body}\n</svg>\n'
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """From errors and speeds to places in the picture."""

    error: float
    low: float
    high: float

    @classmethod
    def of(cls, errors: Iterable[float], speeds: Sequence[float]) -> _Scale:
        step = _tick(max(speeds) - min(speeds))
        low, high = math.floor(min(speeds) / step), math.ceil(max(speeds) / step)
        return cls(
            error=max(errors) * 1.05 or 1.0, low=low * step, high=max(high, low + 1) * step
        )

    def x(self, error: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * error / self.error

    def y(self, speed: float) -> float:
        share = (speed - self.low) / (self.high - self.low)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share

    def axes(self) -> Iterable[str]:
        """Lines with their numbers, and what the axes mean."""
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        for speed in _ticks(self.low, self.high):
            y = self.y(speed)
            yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield _label(_LEFT - 8, y + 4, f"x{speed:.4g}", "end")
        for error in _ticks(0.0, self.error):
            x = self.x(error)
            yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>'
            yield _label(x, bottom + 18, f"{error:.2%}")
        yield _label((_LEFT + right) / 2, _HEIGHT - 10, "relative output error")
        yield _label(_LEFT, _TOP - 10, "speed, fp32 is 1", "start")


def _tick(span: float) -> float:
    """A round distance that cuts ``span`` into three to seven parts."""
    rough = max(span, 1e-9) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    return min((unit * k for k in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / rough)))


def _ticks(low: float, high: float) -> list[float]:
    step = _tick(high - low)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def _dot(scale: _Scale, point: PlotPoint) -> str:
    told = f"{point.name}: x{point.speed:.2f} as fast as fp32, error {point.error:.2%}"
    return (
        f'<circle class="{point.kind}" cx="{scale.x(point.error):.1f}"'
        f' cy="{scale.y(point.speed):.1f}" r="5"><title>{_text(told)}</title></circle>'
    )


def _level(scale: _Scale, name: str, speed: float) -> str:
    """A line at the speed of an anchor."""
    y, right = scale.y(speed), _WIDTH - _RIGHT
    line = f'<line class="anchor" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + _label(right, y - 5, f"{name}: x{speed:.2f}", "end")


def _chosen(
    scale: _Scale, points: Sequence[PlotPoint], found: Mapping[str, Any]
) -> Iterable[str]:
    """A ring around the plan that was chosen, with its speed; around fp32 if none was."""
    own = {"fp32"}
    if found["verdict"] == "improved":
        own = {plan["name"] for plan in found["candidates"] if not plan["changes"]}
    for best in [p for p in points if p.name in own][:1]:
        x, y = scale.x(best.error), scale.y(best.speed)
        anchor = "end" if x > _WIDTH * 0.75 else "start"
        at = x - 14 if anchor == "end" else x + 14
        yield f'<circle class="chosen" cx="{x:.1f}" cy="{y:.1f}" r="9"/>'
        yield _label(at, y + 20, f"chosen: x{best.speed:.2f}", anchor)


def _legend(points: Sequence[PlotPoint], *, dashed: bool) -> Iterable[str]:
    x = _LEFT + 150
    if dashed:
        y = _TOP - 14
        yield f'<line class="predicted" x1="{x}" x2="{x + 18}" y1="{y}" y2="{y}"/>'
        yield _label(x + 24, _TOP - 10, "predicted", "start")
        x += 100
    for kind, words in _KINDS.items():
        if any(p.kind == kind for p in points):
            yield f'<circle class="{kind}" cx="{x}" cy="{_TOP - 14}" r="5"/>'
            yield _label(x + 10, _TOP - 10, words, "start")
            x += 30 + 7 * len(words)


def _label(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_text(text)}</text>'


def _text(text: str) -> str:
    return escape(safe(text))

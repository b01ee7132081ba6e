"""OpenVINO's exceptions in one line, without C++ source locations and wrapping messages."""

from __future__ import annotations

import re

_GROUP = re.compile(r"^-- \S+ with a message:$", re.MULTILINE)
_CHECK = re.compile(r"Check '.*?' failed at \S+:\d+:?")
_PLACES = (
    re.compile(r"While validating ONNX node '<Node\((?P<op>\w+)\): (?P<name>.*?)>'"),
    re.compile(r"\[\w+\] (?P<op>\w+) node with name '(?P<name>.*?)'"),
    re.compile(
        r"While validating node '(?:\w+::)?(?P<op>\w+) .*' with friendly_name '(?P<name>.*?)'"
    ),
)
_NO_RULE = re.compile(r"No conversion rule found for operations?: (?P<ops>.+)")
_NOISE = re.compile(
    r"Exception from |FrontEnd API failed with|\S+: FrontEnd API|Model wasn't fully converted"
    r"|To facilitate the conversion|While validating |Shape inference input shapes"
    r"|Node .+ of type |\[ ?[A-Z_]+ ?\]$|-- "
)
_LONGEST = 240


def explain(error: Exception) -> str:
    """The innermost reason in an OpenVINO exception, and the node it names; one line."""
    text = str(error)
    if missing := _NO_RULE.search(text):
        return f"no kernel for {missing['ops'].strip()}"
    # A failed conversion lists every failed op; the first is the cause of the others.
    groups = _GROUP.split(text.split("\nSummary:")[0])
    text = groups[min(1, len(groups) - 1)]
    places = [match for pattern in _PLACES if (match := pattern.search(text))]
    place = f" at {places[0]['op']} {places[0]['name']!r}" if places else ""
    for pattern in (*_PLACES, _CHECK):
        text = pattern.sub("", text)
    lines = [line.strip(" :") for line in text.splitlines()]
    lines = [line for line in lines if line and not _NOISE.match(line)]
    reason = lines[-1] if lines else type(error).__name__
    return (reason if len(reason) <= _LONGEST else reason[:_LONGEST] + "…") + place

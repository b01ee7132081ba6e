"""OpenVINO's exceptions in one line: without C++ source locations and wrappers."""

from __future__ import annotations

import re

_LOCATION = re.compile(r"^Exception from \S+:\d+:?$|^\S*FrontEnd API failed with \w+:?$")
_CHECK = re.compile(r"Check '.*?' failed at \S+:\d+:?\s*")
_NODE = re.compile(r"While validating ONNX node '<Node\((?P<op>\w+)\): (?P<name>.*?)>'")
_NO_RULE = re.compile(r"No conversion rule found for operations?: (?P<ops>.+)")
_NOISE = (
    "Summary:",
    "Model wasn't fully converted",
    "To facilitate the conversion",
    "-- Conversion is failed",
    "[ GENERAL_ERROR ]",
)
_LONGEST = 240


def explain(error: Exception) -> str:
    """The reason in an OpenVINO exception, one line."""
    text = str(error)
    if missing := _NO_RULE.search(text):
        return f"no kernel for {missing['ops'].strip()}"
    node = _NODE.search(text)
    place = f" at {node['op']} {node['name']!r}" if node else ""
    lines: list[str] = []
    for raw in text.splitlines():
        line = _CHECK.sub("", _NODE.sub("", raw.strip())).strip(" :")
        if not line or _LOCATION.match(line + ":") or _LOCATION.match(line):
            continue
        if line.startswith("-- ") or any(line.startswith(noise) for noise in _NOISE):
            continue
        lines.append(line)
    reason = " ".join(lines[:1]) or type(error).__name__
    return (reason if len(reason) <= _LONGEST else reason[:_LONGEST] + "…") + place

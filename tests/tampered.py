"""Content of a JSON file with each of its values replaced or removed, one at a time."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

NUMBERS = (7, -1, math.inf, math.nan, 0.5, 1e9, 10**30)
TEXTS = ("", "x" * 5000, "x y " * 1250, "a|b")
REMOVED = object()
VALUES = (None, True, *NUMBERS, *TEXTS, [], [None], [[[[]]]], {}, {"a": None})
# Python's own words, which mean nothing to a user.
PYTHON = re.compile(
    r"\w' object|object (is|has)|iterable|subscript|int\(\)|argument|indices|unpack|Error\b|0x"
)
_MOST_OF_A_KIND = 2
"""Items of a list that are replaced: the others are alike."""


def tampered(text: str) -> Iterator[tuple[str, str]]:
    """The texts, each with the place that was changed and its new value."""
    for place in places(json.loads(text)):
        for value in (*VALUES, REMOVED):
            changed = json.dumps(with_value(json.loads(text), place, value))
            yield f"{'.'.join(map(str, place))} = {str(value)[:20]}", changed


def with_value(content: Any, place: tuple[Any, ...], value: object) -> Any:
    """``content``, in which ``place`` has another value, or none."""
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    if value is REMOVED:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return content


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each value, of long lists the first ones."""
    keys: list[Any] = list(value) if isinstance(value, dict) else []
    if isinstance(value, list):
        keys = [*range(min(len(value), _MOST_OF_A_KIND))]
    for key in keys:
        yield (*above, key)
        yield from places(value[key], (*above, key))

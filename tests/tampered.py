"""Content of a JSON file with each of its values replaced by others, one at a time."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

NUMBERS = (7, -1, math.inf, 0.5, 10**30)
TEXTS = ("", "x" * 5000, "x y " * 1250, "a|b")
VALUES = (None, True, *NUMBERS, *TEXTS, [], [None], [[[[]]]], {}, {"a": None})
# Python's own words, which mean nothing to a user.
PYTHON = re.compile(r"object|iterable|subscript|int\(\)|argument|indices|unpack|Error\b|0x")
_MOST_OF_A_KIND = 2
"""Items of a list that are replaced: the others are alike."""


def tampered(text: str) -> Iterator[tuple[str, str]]:
    """The texts, each with the place that was changed and its new value."""
    for place in _places(json.loads(text)):
        for value in VALUES:
            content = json.loads(text)
            inner = content
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value
            yield f"{'.'.join(map(str, place))} = {str(value)[:20]}", json.dumps(content)


def _places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys: list[Any] = list(value) if isinstance(value, dict) else []
    if isinstance(value, list):
        keys = [*range(min(len(value), _MOST_OF_A_KIND))]
    for key in keys:
        yield (*above, key)
        yield from _places(value[key], (*above, key))

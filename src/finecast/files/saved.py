"""JSON files that finecast saved: what one is, and where in it something is wrong."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from finecast.errors import UsageError, malformed, typed

T = TypeVar("T")

DATABASE: Final = b"SQLite format 3\0"
"""The first bytes of a study, as of every SQLite file."""
_KIND: Final = "finecast."
_OF_A_PLAN: Final = frozenset({"decisions", "digest", "policy"})


def kind_of(content: object) -> str:
    """What a file is by its JSON content, as "a lock of version 1"; empty if it is unknown."""
    if not isinstance(content, Mapping):
        return ""
    stated: Any = content.get("kind")
    version: Any = content.get("version")
    if isinstance(stated, str) and stated.startswith(_KIND):
        name = stated.removeprefix(_KIND)
    elif content.keys() >= _OF_A_PLAN:
        name = "plan"
    else:
        return ""
    return f"a {name}" + (f" of version {version}" if type(version) is int else "")


def checksum(content: Mapping[str, Any]) -> str:
    """Hash of JSON content, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(slots=True)
class Reading:
    """A file that is read; ``place`` is where in its content, as ``decisions[3]``."""

    place: str = ""

    def part(
        self, content: Mapping[str, Any], name: str, kind: type[T], default: T | None = None
    ) -> T:
        """The value of that name, which is read next; raises as ``typed``."""
        self.place = name
        return typed(content, name, kind, default)

    def each(
        self, content: Mapping[str, Any], name: str, default: list[Any] | None = None
    ) -> Iterator[Any]:
        """The items of the list of that name, each of which is read when it is given."""
        for number, one in enumerate(self.part(content, name, list, default)):
            self.place = f"{name}[{number}]"
            yield one

    def items(self, content: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
        """The items of the object of that name, if there is one; as ``each``."""
        for key, one in self.part(content, name, dict, {}).items():
            self.place = f"{name}.{key}"
            yield key, one


@contextmanager
def reading(what: str, where: str, fix: str) -> Generator[Reading]:
    """Turn errors of content that is read inside into those of the file and the place.

    Args:
        what: What the file should be in messages: "lock".
        where: The file.
        fix: What to do where it is something else.

    Raises:
        UsageError: If the content is not as it has to be.
    """
    reader = Reading()

    def place() -> str:
        return ", ".join(filter(None, (where, reader.place)))

    try:
        yield reader
    except UsageError as error:
        if error.where:
            raise
        raise UsageError(error.what, where=place(), fix=error.fix or fix) from error
    except json.JSONDecodeError as error:
        text = f"not a {what}: it is no JSON: {error.msg} in line {error.lineno}"
        raise UsageError(text, where=where, fix=fix) from error
    except (
        ArithmeticError,  # an infinite number
        AttributeError,
        IndexError,
        KeyError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise UsageError(
            f"not a {what}: {malformed(error)}", where=place(), fix=fix
        ) from error

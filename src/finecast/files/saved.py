"""JSON files that finecast saved: what one is, and where in it something is wrong.

Law: what such a file may hold is stated once, as a type. A file of another form is refused in
one line that names the place, shows the value in short and says what was expected; and one
that was changed after it was saved is refused by its checksum.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

import msgspec

from finecast.errors import FormError, UsageError, malformed, shortened, shown

T = TypeVar("T")

DATABASE: Final = b"SQLite format 3\0"
"""The first bytes of a study, as of every SQLite file."""
_KIND: Final = "finecast."
_OF_A_PLAN: Final = frozenset({"decisions", "digest", "policy"})
_SEAL: Final = "checksum"


class SavedPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An object in a file's content."""


class Saved(SavedPart, kw_only=True):
    """A file's content: its version, and the hash of all else in it.

    A subclass has a ``tag`` for what the file states as its kind, as "finecast.lock".
    """

    version: Annotated[int, msgspec.Meta(ge=1)]
    checksum: str = ""


S = TypeVar("S", bound=Saved)


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
    """Hash of all that JSON content says but its own checksum, whatever the order of keys."""
    others = {name: value for name, value in content.items() if name != _SEAL}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()[:16]


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """``content`` with its checksum, as ``Reading.parsed`` wants it."""
    return {**content, _SEAL: checksum(content)}


@dataclass(slots=True)
class Reading:
    """A file that is read; ``place`` is where in its content, as ``decisions[3]``."""

    what: str
    place: str = ""
    changed: str = ""
    """What tells that the file was changed since it was saved."""

    def parsed(self, text: str, form: type[S], *, newest: int, sealed_from: int) -> S:
        """The JSON content of a file.

        Versions up to ``newest`` are read, and files have a checksum from ``sealed_from`` on.

        Raises:
            UsageError, ValueError: If it is something else.
        """
        content: Any = json.loads(text)
        if isinstance(content, dict):
            kind, other = form.__struct_config__.tag, kind_of(content)
            if content.get("kind") != kind and (kind or other):
                said = f"it is {other}" if other else f"it has no kind {kind}"
                raise UsageError(f"not a {self.what}: {said}")
            version: Any = content.get("version")
            if type(version) is int and version > newest:
                what = f"{self.what} version {shown(version)} is newer than {newest}"
                raise UsageError(what, fix="upgrade finecast")
        file = converted(content, form)
        if not file.checksum and file.version >= sealed_from:
            self.changed = "it has no checksum"
        elif file.checksum not in ("", checksum(content)):
            self.changed = "its checksum is not that of what it says"
        return file

    def check_unchanged(self) -> None:
        """Raise UsageError if the file was changed since it was saved."""
        if self.changed:
            raise UsageError(f"the {self.what.split()[-1]} was changed: {self.changed}")

    def each(self, name: str, items: Sequence[T]) -> Generator[T]:
        """The ``items`` of the list of that name, each of which is read when it is given."""
        for number, item in enumerate(items):
            self.place = f"{name}[{number}]"
            yield item
        self.place = ""


@contextmanager
def reading(what: str, where: str, fix: str) -> Generator[Reading]:
    """Turn errors of content that is read inside into those of the file and the place.

    A file that has no such error, but was changed since it was saved, is refused at the end.

    Args:
        what: What the file should be in messages: "lock".
        where: The file.
        fix: What to do where it is something else.

    Raises:
        UsageError: If the content is not as it has to be.
    """
    reader = Reading(what=what)

    def place() -> str:
        return ", ".join(filter(None, (where, reader.place)))

    try:
        yield reader
        reader.check_unchanged()
    except UsageError as error:
        if error.where:
            raise
        raise UsageError(error.what, where=place(), fix=error.fix or fix) from error
    except json.JSONDecodeError as error:
        text = f"not a {what}, which is JSON (line {error.lineno}: {error.msg})"
        raise UsageError(text, where=where, fix=fix) from error
    except (
        ArithmeticError,  # an infinite number
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise UsageError(
            f"not a {what}: {malformed(error)}", where=place(), fix=fix
        ) from error


def converted(content: Any, form: type[T]) -> T:
    """``content``, which is of JSON's types, as a value of the type ``form``.

    Raises:
        FormError: If it is of another form.
    """
    try:
        return msgspec.convert(content, form, str_keys=True)
    except msgspec.ValidationError as error:
        raise FormError(_explained(content, form, str(error))) from error


_MESSAGE: Final = re.compile(
    r"(?P<text>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>[\w.\[\]]*)`)?", re.DOTALL
)
"""What msgspec says; ``[...]`` in a path is some value of an object, "key" some key of it."""
_STEP: Final = re.compile(r"\.(?P<name>\w+)|\[(?P<item>\d+|\.\.\.)\]")
_FIELD: Final = re.compile(
    r"Object (?:(?P<lacks>missing required)|contains unknown) field `(?P<name>.*)`", re.DOTALL
)
_EXPECTED: Final = re.compile(r"Expected (.*?)(?:, got .*)?", re.DOTALL)
_UNKNOWN: Final = re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL)
_TYPE: Final = re.compile(r"`((?:array|bool|bytes|float|int|null|object|str| \| )+)`")
_TYPES: Final = {
    "array": "a list",
    "bool": "true or false",
    "bytes": "text",
    "float": "a number",
    "int": "an integer",
    "null": "null",
    "object": "an object",
    "str": "text",
}
"""JSON's types, as messages call them."""


def _explained(content: Any, form: Any, message: str) -> str:
    """What is wrong, from the message of msgspec for ``content``."""
    parts = _MESSAGE.fullmatch(message)
    assert parts is not None  # it takes any text
    steps: list[str | int] = []
    value, place = content, ""
    with suppress(LookupError, TypeError):  # a file may have a name that looks like a path
        for step in _STEP.finditer(parts["path"] or ""):
            at: str | int = step["name"] or step["item"]
            if at == "...":
                at = _culprit(content, form, message, steps, value)
            elif step["item"]:
                at = int(at)
            value = value[at]
            steps.append(at)
            place += f"[{at}]" if isinstance(at, int) else f".{shortened(at)}"
    place = place.removeprefix(".") or "it"
    text = _TYPE.sub(_in_words, parts["text"])
    expected = _EXPECTED.fullmatch(text)
    if field := _FIELD.fullmatch(text):
        lacks, name = field["lacks"], shown(field["name"])
        return f"{place} has no {name}" if lacks else f"{place} has {name}, which is not known"
    if parts["key"] and expected:
        return f"{place} has a key that is not {expected[1]}"
    if expected:
        return f"{place} is {shown(value)}, expected {expected[1]}"
    if unknown := _UNKNOWN.fullmatch(text):
        said = f"has {shortened(unknown[1])}" if parts["key"] else f"is {shown(value)}"
        return f"{place} {said}, which is not known"
    return f"{place}: {text}" if steps else text


def _in_words(types: re.Match[str]) -> str:
    names = types[1].split(" | ")
    return " or ".join(_TYPES[n] for n in names if n != "int" or "float" not in names)


def _culprit(
    content: Any, form: Any, message: str, steps: Sequence[str | int], values: dict[str, Any]
) -> str:
    """The key of the first of the ``values`` that is wrong; they are at ``steps``.

    msgspec does not tell it: of fewer and fewer values it is those that are refused so.
    """
    keys = list(values)
    while len(keys) > 1:
        half = keys[: len(keys) // 2]
        part = _replaced(content, steps, {key: values[key] for key in half})
        try:
            msgspec.convert(part, form, str_keys=True)
            refused = False
        except msgspec.ValidationError as error:
            refused = str(error) == message
        keys = half if refused else keys[len(half) :]
    return keys[0]


def _replaced(content: Any, steps: Sequence[str | int], value: object) -> Any:
    """A copy of ``content`` with ``value`` at ``steps``."""
    if not steps:
        return value
    copy = content.copy()
    copy[steps[0]] = _replaced(content[steps[0]], steps[1:], value)
    return copy

"""Typed reading of TOML tables whose errors name the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar, cast

from finecast.errors import UsageError
from finecast.numbers.formats import Format

E = TypeVar("E", bound=Enum)


class Table:
    """A TOML table that is read key by key; ``finish`` rejects keys that were not read."""

    def __init__(self, data: Mapping[str, object], file: str, path: str = "") -> None:
        self._data = data
        self._file = file
        self._path = path
        self._read: set[str] = set()

    def error(self, key: str, what: str) -> UsageError:
        """An error at ``key`` of this table, to be raised."""
        return UsageError(f"key {self._path}{key} {what}", where=self._file, fix="correct it")

    def has(self, key: str) -> bool:
        """Whether the table has ``key``."""
        return key in self._data

    def finish(self) -> None:
        """Check that every key was read.

        Raises:
            UsageError: If the table has unknown keys.
        """
        for key in self._data:
            if key not in self._read:
                raise self.error(key, f"is not one of {', '.join(sorted(self._read))}")

    def table(self, key: str) -> Table:
        """The table at ``key``."""
        value = self._take(key, dict)
        return Table(cast("dict[str, object]", value), self._file, f"{self._path}{key}.")

    def text(self, key: str) -> str:
        """The string at ``key``."""
        return cast("str", self._take(key, str))

    def flag(self, key: str) -> bool:
        """The boolean at ``key``."""
        return cast("bool", self._take(key, bool))

    def number(self, key: str) -> float:
        """The number at ``key``, zero or more."""
        value = self._take(key, int | float)
        if isinstance(value, bool) or not cast("float", value) >= 0:
            raise self.error(key, f"is {value!r}, expected a number of at least 0")
        return float(cast("float", value))

    def positive(self, key: str) -> float:
        """The number at ``key``, more than zero."""
        value = self.number(key)
        if not value > 0:
            raise self.error(key, f"is {value!r}, expected more than 0")
        return value

    def format(self, key: str) -> Format:
        """The format whose label is at ``key``."""
        return self._format(key, self.text(key))

    def rates(self, key: str) -> dict[Format, float]:
        """Numbers above zero by format, at least one."""
        inner = self.table(key)
        rates = {inner._format(k, k): inner.positive(k) for k in inner._data}
        if not rates:
            raise self.error(key, "is empty, expected a rate for at least one format")
        return rates

    def format_map(self, key: str) -> dict[Format, Format]:
        """Formats by format; empty where ``key`` is absent."""
        self._read.add(key)
        if not self.has(key):
            return {}
        inner = self.table(key)
        return {inner._format(k, k): inner.format(k) for k in inner._data}

    def formats(self, key: str) -> frozenset[Format]:
        """The formats whose labels are in the list at ``key``; it may be empty."""
        values = cast("list[object]", self._take(key, list))
        return frozenset(self._format(key, str(v)) for v in values)

    def members(self, key: str, kind: type[E]) -> tuple[E, ...]:
        """A list of values of ``kind``, at least one."""
        values = cast("list[object]", self._take(key, list))
        known = {m.value: m for m in kind}
        if not values or any(v not in known for v in values):
            raise self.error(key, f"is {values!r}, expected some of {', '.join(known)}")
        return tuple(known[v] for v in values)

    def _take(self, key: str, kind: type | object) -> object:
        self._read.add(key)
        if key not in self._data:
            raise self.error(key, "is missing")
        value = self._data[key]
        if not isinstance(value, cast("type", kind)):
            name = getattr(kind, "__name__", "number")
            raise self.error(key, f"is {value!r}, expected {name}")
        return value

    def _format(self, key: str, label: str) -> Format:
        try:
            return Format.parse(label)
        except UsageError as error:
            raise self.error(key, f"names an {error.what}") from error

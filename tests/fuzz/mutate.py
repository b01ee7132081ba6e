"""Mutations of a file's bytes: flips, cuts, copies, numbers at their limits."""

from __future__ import annotations

from random import Random
from typing import Final

_LIMITS: Final = (0, 1, 127, 128, 255)
_MOST: Final = 6


def mutated(data: bytes, random: Random) -> bytes:
    """``data`` with one to six changes."""
    out = bytearray(data)
    for _ in range(random.randint(1, _MOST)):
        if not out:
            break
        random.choice(_KINDS)(out, random)
    return bytes(out)


def _flip(out: bytearray, random: Random) -> None:
    out[random.randrange(len(out))] ^= 1 << random.randrange(8)


def _limit(out: bytearray, random: Random) -> None:
    out[random.randrange(len(out))] = random.choice(_LIMITS)


def _cut(out: bytearray, random: Random) -> None:
    start = random.randrange(len(out))
    del out[start : start + random.randint(1, 16)]


def _copy(out: bytearray, random: Random) -> None:
    start, to = random.randrange(len(out)), random.randrange(len(out))
    out[to:to] = out[start : start + random.randint(1, 32)]


def _truncate(out: bytearray, random: Random) -> None:
    del out[random.randrange(len(out)) :]


# Cuts and copies break lengths, so most of them end in the parser: flips go deeper.
_KINDS: Final = (_flip, _flip, _flip, _flip, _limit, _limit, _cut, _copy, _truncate)

"""A smallest set of members that a test passes on, in few tests.

Members are tried in an order of suspicion: first the smallest prefix that passes is looked
for, in steps that double, then what it can do without. (U. Junker, "QuickXplain: preferred
explanations and relaxations for over-constrained problems", AAAI 2004; A. Zeller and
R. Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE TSE 28, 2002.)

Laws, for a test that never fails on more members than a set that it passes on: the set found
passes, and without any one of its members it does not, unless tests ran out. If one of the
first four members passes by itself, it takes at most log2(n) + 3 tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Test = Callable[[frozenset[int]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Smallest:
    """The members found, in the order of suspicion.

    ``is_minimal`` is False if tests ran out: some of the members may not be needed.
    """

    members: tuple[int, ...]
    is_minimal: bool = True


class _OutOfTestsError(Exception):
    """No test is left."""


@dataclass(slots=True)
class _Tests:
    """Counts tests; a set is tested once."""

    test: Test
    most: int
    results: dict[frozenset[int], bool] = field(default_factory=dict[frozenset[int], bool])

    def __call__(self, members: Sequence[int]) -> bool:
        key = frozenset(members)
        if key not in self.results:
            if len(self.results) >= self.most:
                raise _OutOfTestsError
            self.results[key] = self.test(key)
        return self.results[key]


def smallest_set(order: Sequence[int], test: Test, *, most: int) -> Smallest:
    """A set of members that passes, and of which every member is needed.

    ``order`` are all members, the most suspicious first. The test is taken to pass on all, and
    is made ``most`` times at the most.
    """
    tests, suspects = _Tests(test, most), list(order)
    try:
        suspects = _prefix(order, tests)
        if len(suspects) > 1:  # the last one is needed: without it the prefix fails
            rest = _needed(suspects[-1:], suspects[:-1], tests, is_new=True)
            suspects = [*rest, suspects[-1]]
    except _OutOfTestsError:
        passed = (s for s, result in tests.results.items() if result)
        least = min(passed, key=len, default=frozenset(order))
        kept = tuple(m for m in order if m in least)
        return Smallest(members=kept, is_minimal=False)
    return Smallest(members=tuple(m for m in order if m in set(suspects)))


def _prefix(order: Sequence[int], tests: _Tests) -> list[int]:
    """The shortest prefix that passes."""
    low, high = 0, 1
    while high < len(order) and not tests(order[:high]):
        low, high = high, 2 * high
    high = min(high, len(order))
    while high - low > 1:
        middle = (low + high) // 2
        if tests(order[:middle]):
            high = middle
        else:
            low = middle
    return list(order[:high])


def _needed(
    given: Sequence[int], members: Sequence[int], tests: _Tests, *, is_new: bool
) -> list[int]:
    """The fewest of ``members`` with which ``given`` passes; ``is_new`` if it was changed."""
    if is_new and tests(given):
        return []
    if len(members) == 1:
        return list(members)
    half = len(members) // 2
    first, second = members[:half], members[half:]
    later = _needed([*given, *first], second, tests, is_new=bool(first))
    earlier = _needed([*given, *later], first, tests, is_new=bool(later))
    return [*earlier, *later]

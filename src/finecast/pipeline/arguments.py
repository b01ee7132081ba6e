"""The types of arguments from Python: a wrong one is an error with what is expected."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from finecast.devices.emulation import Emulation
from finecast.errors import UsageError
from finecast.planning.plan import Plan

P = ParamSpec("P")
R = TypeVar("R")

_PATH: Final = ((str, Path), "a path")
_NAME: Final = ((str,), "a name")
_NUMBER: Final = ((Real,), "a number")
_COUNT: Final = ((Integral,), "a whole number")
_FLAG: Final = ((bool, Integral), "True or False")

# What None means is each function's own; arguments that are not here are checked where they
# are read.
_EXPECTED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "output": _PATH,
    "study": _PATH,
    "plan_out": _PATH,
    "plan": ((str, Path, Plan), "a plan or its path"),
    "of": ((Iterable,), "an output's name, or several,"),
    "engine": _NAME,
    "metric": ((str,), "the name of a metric (a function of your own is evaluate)"),
    "labels": _NAME,
    "criterion": _NAME,
    "from_type": _NAME,
    "objective": ((str, Enum), "the name of an objective"),
    "target": ((str, Emulation), "the name of a device, or one with options,"),
    "evaluate": ((Callable,), "a function of run"),
    "progress": ((Callable, bool), "True, False or a function of each step"),
    "tolerance": _NUMBER,
    "min_speedup": _NUMBER,
    "timeout_s": _NUMBER,
    "batch": _COUNT,
    "max_trials": _COUNT,
    "dims": ((Mapping,), "a dict of sizes by dimension"),
    "user_rules": ((Mapping,), "a dict of rule functions by name"),
    "force": _FLAG,
    "verify": _FLAG,
    "resume": _FLAG,
    "lower_is_better": _FLAG,
    "external_data": _FLAG,
    "clean": _FLAG,
    "trust": _FLAG,
}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, whose arguments are first held against the types of their names."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if name in _EXPECTED and value is not None:
                _check(name, value)
        return function(*args, **kwargs)

    return call


def _check(name: str, value: object) -> None:
    expected: Any = _EXPECTED[name]  # protocols, which isinstance takes, are no types
    kinds, words = expected
    counted = isinstance(value, bool) and bool not in kinds
    if counted or not isinstance(value, kinds):
        raise UsageError(
            f"{words} is expected for {name}, not a value of type {type(value).__name__}",
            where=f"{name}={_short(value)}",
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"

"""Calls with names and values that no public function or class takes: one error for all."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict, Unpack

import pytest

import finecast
from finecast.calls import checks
from finecast.errors import FinecastError, UsageError
from finecast.plugin import plugins

CONSTRUCTED = (
    *("Backend", "Criterion", "DataOptions", "Goal", "Policy", "TrainingStep", "TuneOptions"),
    *("AccuracyCriterion", "MixedPrecisionConfig", "PostTrainingQuantConfig"),
    "TuningCriterion",
)


def calls_of(module: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What users call of a module: functions with arguments, and classes of values."""
    for name in module.__all__:
        public: Any = getattr(module, name, None)
        called = inspect.isfunction(public) or name in CONSTRUCTED
        if public is not None and called and inspect.signature(public).parameters:
            yield f"{module.__name__}.{name}", public


def modules() -> Iterator[Any]:
    """Modules with public calls, as far as their libraries are installed."""
    yield finecast
    if find_spec("torch") is not None:
        yield importlib.import_module("finecast.torch")
    for plugin in plugins():
        for name in set(plugin.packages) - {"finecast.compat.raf"}:  # its rules call these
            with suppress(FinecastError):
                module = importlib.import_module(name)
                if hasattr(module, "__all__"):
                    yield module


CALLS = {name: public for module in modules() for name, public in calls_of(module)}
if find_spec("finecast_neural_compressor") is not None:
    for verb in ("mix_precision", "quantization"):
        CALLS[f"{verb}.fit"] = importlib.import_module(
            f"finecast_neural_compressor.{verb}"
        ).fit


@pytest.mark.parametrize("name", CALLS)
def test_a_misspelt_name_is_told_with_the_near_one(name: str) -> None:
    parameters = inspect.signature(CALLS[name]).parameters
    word = [n for n, p in parameters.items() if p.kind is not p.VAR_KEYWORD][-1]
    with pytest.raises(UsageError, match=rf"unknown \w+( of \w+)? '{word}x'.*{word}"):
        CALLS[name](**{f"{word}x": 1})


class Keywords(TypedDict, total=False):
    seed: int


@checks
def plain(
    path: str | Path,
    sizes: Sequence[int] = (),
    *,
    share: float = 0.5,
    names: Mapping[str, int] | None = None,
    policy: finecast.Policy | str = "all",
    call: Callable[..., Any] | None = None,
    goal: finecast.Goal | None = None,
    anything: Any = None,
    **options: Unpack[Keywords],
) -> str:
    """A public function."""
    del path, sizes, share, names, policy, call, goal, anything, options
    return "called"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"path": 5}, "a path is expected for path, not a value of type int"),
        ({"sizes": 5}, "a tuple or a list, .* is expected for sizes"),
        ({"sizes": None}, "expected for sizes, not a value of type NoneType"),
        ({"share": "half"}, "a number is expected for share"),
        ({"names": [1]}, "a dict is expected for names"),
        ({"call": 5}, "a function is expected for call"),
        ({"goal": "fast"}, "a Goal is expected for goal"),
        ({"sed": 5}, "unknown argument of plain 'sed': did you mean seed"),
    ],
)
def test_values_are_of_the_kinds_that_the_signature_states(
    given: dict[str, Any], said: str
) -> None:
    call: Any = plain
    with pytest.raises(UsageError, match=said):
        call(**{"path": "x", **given})


def test_what_the_signature_states_is_taken() -> None:
    goal = finecast.Goal()
    assert plain(Path("x"), [1], share=1, names={}, policy=5, goal=goal, seed=3) == "called"  # type: ignore[arg-type]
    assert plain.__doc__ == "A public function."
    with pytest.raises(
        TypeError, match=r"plain: missing .*'path'; without names it takes path, sizes;"
    ):
        plain()  # type: ignore[call-arg]


def test_options_of_a_class_have_the_kinds_that_they_state() -> None:
    with pytest.raises(UsageError, match="a whole number is expected for max_trials"):
        finecast.Goal(max_trials="many")  # type: ignore[arg-type]
    with pytest.raises(
        UsageError, match=r"unknown argument of Criterion 'tolerence'.*tolerance"
    ):
        finecast.Criterion(tolerence=0.1)  # type: ignore[call-arg]

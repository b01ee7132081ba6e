"""Evaluations of modules that say nothing of them are refused, as those of ``--eval`` are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

import finecast
import finecast.torch as ft
from finecast.errors import ModelError, UsageError, UserCodeError
from finecast.tuning.result import Result

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8) % 4
COUNT = itertools.count()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def tune(
    evaluate: Callable[[nn.Module], Any],
    module: nn.Module | ExportedProgram | None = None,
    **more: Any,
) -> Result:
    options = ft.TuneOptions(prepare=lambda one: one, steps=2)
    return ft.tune(
        module or net(), (X,), evaluate=evaluate, options=options, progress=False, **more
    )


def ran(module: nn.Module, value: Any) -> Any:
    module(X)
    return value


@pytest.mark.parametrize(
    ("evaluate", "said"),
    [
        (lambda _: 0.9, "returns 0.9 and never ran the model.*call the module"),
        (lambda m: ran(m, 0.9), r"returns 0\.9 whatever the outputs are"),
        (lambda m: ran(m, "0.9"), "returns '0.9' of type str, not a number"),
        (lambda m: float(m(X).mean()) + next(COUNT), "different numbers for the same outputs"),
        (lambda m: ran(m, float("inf")), "returns inf for the fp32 model"),
    ],
)
def test_numbers_that_say_nothing_are_refused(
    evaluate: Callable[[nn.Module], Any], said: str
) -> None:
    with pytest.raises(UserCodeError, match=said):
        tune(evaluate)


def test_nan_is_told(recwarn: pytest.WarningsRecorder) -> None:
    del recwarn
    with pytest.raises(ModelError, match="the fp32 model's metric is NaN"):
        tune(lambda m: ran(m, float("nan")))


def accuracy(module: nn.Module) -> float:
    return float((module(X).argmax(1) == LABELS).float().mean())


def forward(module: nn.Module) -> float:
    return float(module.forward(X).mean())


def compiled(module: nn.Module) -> float:
    return float(torch.compile(module, backend="eager", fullgraph=True)(X).mean())


def batches_in_random_order(module: nn.Module) -> float:
    rows = random.Random().sample(range(8), 8)  # the same number, by other calls
    return sum(float(module(X.roll(k, 0)).double().sum()) for k in rows)


@pytest.mark.parametrize("evaluate", [accuracy, forward, compiled, batches_in_random_order])
def test_what_follows_the_outputs_is_taken(evaluate: Callable[[nn.Module], float]) -> None:
    module = net()
    own = module.forward
    with torch.no_grad():
        assert tune(evaluate, module).baseline.metric == pytest.approx(evaluate(module))
    assert module.forward == own
    assert "forward" not in module.__dict__


def wide() -> nn.Module:
    """A net that a device gains by, though its times have a part that no format changes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 4)).eval()


def test_a_metric_gets_the_module_as_a_device_computes_it() -> None:
    module, got = wide(), list[nn.Module]()

    def closeness(tried: nn.Module) -> float:
        got.append(tried)
        return 1 - float((tried(X) - exact).abs().max())

    with torch.no_grad():
        exact = module(X)
    outcome = tune(closeness, module, policy="all:bf16", target="trn1")
    assert got[0] is module
    assert outcome.improved
    assert outcome.baseline.metric == 1
    lost = 1 - outcome.tuned.metric
    assert 0 < lost < 2**-6  # numbers below 2, in bf16
    assert got[-1](X).dtype is torch.float32
    emulated = finecast.emulate(
        module, "trn1", "all:bf16", example_inputs=(X,), evaluate=closeness, progress=False
    )
    assert 0 < emulated.baseline - emulated.metric < 2**-6


def test_results_of_an_emulated_module_are_those_of_the_module() -> None:
    class Named(nn.Module):
        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
            return {"y": x.double() * scale, "nothing": None, "rank": (x > 0).long()}

    def kinds(module: nn.Module) -> float:
        results = module(X, scale=X[0])
        assert list(results) == ["y", "nothing", "rank"]
        assert results["nothing"] is None
        assert (results["y"].dtype, results["rank"].dtype) == (torch.float64, torch.int64)
        return float(results["y"].mean())

    tune(kinds, Named(), example_kwargs={"scale": X[0]}, target="trn1")


def test_a_built_in_metric_beside_a_function_is_refused() -> None:
    with pytest.raises(UsageError, match="both a built-in metric and an evaluation function"):
        tune(accuracy, metric="top1")


def test_calibration_data_are_read() -> None:
    with pytest.raises(UsageError, match="input 'input' is missing"):
        tune(accuracy, calib={"x": X.numpy()})


def test_a_metric_may_compare_with_the_original() -> None:
    module = net()

    def distance(tried: nn.Module) -> float:
        with torch.no_grad():
            return -float((tried(X) - module(X)).norm())

    assert tune(distance, module).baseline.metric == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [({}, True), ({"criterion": finecast.Criterion(higher_is_better=False)}, False)],
)
def test_an_error_that_counts_as_better_is_told(more: dict[str, Any], said: bool) -> None:
    module = wide()
    with torch.no_grad():
        exact = module(X)

    def error(tried: nn.Module) -> float:
        return float((tried(X) - exact).abs().mean())

    outcome = tune(error, module, policy="all:bf16", target="trn1", **more)
    warnings = [text for text in outcome.warnings if "lower_is_better" in text]
    assert len(warnings) == said


class Two(nn.Module):
    """One output that barely errs, and one that errs much: a difference of near numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), self.head(x + 1000) - self.head.weight.sum(1) * 1000


def test_errors_are_of_the_outputs_named() -> None:
    def evaluate(module: nn.Module) -> float:
        return float(module(X)[0].mean())

    program = torch.export.export(Two().eval(), (X,))
    names = program.graph_signature.user_outputs
    errors = [
        max(
            found.error
            for found in tune(
                evaluate, program, of=[str(name)], policy="all:bf16"
            ).findings.sensitivities
        )
        for name in names
    ]
    assert errors[1] > 4 * errors[0]
    with pytest.raises(UsageError, match=r"unknown output 'nothing' \(of\)"):
        tune(evaluate, program, of=["nothing"])


class Log(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(self.layer(x))


def test_convert_tells_of_nan_in_fp32() -> None:
    said = r"the fp32 model gives NaN on random inputs or examples: output '\w+' has \d+ in 32"
    with pytest.warns(UserWarning, match=said):
        ft.convert(Log().eval(), (X,), "all:bf16")


class Reshaped(nn.Module):
    """A module whose graph holds the number of rows, where that is not free."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x).relu().reshape(x.shape[0], 16))


@pytest.mark.parametrize("examples", [X, X[:1]])
def test_sizes_that_an_evaluation_varies_are_free(examples: torch.Tensor) -> None:
    """The search failed at its first plan, for a partial last batch too."""
    batches = (X, X[:3])

    def accuracy(module: nn.Module) -> float:
        right = [(module(x).argmax(1) == LABELS[: len(x)]).float().sum() for x in batches]
        return float(sum(right)) / 11

    result = finecast.tune(
        Reshaped().eval(),
        example_inputs=(examples,),
        evaluate=accuracy,
        policy="all:bf16",
        objective="size",
        tolerance="50%",
        progress=False,
    )
    assert result.improved
    assert [len(result.model(x)) for x in batches] == [8, 3]
    assert result.baseline.metric == pytest.approx(accuracy(Reshaped().eval()))


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_result_takes_the_partial_last_batch_of_a_data_loader(drop_last: bool) -> None:
    rows = torch.utils.data.TensorDataset(torch.cat([X, X[:3]]), LABELS.repeat(2)[:11])
    loader = torch.utils.data.DataLoader(rows, batch_size=8, drop_last=drop_last)
    result = finecast.tune(
        Reshaped().eval(),
        example_inputs=(X,),
        data=loader,
        policy="all:bf16",
        objective="size",
        tolerance="50%",
        progress=False,
    )
    assert result.improved
    assert [len(result.model(x)) for x, _ in loader] == [8, 3][: len(loader)]
    if drop_last:
        with pytest.raises(UserWarning, match="captured with 8 in axis 0, got 3"):
            result.model(X[:3])

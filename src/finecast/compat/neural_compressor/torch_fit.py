"""An ``nn.Module`` as the subject of ``fit``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from finecast.compat.neural_compressor.config import MixedPrecisionConfig
from finecast.compat.neural_compressor.exporting import export_freely
from finecast.compat.neural_compressor.modules import convertible, lower_modules
from finecast.compat.neural_compressor.torch_result import TorchResult, of_graph
from finecast.engines.torch.rates import rate_here
from finecast.engines.torch.session import Arguments, examples
from finecast.errors import ModelError, UsageError
from finecast.frontends.torch.aten import DTYPES
from finecast.numbers.formats import Format
from finecast.rules import NodeView
from finecast.rules.policy import Policy, Scope
from finecast.subjects.torch.planning import device_of
from finecast.torch.modules import convert


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFit:
    """A module with the names and classes of its submodules.

    ``program`` is its whole graph; None if it is converted module by module.
    """

    original: nn.Module
    types: Mapping[str, str]
    known: Mapping[str, str]
    low: Format
    program: ExportedProgram | None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        settings: MixedPrecisionConfig,
        low: Format,
        dataloader: Iterable[Any] | None,
    ) -> TorchFit:
        """Read ``model``; example inputs come from the settings or the first batch.

        Raises:
            UsageError: If a setting does not apply to modules.
        """
        _check(model, settings)
        example = settings.example_inputs
        if example is None and dataloader is not None:
            example = next(iter(dataloader))[0]
        modules = model.named_modules(remove_duplicate=False)
        types = convertible(model)
        return cls(
            original=model,
            types=types,
            # The module itself has no name, and is an op where it is a layer.
            known={n: type(one).__name__ for n, one in modules if n or n in types},
            low=low,
            program=None if example is None else _program(model, example),
        )

    def build(self, kept: frozenset[str]) -> TorchResult:
        """Convert by a plan of the whole graph if there is one, else module by module."""
        if self.program is not None:
            return self._build_graph(self.program, kept)
        chosen = {name: kind for name, kind in self.types.items() if name not in kept}
        return TorchResult(
            lower_modules(self.original, chosen, DTYPES[self.low]),
            precision=self.low,
            modules=chosen,
            lowered=len(chosen),
            products=len(chosen),
        )

    def _build_graph(self, program: ExportedProgram, kept: frozenset[str]) -> TorchResult:
        inside = tuple(f"{name}." for name in kept)

        def rule(view: NodeView) -> str | None:
            return "fp32" if f"{view.node.scope}.".startswith(inside) else None

        args, kwargs = examples(program)
        # The second, if the first lowers no product because none gains on these inputs: the
        # user asked for a conversion.
        policies = [Policy(scope=s, formats=(self.low,)) for s in (Scope.AUTO, Scope.MATMULT)]
        results = (
            of_graph(graph, graph.finecast_plan, self.low, program)  # type: ignore[arg-type]
            for graph in (
                convert(program, args, p, example_kwargs=kwargs, user_rules={"fit": rule})
                for p in policies
            )
        )
        first = next(results)
        return first if first.products else next(results)

    def predictor(self, model: nn.Module) -> Callable[[Any], Any]:
        """Outputs on one batch."""

        def predict(inputs: Any) -> Any:
            args, kwargs = arguments(inputs)
            with torch.no_grad():
                return model(*args, **kwargs)

        return predict

    def slow(self, low: Format) -> str:
        """Why ``low`` gains nothing for products, measured; empty if it does."""
        args, _ = examples(self.program) if self.program is not None else ((), {})
        speed = rate_here(device_of(self.original, args), low).speed
        return "" if speed > 1 else f"{1 / speed:.1f} times slower than fp32 (measured)"


def _check(model: nn.Module, settings: MixedPrecisionConfig) -> None:
    if settings.ports:
        raise UsageError(
            "inputs and outputs name nodes of a graph, which a module does not have",
            fix="leave them out",
        )
    if settings.backend != "default":
        raise UsageError(
            f"backend {settings.backend!r} does not run PyTorch modules",
            fix='use backend="default"',
        )
    if settings.device in {"npu", "xpu"}:
        raise UsageError(
            f"device {settings.device!r} is not supported for PyTorch modules",
            fix='use device="cpu" or "gpu"',
        )
    if settings.device == "gpu" and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device", fix='use device="cpu"')
    if settings.device == "gpu" and device_of(model, ()) != "cuda":
        raise UsageError('the model is not on device "gpu"', fix="give model.cuda()")


def _program(model: nn.Module, example: Any) -> ExportedProgram | None:
    args, kwargs = arguments(example)
    try:
        return export_freely(model, args, kwargs)
    except ModelError as error:
        warnings.warn(f"converted module by module: {error.what}", stacklevel=2)
        return None


def arguments(example: Any) -> Arguments:
    """Arguments to call a model with: a mapping by keyword, a tuple or list in order."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, tuple | list) else (example,)), {}

"""An ``nn.Module`` as the subject of ``fit``."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finecast.compat.neural_compressor.config import MixedPrecisionConfig
from finecast.compat.neural_compressor.modules import convertible, lower_modules
from finecast.errors import UsageError
from finecast.files import write_bytes
from finecast.formats import Format
from finecast.frontends.torch.aten import DTYPES
from finecast.plan import Plan
from finecast.policy import Policy, Scope
from finecast.rules import NodeView
from finecast.torch.convert import convert
from finecast.torch.planning import device_of
from finecast.torch.rates import rate_here


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchResult:
    """A converted module; ``lowered`` counts low ops, or low modules."""

    model: nn.Module
    lowered: int

    def save(self, root: str | Path) -> None:
        """Write ``best_model.pt`` (the state) and the plan, if any, to a folder.

        Raises:
            UsageError: If they cannot be written.
        """
        folder = Path(root)
        state = io.BytesIO()
        torch.save(self.model.state_dict(), state)
        write_bytes(folder / "best_model.pt", state.getvalue(), make_folder=True)
        plan: Plan | None = getattr(self.model, "finecast_plan", None)
        if plan is not None:
            write_bytes(folder / "plan.json", plan.to_json().encode(), make_folder=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSubject:
    """A module; ``args`` are example inputs, None where there are none."""

    original: nn.Module
    types: Mapping[str, str]
    low: Format
    args: tuple[Any, ...] | None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        settings: MixedPrecisionConfig,
        low: Format,
        dataloader: Iterable[Any] | None,
    ) -> TorchSubject:
        """Look at ``model``; example inputs come from the settings or the first batch.

        Raises:
            UsageError: If a setting does not apply to modules.
        """
        if settings.inputs or settings.outputs:
            raise UsageError(
                "inputs and outputs name nodes of a graph, which a module does not have",
                fix="leave them out",
            )
        if settings.backend != "default":
            raise UsageError(
                f"backend {settings.backend!r} does not run PyTorch modules",
                fix='use backend="default"',
            )
        if settings.device == "gpu" and not torch.cuda.is_available():
            raise UsageError("there is no CUDA device", fix='use device="cpu"')
        example = settings.example_inputs
        if example is None and dataloader is not None:
            example = next(iter(dataloader))[0]
        return cls(original=model, types=convertible(model), low=low, args=_arguments(example))

    def build(self, kept: frozenset[str]) -> TorchResult:
        """Plan the whole graph where there are inputs to capture it; else by modules."""
        chosen = {name: kind for name, kind in self.types.items() if name not in kept}
        if self.args is None:
            module = lower_modules(self.original, chosen, DTYPES[self.low])
            return TorchResult(model=module, lowered=len(chosen))

        def rule(view: NodeView) -> str | None:
            return "fp32" if view.node.scope in kept else None

        # Where no gain is seen on these inputs: a conversion was asked for all the same.
        for scope in (Scope.AUTO, Scope.MATMULT):
            policy = Policy(scope=scope, formats=(self.low,))
            graph = convert(self.original, self.args, policy, user_rules={"fit": rule})
            plan: Plan = graph.finecast_plan  # type: ignore[assignment]
            lowered = sum(f is self.low for f in plan.formats.values())
            if lowered:
                break
        return TorchResult(model=graph, lowered=lowered)

    def predict(self, model: nn.Module, inputs: Any) -> Any:
        """Outputs on one batch."""
        with torch.no_grad():
            return model(*(_arguments(inputs) or ()))

    def slow(self, low: Format) -> str:
        """Products in ``low``, measured against fp32."""
        speed = rate_here(device_of(self.original, self.args or ()), low).speed
        return "" if speed > 1 else f"{1 / speed:.1f} times slower than fp32 (measured)"


def _arguments(example: Any) -> tuple[Any, ...] | None:
    if example is None:
        return None
    return tuple(example) if isinstance(example, tuple | list) else (example,)

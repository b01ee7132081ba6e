"""The result of ``fit`` for an ``nn.Module``: in memory, saved and loaded."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, SupportsIndex

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from finecast.compat.neural_compressor.exporting import export_like
from finecast.compat.neural_compressor.modules import LowModule, convertible, lower_modules
from finecast.engines.torch.session import runnable
from finecast.errors import ModelError, UsageError
from finecast.files import write_bytes
from finecast.frontends.torch.aten import DTYPES
from finecast.frontends.torch.converted import ConvertedModule, check_types_stay
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.planning.plan import Plan
from finecast.rules.policy import low_format
from finecast.subjects.torch import files as torch_files

STATE: Final = "best_model.pt"
PROGRAM: Final = "best_model.pt2"
SETTINGS: Final = "best_configure.json"
_VERSION: Final = 1


class TorchResult(nn.Module):
    """A converted module, called as the original is.

    Attributes:
        model: The converted module itself.
        lowered: How many ops (or modules) are low.
        products: How many of them are matrix products or convolutions.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        precision: Format,
        lowered: int,
        products: int,
        modules: Mapping[str, str] | None = None,
        program: ExportedProgram | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.precision = precision
        self.lowered = lowered
        self.products = products
        self.lowered_modules = dict(modules or {})
        self.program = program
        self.training = model.training  # a planned graph is in evaluation mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The converted module's outputs."""
        return self.model(*args, **kwargs)

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> TorchResult:
        """Refuse another type before any module has it: parts are applied to one by one."""
        for part in self.modules():
            if isinstance(part, ConvertedModule | LowModule):
                check_types_stay(part, fn)
        return super()._apply(fn, recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchResult:
        """A result with tensors of its own; the program never changes, and is shared."""
        memo[id(self)] = made = TorchResult(
            copy.deepcopy(self.model, memo),
            precision=self.precision,
            lowered=self.lowered,
            products=self.products,
            modules=self.lowered_modules,
            program=self.program,
        )
        return made

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """A planned graph is saved with its program, which torch does not pickle.

        Raises:
            UsageError: If it is one.
        """
        if self.program is not None:
            raise UsageError(
                "the result of fit cannot be pickled, as by torch.save",
                fix="use result.save(folder), and load(folder); or torch.save(result.model)",
            )
        return super().__reduce_ex__(protocol)

    def save(self, root: str | Path) -> None:
        """Write the model to the folder ``root``, from where ``load`` reads it.

        A planned graph is saved as a program, ``best_model.pt2``, and ``plan.json``. A module
        converted module by module is saved as its state, ``best_model.pt``, and the names of
        low modules, ``best_configure.json``.

        Raises:
            UsageError: If they cannot be written.
        """
        folder = Path(root)
        if self.program is not None:
            self._save_program(folder, self.program)
            return
        state = io.BytesIO()
        torch.save(self.model.state_dict(), state)
        settings = {
            "version": _VERSION,
            "precision": self.precision.label,
            "modules": self.lowered_modules,
        }
        write_bytes(folder / STATE, state.getvalue(), make_folder=True)
        write_bytes(folder / SETTINGS, json.dumps(settings, indent=1).encode())
        (folder / PROGRAM).unlink(missing_ok=True)

    def _save_program(self, folder: Path, program: ExportedProgram) -> None:
        assert isinstance(self.model, GraphModule)
        plan: Plan = self.model.finecast_plan  # type: ignore[assignment]
        write_bytes(folder / "plan.json", plan.to_json().encode(), make_folder=True)
        torch_files.save(export_like(self.model, program), folder / PROGRAM, plan=plan)
        (folder / STATE).unlink(missing_ok=True)
        (folder / SETTINGS).unlink(missing_ok=True)


def of_graph(
    module: nn.Module, plan: Plan, low: Format, program: ExportedProgram
) -> TorchResult:
    """The result of planning a whole graph."""
    ops = [d.op for d in plan.decisions if d.format is low]
    return TorchResult(
        module,
        precision=low,
        program=program,
        lowered=len(ops),
        products=sum(by_name(op).matmul_engine for op in ops),
    )


def load_module(folder: Path, model: nn.Module | None, *, trust: bool = False) -> TorchResult:
    """Read what ``TorchResult.save`` wrote to ``folder``.

    Args:
        folder: The folder.
        model: The fp32 module; needed if the folder has a state and no program.
        trust: Whether the program may import what it names.

    Raises:
        UsageError: If ``model`` is needed and not given.
        ModelError: If the files are damaged, or another module's.
    """
    if (folder / PROGRAM).is_file():
        program = torch_files.load(folder / PROGRAM, trust=trust)
        plan = Plan.load(folder / "plan.json")
        module = runnable(program)
        module.finecast_plan = plan  # type: ignore[assignment]
        low = next((f for f in plan.formats.values() if f is not Format.FP32), Format.BF16)
        return of_graph(module, plan, low, program)
    if model is None:
        raise UsageError(
            f"{STATE} is the state of a module",
            where=str(folder),
            fix="give the fp32 module, too: load(folder, model)",
        )
    precision, names = _settings(folder / SETTINGS)
    there = convertible(model)
    unlike = next((n for n, kind in names.items() if there.get(n) != kind), None)
    if unlike is not None:
        raise _unlike(folder, f"it has no {names[unlike]} called {unlike!r}")
    low_model = lower_modules(model, names, DTYPES[precision])
    try:
        state = torch.load(folder / STATE, weights_only=True)
        low_model.load_state_dict(state)
    except Exception as error:  # torch's reader may raise anything for a damaged file
        raise _unlike(folder, str(error).strip().splitlines()[0]) from error
    count = len(names)
    return TorchResult(
        low_model, precision=precision, modules=names, lowered=count, products=count
    )


def _settings(path: Path) -> tuple[Format, dict[str, str]]:
    try:
        stored = json.loads(path.read_text())
        version, precision, names = (stored[k] for k in ("version", "precision", "modules"))
        low, named = low_format(precision), dict(names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise ModelError(
            f"cannot be read: {error}", where=str(path), fix="save the model again"
        ) from error
    if version != _VERSION:
        raise ModelError(
            f"version {version}, not {_VERSION}", where=str(path), fix="save the model again"
        )
    return low, named


def _unlike(folder: Path, why: str) -> ModelError:
    return ModelError(
        f"the files are not of this module: {why}",
        where=str(folder),
        fix="give the module that was converted, of the same class and sizes",
    )

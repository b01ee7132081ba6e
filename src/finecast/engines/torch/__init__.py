"""PyTorch as an engine: programs run as they are, and are timed as they are deployed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch.export import ExportedProgram

from finecast.engines.base import Capability, Engine, Loadable, Session
from finecast.engines.torch.integers import Prepare
from finecast.engines.torch.rates import capabilities, rate_here
from finecast.engines.torch.session import ModuleSession, runnable
from finecast.errors import EngineError
from finecast.frontends.torch.archive import load_program
from finecast.frontends.torch.codes import CODES
from finecast.frontends.torch.runnable import RunnableModule
from finecast.graph import Node
from finecast.numbers.formats import Format
from finecast.plugin import imported_on_use

if TYPE_CHECKING:
    # Names of this room for others, as plugins: imported on first use.
    from finecast.engines.torch.costs import CompiledCost as CompiledCost
    from finecast.engines.torch.rates import tf32_products as tf32_products
    from finecast.engines.torch.session import Arguments as Arguments
    from finecast.engines.torch.session import ProgramSignature as ProgramSignature
    from finecast.engines.torch.session import check_no_autocast as check_no_autocast
    from finecast.engines.torch.session import examples as examples
else:
    __getattr__ = imported_on_use(__name__)

NAME: Final = "torch"


def devices() -> tuple[str, ...]:
    """The kinds of devices that PyTorch finds here: the CPU, and the accelerator if any."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ("CPU",) if accelerator is None else ("CPU", accelerator.type.upper())


@dataclass(frozen=True, eq=False, kw_only=True)
class TorchEngine(Engine):
    """Runs programs and modules; ops compute in the types that their graphs state.

    Attributes:
        eager: Whether models are timed as they are, and not compiled.
        device: The kind of device that the model's tensors are on.
        lacking: Native names of ops without a working kernel in low formats, for one model.
    """

    device: str = "CPU"
    eager: bool = False
    name: str = NAME
    reads_onnx: bool = False
    untried: str = (
        "int8 and fp8 are tried only if a policy names them, as auto:bf16,int8; weights are"
        " then frozen"
    )
    lacking: frozenset[str] = frozenset()

    @property
    def spec(self) -> str:
        """Eager or not, it plans as one engine of one name."""
        return self.judges if self.eager else f"{self.name}:{self.device}"

    @property
    def judges(self) -> str:
        """Modules as they are: to compile one takes longer than to run it on all data."""
        return f"torch-eager:{self.device}"

    def capabilities(self) -> Mapping[Format, Capability]:
        """By format, measured with short products."""
        return capabilities(self.device.lower())

    def capability(self, fmt: Format) -> Capability:
        """Of one format. Products on integers are those of compiled modules on a CPU.

        Those in tf32 are training steps'.
        """
        if (fmt.storage is fmt and fmt.encodes_results) or fmt in (*CODES, Format.TF32):
            return Capability(runs=True, speed=rate_here(self.device.lower(), fmt).speed)
        return self.capabilities()[fmt]

    def has_kernel(self, node: Node, fmt: Format) -> bool | None:
        """Whether an op has a kernel, as far as runs of this model have told."""
        works = fmt.multiplies_codes or node.native not in self.lacking
        return None if works else False

    def without(self, ops: frozenset[str]) -> TorchEngine:
        """The engine where these ops, too, have no kernel in low formats."""
        return replace(self, lacking=self.lacking | ops)

    def load(self, model: Loadable, *, profiling: bool = False) -> Session:
        """A session of a ``.pt2`` file, a program, a module or a copy of one.

        A file, which is loaded to be timed, runs as it is deployed: compiled in ``torch``.

        Raises:
            UsageError: If there is no such file.
            ModelError: If the file is no program, or would execute code.
            EngineError: If it is none of these.
        """
        del profiling
        if isinstance(model, Path):
            program = load_program(model, trust=False)
            prepare = _as_it_is if self.eager else deployed()
            model = RunnableModule(module=prepare(runnable(program)), program=program)
        if isinstance(model, ExportedProgram):
            model = RunnableModule(module=runnable(model), program=model)
        if isinstance(model, RunnableModule):
            return ModuleSession(runnable=model)
        raise EngineError(
            "PyTorch cannot load the model: it is no exported program",
            fix="give a .pt2 file, or use another engine",
        )


def deployed() -> Prepare:
    """``torch.compile`` where there is a C++ compiler for it, else the module as it is."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return _as_it_is
    return torch.compile


def _as_it_is(module: torch.nn.Module) -> torch.nn.Module:
    return module


def compiled(device: str) -> TorchEngine:
    """The engine ``torch``."""
    return TorchEngine(device=_known(device))


def eager(device: str) -> TorchEngine:
    """The engine ``torch-eager``."""
    return TorchEngine(device=_known(device), eager=True)


def _known(device: str) -> str:
    if device.upper() not in devices():
        raise EngineError(
            f"PyTorch has no device {device!r} here", fix=f"use one of {', '.join(devices())}"
        )
    return device.upper()

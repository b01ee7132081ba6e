"""The emulator: an engine that computes as a device that is not here would."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, final

import onnx_ir as ir

from finecast.devices.emulation import Emulation, Setting, setting_of
from finecast.devices.targets import load_target
from finecast.engines import EMULATOR
from finecast.engines.base import Capability, Engine, Session
from finecast.engines.emulator.session import EmulatorSession
from finecast.engines.loading import exact_engine
from finecast.errors import EngineError, ModelError, naming
from finecast.files.staging import staging
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import Prepared
from finecast.frontends.onnx.blocks import decoded
from finecast.frontends.onnx.expand import expand_accumulations, split_norms
from finecast.frontends.onnx.opset import raise_opset
from finecast.frontends.onnx.reader import read
from finecast.frontends.onnx.source_types import stored_formats, widen
from finecast.frontends.onnx.writer import EditedModel
from finecast.graph import Node
from finecast.numbers.formats import Format
from finecast.ops import OpKind, lookup
from finecast.planning.adjustments import Adjustment
from finecast.rules.policy import Policy, Scope

# The first one with casts to bf16; Clip has its bounds as inputs since 11.
_OPSET: Final = 13


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatorEngine(Engine):
    """Runs models as a target would; ``emulation`` states its options."""

    emulation: Emulation
    device: str = field(init=False)
    name = EMULATOR

    def __post_init__(self) -> None:
        """The device is the one that is emulated."""
        object.__setattr__(self, "device", self.emulation.target.name)

    @property
    def emulates(self) -> Emulation:
        """The device, with the options of its compiler."""
        return self.emulation

    @property
    def label(self) -> str:
        """The name with the device."""
        return f"{EMULATOR}:{self.device}"

    def capabilities(self) -> Mapping[Format, Capability]:
        """Formats and their speeds, by the target's documented rates of matrix products."""
        engine = self.emulation.target.engine_for(OpKind.MATMUL)
        base = engine.rate_tflops(Format.FP32)
        by_format: dict[Format, Capability] = {}
        for fmt in Format:
            rate = engine.rate_tflops(fmt)
            speed = rate / base if rate is not None and base else None
            reason = "" if rate is not None else f"{self.device} has no {fmt.label}"
            by_format[fmt] = Capability(runs=rate is not None, speed=speed, reason=reason)
        return by_format

    def has_kernel(self, node: Node, fmt: Format) -> bool | None:
        """Whether the part of the device that runs the op computes in ``fmt``.

        Of formats for operands alone a device has only those that it does not run in a wider
        one, because the others gain nothing (``int8_weights`` gains by reading less); tf32 it
        has only for products.
        """
        info = lookup(node.native)
        real = self.emulation.target.engine_for(info.kind).computes_in(fmt)
        if fmt is Format.TF32:
            return info.matmul_engine and real is fmt
        if real is None:
            return False
        gains = not fmt.encodes_values or fmt.encodes_results
        return None if gains or real.bits <= fmt.bits else False

    def load(self, model: Path | bytes, *, profiling: bool = False) -> EmulatorSession:
        """Load a model, cast as the options say; low types in it are emulated too."""
        if profiling:
            raise EngineError(
                "the emulator has no profile of the device", fix="use ladder, or tune --target"
            )
        if isinstance(model, bytes):
            with staging() as folder:
                path = folder / "model.onnx"
                path.write_bytes(model)
                with naming(path, "the model in memory"):
                    return self.load(path)
        prepared = prepare(frontend.load(model), self.emulation)
        return self.session(prepared, fixed=setting_of(prepared.graph, self.emulation))

    def session(
        self,
        prepared: Prepared,
        *,
        kernels: Sequence[frozenset[int]] | None = None,
        fixed: Setting | None = None,
    ) -> EmulatorSession:
        """A session on a prepared model.

        Args:
            prepared: The result of ``prepare``.
            kernels: Nodes that run as one; by default those of ``device_kernels``.
            fixed: The one setting to build for; None for any setting (``apply``).
        """
        return EmulatorSession(
            copy=partial(emulated_copy, prepared),
            emulation=self.emulation,
            setting=fixed or setting_of(prepared.graph, self.emulation),
            low=stored_formats(prepared.binding.values),
            kernels=kernels,
            switched=fixed is None,
        )


def emulated_copy(prepared: Prepared) -> EditedModel:
    """A copy of an ONNX model, to which a device's roundings are added."""
    return EditedModel(*read(prepared.model.clone()), emulates=True)


def prepare(
    file: frontend.OnnxFile, emulation: Emulation, adjustments: Sequence[Adjustment] = ()
) -> Prepared:
    """A model ready to be emulated: named nodes, known types, opset 13 or later.

    Its operands are adjusted. Reductions are written out in steps where the emulation rounds
    each step. Values that the model itself stores in a low type are still rounded to it.
    """
    prepared = frontend.prepare(file, Policy(scope=Scope.NONE))
    if adjustments:
        prepared = prepared.adjusted(adjustments)
    model = widen(decoded(prepared.model))
    with suppress(ModelError):  # else the model's own opset may be enough
        model = raise_opset(model, _OPSET)
    change = _rewriting(emulation)
    model = model if change is None else change(model)
    if model is prepared.model:
        return prepared
    return frontend.prepare(replace(file, model=model, message=None), Policy(scope=Scope.NONE))


def _rewriting(emulation: Emulation) -> Callable[[ir.Model], ir.Model] | None:
    if not emulation.mixed_accumulation:
        return expand_accumulations
    return split_norms if emulation.rounds_normalized else None


def exact_session(model: Path | bytes) -> Session:
    """A session that computes the model's own numbers; not for timing.

    Where ONNX Runtime lacks kernels for the model's low types they are emulated: the model
    computes in fp32, and values that it stores in a low type are rounded to it.

    Raises:
        EngineError: If neither runs the model.
    """
    try:
        return exact_engine().load(model)
    except EngineError:
        return exact_emulator().load(model)


def exact_emulator() -> EmulatorEngine:
    """An emulator that rounds values which a model stores in a low type, and nothing else."""
    return EmulatorEngine(emulation=Emulation(target=load_target("sm80")))

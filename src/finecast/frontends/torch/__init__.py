"""The PyTorch frontend: captures modules as neutral graphs, and applies plans to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from finecast.frontends.joining import ModelPair
from finecast.frontends.prepared import AppliedModel, ModelLibrary, PreparedModel
from finecast.frontends.replaying import check_made_for, edits_of
from finecast.frontends.torch.capture import Captured, capture
from finecast.frontends.torch.codes import CODES, takes_codes
from finecast.frontends.torch.codes import PRODUCTS_OF_VALUES as PRODUCTS_OF_VALUES
from finecast.frontends.torch.converted import ConvertedModule
from finecast.frontends.torch.input_check import input_check
from finecast.frontends.torch.native import TorchNative, adjusted, apply_edits, decoded
from finecast.frontends.torch.reader import decided_by_data, hinted_shapes
from finecast.frontends.torch.reader import device_kind as device_kind
from finecast.frontends.torch.runnable import Shown
from finecast.frontends.torch.scaled_products import takes_sizes
from finecast.frontends.torch.straight_through import state_gradients
from finecast.graph import Node
from finecast.numbers.formats import Format
from finecast.planning.adjustments import Adjustment
from finecast.planning.edits import Edit
from finecast.planning.plan import Plan
from finecast.planning.provenance import Provenance
from finecast.plugin import imported_on_use
from finecast.rules.override import names_biases
from finecast.rules.policy import Adjust, Policy, Scope
from finecast.rules.user_rules import check_names

if TYPE_CHECKING:
    # Names of this room for others, as plugins: imported on first use.
    from finecast.frontends.torch.aten import DTYPES as DTYPES
    from finecast.frontends.torch.capture import evaluating as evaluating
    from finecast.frontends.torch.capture import quiet as quiet
    from finecast.frontends.torch.capture import shared_copy as shared_copy
    from finecast.frontends.torch.converted import check_types_stay as check_types_stay
    from finecast.frontends.torch.expand import BIASES as BIASES
    from finecast.frontends.torch.expand import expand_ops as expand_ops
    from finecast.frontends.torch.native import convert_element_type as convert_element_type
    from finecast.frontends.torch.native import rounded_to as rounded_to
    from finecast.frontends.torch.probing import first_order as first_order
    from finecast.frontends.torch.reader import FxBinding as FxBinding
    from finecast.frontends.torch.reader import mark_regions as mark_regions
    from finecast.frontends.torch.reader import read as read
    from finecast.frontends.torch.restating import conversion as conversion
    from finecast.frontends.torch.restating import free_of_strides as free_of_strides
    from finecast.frontends.torch.restating import read_whole_memory as read_whole_memory
else:
    __getattr__ = imported_on_use(__name__)

CASTS: Final = ModelLibrary(name="PyTorch", types=(), states=(Format.BF16, Format.FP16))
"""What graphs state by casts alone, as programs for an emulated device."""
TRAINED: Final = replace(CASTS, states=(*CASTS.states, Format.FP8_DYNAMIC_ROW, Format.TF32))
"""What training graphs state: casts, and products whose kernels round their operands."""
_CPU: Final = "cpu"
_AWAY: Final = "emulator"
"""The engine of plans for devices that are not here."""
LIBRARY: Final = replace(CASTS, states=(*CASTS.states, *CODES))
"""What programs state, which are compiled with frozen weights for products of integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile:
    """A program or a module as it was given; neither is ever changed.

    Attributes:
        path: The program's file; for a model in memory a name that no file has.
        name: What messages call it.
        model: The module or the program.
        program: The module as it was exported, or the program itself.
        digest: Identifies it in plans and studies.
        size_bytes: Bytes of the file, or of the module's state.
        converted: The conversion that made it; None if finecast did not.
    """

    path: Path
    name: str
    model: torch.nn.Module | ExportedProgram
    program: ExportedProgram
    digest: str
    size_bytes: int
    external: tuple[Path, ...] = ()
    converted: Provenance | None = None
    told: tuple[str, ...] = ()
    _captured: dict[tuple[bool, bool], Captured] = field(
        default_factory=dict[tuple[bool, bool], Captured], repr=False
    )

    def captured(self, policy: str, adjustments: Sequence[Adjustment] = ()) -> Captured:
        """The graph for a policy of that label: with scope none nothing is folded.

        Its operands are adjusted.
        """
        fold = policy.partition(":")[0] != Scope.NONE.value
        key = fold, names_biases()
        if key not in self._captured:
            self._captured[key] = capture(self.program, (), fold=fold)
        return adjusted(self._captured[key], adjustments)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchPrepared(Shown, PreparedModel):
    """A graph of PyTorch's ops ready to be planned.

    Of a program it makes copies that show and round its values; a training graph that the
    compiler captured is planned alone, and ``source`` is None.
    """

    source: Captured | None = None
    of: ModelLibrary = LIBRARY
    adjusts = (Adjust.RANGE,)
    names_stay = False

    @property
    def captured(self) -> Captured:
        """The program that was captured."""
        assert self.source is not None
        return self.source

    def shown(self) -> tuple[Captured, GraphModule]:
        """The program, and its module."""
        return self.captured, self.captured.module

    def roundable(self) -> TorchNative:
        """A copy whose values can be rounded."""
        return TorchNative.of(self.captured)

    def pair(self, low: PreparedModel, *, by_types: bool) -> ModelPair:
        """Layers of ``low`` on codes are each one op beside those of this model."""
        del by_types
        assert isinstance(low, TorchPrepared)
        return ModelPair.of(self.roundable(), TorchNative.of(decoded(low.captured)))

    def states_op(self, node: Node, fmt: Format, *, signed: bool) -> bool:
        """Products on codes are those of layers, for a GPU of sizes that its kernels take.

        Rules of their own judge those of training graphs.
        """
        if fmt not in CODES or self.source is None:
            return True
        weights = self.graph.read(node, 1) if takes_codes(node, fmt) else None
        if weights is None or not fmt.multiplies_integers:
            return weights is not None
        on_gpu = signed or device_kind(self.captured.module) != _CPU
        return not on_gpu or takes_sizes(weights.shape or ())

    def adjusted(self, adjustments: Sequence[Adjustment]) -> TorchPrepared:
        """A copy with adjusted operands, to plan by; plans are applied to the original."""
        source = adjusted(self.captured, adjustments)
        return replace(self, graph=source.graph, source=source)

    def static_shapes(self, inputs: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """Shapes by observable name; those of the example inputs where sizes are free."""
        given = {v.name: v.shape for v in self.graph.inputs}
        shapes = hinted_shapes(self.captured.binding)
        hints = {v.name: shapes[v.id] for v in self.graph.inputs}
        if all(tuple(inputs.get(n, ())) == hints[n] for n in given):
            free = decided_by_data(self.captured.binding)
            return {n: shapes[i] for n, i in self.observable().items() if i not in free}
        return self.graph.static_shapes(self.observable())


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchApplied(Shown, AppliedModel):
    """The module that a plan gives, and the edits that made it."""

    captured: Captured

    def shown(self) -> tuple[Captured, GraphModule]:
        """The program, and the module of the plan."""
        return self.captured, self.model


def prepare(file: TorchFile, policy: Policy) -> TorchPrepared:
    """Check that the graph has all that ``policy`` names.

    Raises:
        UsageError: If ``policy`` names a node or an op that is not there.
    """
    captured = file.captured(policy.label)
    check_names(policy, captured.graph)
    return TorchPrepared(graph=captured.graph, source=captured)


def applied(captured: Captured, plan: Plan, where: str = "") -> TorchApplied:
    """The module of a plan, with the plan and the original's name ``where`` attached.

    Raises:
        ModelError: If the plan was made for another model; names ``where``.
    """
    edits = planned_edits(captured, plan, where)
    model = apply(captured, edits, for_gpu=_for_gpu(plan))
    model.eval()
    model.attach(plan, where)
    return TorchApplied(model=model, captured=captured, graph=captured.graph, edits=edits)


def _for_gpu(plan: Plan) -> bool:
    """Whether a plan for a device that is not here has products that GPUs alone have.

    Targets of CPUs have no rates of ``int8_dynamic_row``: how the compiler runs it there
    depends on what it makes of a module.
    """
    return plan.engine == _AWAY and Format.INT8_DYNAMIC_ROW in plan.low_formats


def planned_edits(captured: Captured, plan: Plan, where: str = "") -> tuple[Edit, ...]:
    """The edits that ``plan`` asks for; errors name ``where``.

    Raises:
        ModelError: If the plan was made for another model.
    """
    check_made_for(plan, captured.graph.digest, where)
    plan.check(captured.graph, where=where)
    # Inductor recognises codes only right before a product.
    return edits_of(captured.graph, plan, moves_codes=False)


def apply(
    captured: Captured, edits: Sequence[Edit], *, for_gpu: bool = False
) -> ConvertedModule:
    """A copy of the captured module with ``edits`` made, which may be ``for_gpu``.

    Parameters that stay fp32 are shared with the module that was captured; tensors that the
    graph writes to (running statistics, caches) are not. The copy checks its inputs.
    """
    copy = TorchNative.of(captured)
    copy.for_gpu = for_gpu
    with torch.no_grad():
        apply_edits(copy, edits)
    module = copy.binding.module
    state_gradients(module)
    return ConvertedModule.of(module, input_check(module, captured.program))

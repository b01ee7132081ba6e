"""An ONNX model as a ``NativeModel``: copies whose values are rounded, always or at a switch.

Edits of a plan are replayed by ``writer.py``, which keeps the names and casts of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, Final, final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.frontends.native_model import NativeModel
from finecast.frontends.onnx.constants import constant_value
from finecast.frontends.onnx.placing import place_after
from finecast.frontends.onnx.reader import read
from finecast.frontends.onnx.roundops import RoundOps
from finecast.frontends.onnx.statements import STATEMENTS
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounder
from finecast.planning.edits import Use
from finecast.planning.switches import SWITCH

OFFSET: Final = "finecast_offset"
"""The extra input of a model that rounds stochastically: the index of its first sample."""
# The kinds of ops as ONNX calls them, but for those that give bool.
_KINDS: Final[Mapping[str, str]] = {
    "abs": "Abs",
    "add": "Add",
    "clamp": "Clip",
    "gather": "Gather",
    "multiply": "Mul",
    "reduce_sum": "ReduceSum",
    "select": "Where",
    "subtract": "Sub",
}
_BOOL: Final[Mapping[str, str]] = {"is_inf": "IsInf", "is_nan": "IsNaN", "less": "Less"}


@final
class OnnxNative(NativeModel):
    """A model that is changed in place; its tensors are values of onnx_ir.

    Nodes that compute from a value are placed after the node that makes this value, in the
    order in which they were made: until ``finish`` they are in no graph.
    """

    library: ClassVar[str] = "ONNX"
    states: ClassVar[Collection[Format]] = STATEMENTS.keys()

    def __init__(self, model: ir.Model) -> None:
        graph, self.binding = read(model)
        super().__init__(graph)
        self.main = model.graph
        self.inputs: dict[str, ir.Value] = {}
        self._ops = RoundOps(register=self.main.register_initializer, offset=self._offset)
        self._ends = [id(end) for end in self.main.outputs]
        # For each value the nodes that compute from it, and for what they give that value.
        self._made: dict[ir.Value, list[ir.Node]] = {}
        self._sources: dict[ir.Value, ir.Value] = {}
        self._constants: set[ir.Value] = set()

    def tensor(self, value: int) -> ir.Value:
        """The value of onnx_ir."""
        return self.binding.values[value]

    def read_at(self, node: int, index: int) -> ir.Value:
        """The value at an input of a node, or at an output of a body."""
        port = self.binding.ports[node][index]
        assert port is not None
        read_there = (
            port.owner.inputs if isinstance(port.owner, ir.Node) else port.owner.outputs
        )
        found = read_there[port.index]
        assert found is not None
        return found

    def give(self, value: int, uses: Iterable[Use], tensor: ir.Value) -> None:
        """Let ``uses`` of a value read ``tensor``; an output of the model keeps its name."""
        for use in uses:
            if use.node is None:
                self._end_in(self.binding.values[value], tensor)
            elif (port := self.binding.ports[use.node][use.index]) is not None:
                if isinstance(port.owner, ir.Node):
                    port.owner.replace_input_with(port.index, tensor)
                else:
                    port.owner.outputs[port.index] = tensor

    def _end_in(self, value: ir.Value, tensor: ir.Value) -> None:
        for number, end in enumerate(self._ends):
            before = self.main.outputs[number]
            if end == id(value) and before is not tensor:
                self.main.outputs[number] = tensor
                if not before.is_graph_input():
                    before.name, tensor.name = f"{before.name}_exact", before.name

    def op(self, kind: str, *inputs: Any, **attributes: Any) -> ir.Value:
        """The result of a node; bounds of a clamp are inputs, an axis 0 is left out."""
        values = (x for x in inputs if isinstance(x, ir.Value) and x not in self._constants)
        sources = [s for s in (self._sources.get(x, x) for x in values) if not self._is_own(s)]
        source = sources[0] if sources else self.inputs[SWITCH]
        label = f"{source.name}_{kind}{len(self._nodes(source))}"
        ops = self._begin(label)
        given = [*inputs, *(x for x in attributes.values() if isinstance(x, float))]
        given = given[:2] if kind == "gather" else given
        read_ones = [x if isinstance(x, ir.Value) else self._number(x) for x in given]
        logical = kind in _BOOL or kind == "gather"
        kept = {"keepdims": 1} if attributes.get("keep_dims") else {}
        out = ops.op(
            _BOOL.get(kind) or _KINDS[kind],
            *read_ones,
            dtype=ir.DataType.BOOL if logical else ir.DataType.FLOAT,
            **kept,
        )
        out.shape = None if kept else out.shape
        if kind == "select":
            out.shape = read_ones[1].shape
        return self._made_of(source, out)

    def _is_own(self, value: ir.Value) -> bool:
        """Whether a value is an extra input, and so none that nodes are placed after."""
        return any(value is x for x in self.inputs.values())

    def _nodes(self, source: ir.Value) -> list[ir.Node]:
        return self._made.setdefault(source, [])

    def _begin(self, label: str) -> RoundOps:
        self._ops.made, self._ops.label, self._ops.count = [], label, 0
        return self._ops

    def _number(self, x: float | list[int]) -> ir.Value:
        dtype = np.float32 if isinstance(x, float) else np.int64
        return self._ops.constant(np.array(x, dtype=dtype))

    def _made_of(self, source: ir.Value, out: ir.Value) -> ir.Value:
        self._nodes(source).extend(self._ops.made)
        self._sources[out] = source
        return out

    def rounded(self, tensor: ir.Value, how: Rounder) -> ir.Value:
        """By casts where ONNX Runtime's are right, else by arithmetic."""
        source = self._sources.get(tensor, tensor)
        label = f"{source.name}_view{len(self._nodes(source))}_{how.format.label}"
        _, out = self._ops.round(tensor, how, label)
        return self._made_of(source, out)

    def constant(self, array: NDArray[np.float32]) -> ir.Value:
        """A constant of the main graph, which bodies read, too."""
        value = constant_value(f"finecast_constant_{len(self._constants)}", array)
        self.main.register_initializer(value)
        self._constants.add(value)
        return value

    def add_switch(self) -> ir.Value:
        """An extra input, whose length is stated at the end."""
        return self._input(SWITCH, ir.DataType.BOOL, ())

    def add_input(self, name: str, shape: tuple[int, ...]) -> ir.Value:
        """An extra input in fp32."""
        return self._input(name, ir.DataType.FLOAT, shape)

    def _input(self, name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.Value:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self.inputs[name] = value
        self.main.inputs.append(value)
        return value

    def _offset(self) -> ir.Value:
        return self.inputs.get(OFFSET) or self._input(OFFSET, ir.DataType.INT64, ())

    def finish(
        self, switches: int = 0, outputs: Mapping[str, ir.Value] | None = None
    ) -> ir.Model:
        """The model, with all nodes that were made."""
        assert outputs is None
        if switches:
            self.switch_in(0).shape = ir.Shape([switches])
        prologue = self._made.pop(self.inputs[SWITCH], []) if SWITCH in self.inputs else []
        for source, nodes in self._made.items():
            place_after(source, nodes, self.main, prologue)
        first = next(iter(self.main), None)
        if first is None:
            self.main.extend(prologue)
        else:
            first.prepend(prologue)
        return self.binding.model

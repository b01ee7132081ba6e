"""Replays a plan's edits on an ``ov.Model``, in place.

Law: ops keep their names; inputs and outputs keep names, types and shapes unless the plan says
otherwise; constants are rounded to nearest from their original numbers. (OpenVINO does not
round to nearest when it makes a low constant of fp32 numbers.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from finecast.errors import ModelError
from finecast.frontends.exact_casts import BACK, FACTOR, in_blocks
from finecast.frontends.openvino.changes import Added, Changes, changes_of, keep
from finecast.frontends.openvino.messages import explain
from finecast.frontends.openvino.names import FreshOpNames
from finecast.frontends.openvino.quantization import fake_quantized, stored_codes
from finecast.frontends.openvino.reader import OvBinding
from finecast.frontends.openvino.types import (
    STATED,
    TYPES,
    element_type,
    hand_over,
    new_constant,
    numbers_of,
    port_key,
    take_names,
)
from finecast.graph import Graph
from finecast.numbers.encodings import Encoding
from finecast.numbers.formats import Format
from finecast.numbers.rounding import convert_constant
from finecast.numbers.scaled import Scaled
from finecast.planning.edits import (
    ConvertConstant,
    Edit,
    InsertCast,
    RoundTrip,
    SetFormat,
    SetPort,
    Use,
)

if TYPE_CHECKING:
    import openvino

CAST_SUFFIX: Final = "cast"
_CONVERT: Final = Added()


def apply_edits(
    graph: Graph,
    binding: OvBinding,
    edits: Iterable[Edit],
    rounded: Collection[int] = (),
) -> None:
    """Make ``edits`` in ``binding.model``, and note them there.

    Args:
        graph: The graph that was read from the model.
        binding: What the ids of the graph stand for.
        edits: The edits.
        rounded: Ids of values that are rounded in fp32 before they are cast to bf16.

    Raises:
        ModelError: If OpenVINO refuses the edited model.
    """
    writer = _Writer(graph, binding, rounded)
    for edit in edits:
        match edit:
            case SetFormat():
                writer.set_format(edit)
            case SetPort():
                writer.set_port(edit)
            case ConvertConstant():
                writer.convert_constant(edit)
            case InsertCast():
                writer.insert_cast(edit)
            case RoundTrip():
                writer.round_trip(edit)
    try:
        keep(binding.model, writer.changes)
        binding.model.validate_nodes_and_infer_types()
    except RuntimeError as error:
        raise ModelError(
            f"OpenVINO refuses the model in these types: {explain(error)}",
            fix="keep the op named in fp32 by --exclude or --op NAME=fp32",
        ) from error


class _Writer:
    def __init__(self, graph: Graph, binding: OvBinding, rounded: Collection[int]) -> None:
        self.graph = graph
        self.rounded = rounded
        self.binding = binding
        self.fresh = FreshOpNames(binding.model)
        self.changes = changes_of(binding.model) or Changes()

    def set_format(self, edit: SetFormat) -> None:
        """State the format where OpenVINO does not infer it: Converts and bodies' inputs."""
        old = self.binding.nodes[edit.node]
        if old is None:
            for index in self.graph.nodes[edit.node].outputs:
                assert index is not None
                self._declare(self.binding.values[index].get_node(), edit.to)
            return
        if old.get_type_name() != "Convert":
            return
        new = _converted(old.input_value(0), edit.to)
        name = old.get_friendly_name()
        self.changes.retyped(name, old.get_output_element_type(0).get_type_name())
        old.set_friendly_name(self.fresh(f"{name}_before"))
        new.set_friendly_name(name)
        hand_over(old.output(0), new.output(0))
        self.binding.nodes[edit.node] = new
        (entry,) = self.binding.entries[edit.node]
        self.binding.entries[edit.node] = (replace(entry, op=new),)
        index = self.graph.nodes[edit.node].outputs[0]
        assert index is not None
        self.binding.values[index] = new.output(0)

    def set_port(self, edit: SetPort) -> None:
        """Declare an input in another type; an output's type follows from its source."""
        if self.graph.values[edit.value].is_input:
            self._declare(self.binding.values[edit.value].get_node(), edit.to)

    def _declare(self, op: Any, fmt: Format) -> None:
        """Declare ``op`` in ``fmt`` if it is a Parameter; other ops infer their types."""
        if op.get_type_name() == "Parameter":
            before = op.get_element_type().get_type_name()
            self.changes.retyped(op.get_friendly_name(), before)
            op.set_element_type(element_type(fmt))
            op.validate_and_infer_types()

    def convert_constant(self, edit: ConvertConstant) -> None:
        """Let ``uses`` read the constant in another type; other readers keep the original."""
        new = self._converted_constant(edit.value, edit.to)
        self._give(edit.value, new.output(0), edit.uses)

    def _converted_constant(self, value: int, to: Format) -> openvino.Node:
        constant = self.binding.constants[value]
        new = new_constant(convert_constant(numbers_of(constant), to), to)
        what = Added(constant=self._read_as(value))
        return self._added(new, f"{constant.get_friendly_name()}_{to.label}", what)

    def _read_as(self, value: int) -> str:
        """The name of the op that gives a value; for a compressed constant its Convert."""
        name: str = self.binding.values[value].get_node().get_friendly_name()
        return name

    def _added(self, node: openvino.Node, name: str, what: Added = _CONVERT) -> openvino.Node:
        """``node``, noted as inserted and called ``name``, with a number if that is taken."""
        fresh = self.fresh(name)
        node.set_friendly_name(fresh)
        self.changes.added[fresh] = what
        return node

    def insert_cast(self, edit: InsertCast) -> None:
        """Insert one Convert for all ``uses`` that read the value in that format."""
        port = self.binding.values[edit.value]
        name = _name_at(port, f"{CAST_SUFFIX}_{edit.to.label}")
        if edit.value in self.rounded and edit.to is Format.BF16:
            port = self._rounded_first(port, name, blocks=in_blocks(self.graph, edit.value))
        new = self._added(_converted(port, edit.to), name)
        self._give(edit.value, new.output(0), edit.uses)

    def _rounded_first(
        self, port: openvino.Output, cast: str, *, blocks: bool
    ) -> openvino.Output:
        """The numbers of ``port`` rounded to bf16, in fp32; ``exact_casts`` explains how."""
        from openvino import opset13

        factor, back = (opset13.constant(np.float32(x)) for x in (FACTOR, BACK))
        # ``undo.py`` replaces each of these ops by its first input, which leads back to port.
        ops = {"scaled": opset13.multiply(port, factor)}
        if blocks:
            ops["part"] = opset13.add(ops["scaled"], port)
            ops["rounded"] = opset13.multiply(ops["part"], back)
        else:
            axis = opset13.constant(np.array([0], dtype=np.int64))
            ops["again"] = opset13.unsqueeze(port, axis)
            ops["part"] = opset13.add(ops["scaled"], ops["again"])
            ops["whole"] = opset13.multiply(ops["part"], back)
            ops["rounded"] = opset13.squeeze(ops["whole"], axis)
        for suffix, op in ops.items():
            self._added(op, f"{cast}_{suffix}", Added(rounds=Format.BF16.label))
        return ops["rounded"].output(0)

    def round_trip(self, edit: RoundTrip) -> None:
        """Let ``uses`` read the value rounded to a format, in fp32.

        A value goes through a Convert and one back, or a FakeQuantize; a constant is stored in
        the format.
        """
        if edit.to.format not in STATED:
            raise ModelError(
                f"OpenVINO models cannot state {edit.to.format.label} here",
                fix="use bf16, fp16 or fp8",
            )
        if edit.value in self.binding.constants:
            self._give(edit.value, self._stored(edit.value, edit.to), edit.uses)
            return
        read: dict[tuple[str, int], tuple[openvino.Output, list[Use]]] = {}
        for use in edit.uses:  # an earlier edit may have let them read a cast of the value
            assert use.node is not None
            port = self.binding.entries[use.node][use.index].port.get_source_output()
            read.setdefault(port_key(port), (port, []))[1].append(use)
        for port, uses in read.values():
            self._give(edit.value, self._rounded(port, edit.to), uses)

    def _rounded(self, port: openvino.Output, to: Encoding) -> openvino.Output:
        """The numbers of ``port`` rounded to ``to``, in fp32."""
        if isinstance(to, Scaled):
            name, what = _name_at(port, f"fq_{to.label}"), Added(rounds=to.label)
            return self._added(fake_quantized(port, to), name, what).output(0)
        low = _converted(port, to)
        return self._widened(self._added(low, _name_at(port, f"{CAST_SUFFIX}_{to.label}")))

    def _stored(self, value: int, to: Encoding) -> openvino.Output:
        """A constant stored in ``to`` and read as fp32."""
        if isinstance(to, Scaled):
            return self._stored_codes(value, to)
        return self._widened(self._converted_constant(value, to))

    def _widened(self, low: openvino.Node) -> openvino.Output:
        back = _converted(low.output(0), Format.FP32)
        return self._added(back, f"{low.get_friendly_name()}_back").output(0)

    def _stored_codes(self, value: int, encoding: Scaled) -> openvino.Output:
        """A constant stored as codes and decoded to fp32."""
        constant = self.binding.constants[value]
        nodes = stored_codes(numbers_of(constant), encoding)
        back = nodes.pop("_back")
        base = f"{constant.get_friendly_name()}_{encoding.label}"
        for suffix, node in nodes.items():
            node.set_friendly_name(self.fresh(f"{base}{suffix}"))
        what = Added(rounds=encoding.label, constant=self._read_as(value))
        return self._added(back, f"{base}_back", what).output(0)

    def _give(self, value: int, port: openvino.Output, uses: Iterable[Use]) -> None:
        """Let ``uses`` read ``port`` in place of the value."""
        for use in uses:
            if use.node is not None:
                self.binding.entries[use.node][use.index].port.replace_source_output(port)
                continue
            source = self.binding.values[value]
            for target in list(source.get_target_inputs()):
                if target.get_node().get_type_name() == "Result":
                    target.replace_source_output(port)
            if source.get_node().get_type_name() != "Parameter":
                take_names(source, port)


def _name_at(port: openvino.Output, what: str) -> str:
    """A name for an op that does ``what`` behind ``port``."""
    node = port.get_node()
    index = f".{port.get_index()}" if node.get_output_size() > 1 else ""
    return f"{node.get_friendly_name()}{index}/{what}"


def _converted(port: openvino.Output, fmt: Format) -> openvino.Node:
    from openvino import opset13

    return opset13.convert(port, TYPES[fmt])

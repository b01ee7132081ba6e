"""Converts models with other types of their own to fp32.

``take_to_fp32`` does so before a model in fp64, fp16, bf16 or int8 is planned
(``--from-type``). ``widen`` does so where an engine cannot run the model's low types: what it
runs rounds the values that were low.

Laws of ``take_to_fp32``: inputs and outputs keep their names and types, with casts beside
them. Every op that ONNX defines in fp32 computes in fp32, and others keep their type between
casts. Constants are converted and not cast. The result is an fp32 model like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.errors import ModelError, UsageError
from finecast.frontends.onnx.casts import merge_casts
from finecast.frontends.onnx.constants import (
    DATA_TYPES,
    PIECE,
    ComputedTensor,
    constant_reader,
)
from finecast.frontends.onnx.definitions import Definition, Ports, definition, normal_domain
from finecast.frontends.onnx.dequantizing import ON_CODES, Dequantizing
from finecast.frontends.onnx.editor import MARK, Editor, Port, every_value, name_nodes
from finecast.frontends.onnx.functions import inline_functions
from finecast.frontends.onnx.model import OnnxFile, staged
from finecast.frontends.onnx.types import bodies, check_inferable, infer
from finecast.naming import look_up
from finecast.numbers.encodings import Scaled
from finecast.numbers.formats import Format

SOURCE_TYPES: Final = {
    "fp64": ir.DataType.DOUBLE,
    "fp16": ir.DataType.FLOAT16,
    "bf16": ir.DataType.BFLOAT16,
}
"""Float types that a model can be converted from, by the values of ``--from-type``."""

CODES: Final = "int8"
"""The value of ``--from-type`` for models with QuantizeLinear and DequantizeLinear."""

STORED_KEY: Final = "finecast.stored"
"""Metadata of a value of a widened model: the low format that it was stored in."""

_FLOAT: Final = ir.DataType.FLOAT
_LOW: Final = {t: f for f, t in DATA_TYPES.items() if f is not Format.FP32}
_LABELS: Final = {dtype: label for label, dtype in SOURCE_TYPES.items()} | {_FLOAT: "fp32"}
# Element types as type strings of ONNX's definitions spell them: ``tensor(float16)``.
_NAMES: Final = {t: t.name.lower() for t in SOURCE_TYPES.values()}
_NO_ARITHMETIC: Final = frozenset({"Cast", "Constant"})
# Attributes that name an element type.
_TYPE_ATTRIBUTES: Final = frozenset(
    {"to", "dtype", "output_datatype", "output_dtype", "stash_type", "softmax_precision"}
)


def take_to_fp32(file: OnnxFile, source: str) -> OnnxFile:
    """``file`` converted to fp32 from the type ``source``, in a temporary folder.

    The result has the digest of ``file``: a plan names the model by it, and ``source``.

    Raises:
        UsageError: If ``source`` is no type to convert from, or no op computes in it.
        ModelError: If the model is malformed, or an op has bodies and no known definition.
    """
    known = {name: name for name in (*SOURCE_TYPES, CODES)}
    label = look_up(source, known, what="source type", where="--from-type")
    if file.from_type:
        if file.from_type == label:
            return file
        raise UsageError(
            f"the model is taken from {file.from_type} already",
            where="--from-type",
            fix="name one type",
        )
    model = _typed(file.model)
    came_as: Mapping[str, Scaled] = {}
    if label == CODES:
        came_as, notes = _dequantized(model)
    else:
        rewriting = _Rewriting(model, SOURCE_TYPES[label])
        if not rewriting.ops:
            raise _nothing(model, label)
        rewriting.run()
        notes = tuple(rewriting.notes)
    return replace(
        staged(file, model, f"{file.name}, taken to fp32"),
        from_type=label,
        original=file,
        came_as=came_as,
        told=notes,
    )


def _dequantized(model: ir.Model) -> tuple[Mapping[str, Scaled], tuple[str, ...]]:
    """Convert ``model`` to floats; returns how values were encoded, by name, and notes."""
    change = Dequantizing(model)
    change.run()
    if not change.ops:
        others = sorted({n.op_type for n in model.graph.all_nodes()} & ON_CODES)
        raise UsageError(
            "the model has no QuantizeLinear and DequantizeLinear that could be taken to fp32"
            + (f", but ops on quantized integers: {', '.join(others)}" if others else ""),
            where=f"--from-type {CODES}",
            fix="leave it out"
            + ("; or quantize with QuantFormat.QDQ, or give the fp32 model" if others else ""),
        )
    note = (
        "taken from int8: weights stay the rounded numbers that they were, values are in fp32,"
        " and results are compared with this fp32 model"
    )
    return change.came_as, (note,)


def _typed(model: ir.Model) -> ir.Model:
    """A copy without local functions, with the types of its values inferred."""
    copy = model.clone()
    name_nodes(copy)
    copy = inline_functions(copy)
    check_inferable(copy)
    infer(copy, shapes=False)
    return copy


def _nothing(model: ir.Model, label: str) -> UsageError:
    types = {t for node in model.graph.all_nodes() for v in node.outputs if (t := v.dtype)}
    here = sorted(n for n, t in {**SOURCE_TYPES, "fp32": _FLOAT}.items() if t in types)
    return UsageError(
        f"no op of the model computes in {label}: there is nothing to take to fp32",
        where=f"--from-type {label}",
        fix=f"leave it out (the model's types: {', '.join(here) or 'no float'})",
    )


class _Rewriting:
    """Converts one model in place from the float type ``source`` to fp32.

    Attributes:
        ops: How many ops are converted, other than casts and constants.
        kept: Ops that keep their types, as they may not compute in fp32.
        fixed: Values that keep their types: see ``_fixed``.
        notes: What the user is told.
    """

    def __init__(self, model: ir.Model, source: ir.DataType) -> None:
        self.model = model
        self.source = source
        self.notes: list[str] = []
        self.editor = Editor(model)
        touched = [n for n in model.graph.all_nodes() if self._touches(n)]
        self.kept = {n for n in touched if self._stays(n)}
        computing = (n for n in touched if n.op_type not in _NO_ARITHMETIC)
        self.ops = sum(n not in self.kept for n in computing)
        self.fixed = self._fixed()

    def run(self) -> None:
        """Change the types, and insert casts beside ops and values that keep theirs."""
        for node in (kept for kept in self.kept for _ in bodies(kept)):
            raise ModelError(
                f"{node.op_type} has bodies, and its definition is not known",
                where=f"node {node.name!r}",
                fix="export the model in fp32",
            )
        kept_ports = [
            Port(owner=node, index=index)
            for node in self.model.graph.all_nodes()
            if node in self.kept
            for index, value in enumerate(node.inputs)
            if value is not None and self._is_source(value.type) and value not in self.fixed
        ]
        ends = [
            index
            for index, value in enumerate(self.model.graph.outputs)
            if self._is_source(value.type) and value not in self.fixed
        ]
        casts = [n for n in self.model.graph.all_nodes() if _is_cast(n) and self._touches(n)]
        for value in every_value(self.model):
            if value not in self.fixed:
                self._retype(value)
        for node in self.model.graph.all_nodes():
            if node not in self.kept and not self._is_last(node):
                _retype_attributes(node, {self.source}, self._constant)
        for value in sorted(self.fixed, key=lambda v: v.name or ""):
            self._pass_on(value)
        self._cast_for(kept_ports)
        self._drop(casts)
        self._cast_outputs(ends)

    # What is converted, and what keeps its type.

    def _touches(self, node: ir.Node) -> bool:
        values = (*node.inputs, *node.outputs)
        return any(v is not None and self._is_source(v.type) for v in values)

    def _is_source(self, kind: ir.TypeProtocol | None) -> bool:
        return kind is not None and _element(kind) is self.source

    def _stays(self, node: ir.Node) -> bool:
        """Whether the op keeps its types: no definition says that it computes in fp32, too."""
        opsets = {normal_domain(d): v for d, v in self.model.opset_imports.items()}
        schema = definition(node.op_type, node.domain, opsets.get(node.domain, 1))
        return schema is None or not (
            self._admits(node.inputs, schema.inputs, schema)
            and self._admits(node.outputs, schema.outputs, schema)
        )

    def _admits(
        self, values: Iterable[ir.Value | None], ports: Ports, found: Definition
    ) -> bool:
        own = f"({_NAMES[self.source]})"
        for index, value in enumerate(values):
            if value is None or not self._is_source(value.type):
                continue
            variable = ports.type_of(index) or ""
            allowed = found.constraints.get(variable, frozenset({variable}))
            if not any(a.replace(own, "(float)") in allowed for a in allowed if own in a):
                return False
        return True

    def _fixed(self) -> set[ir.Value]:
        """Values that keep their types.

        These are inputs, constants that are outputs, results of ops that keep their types,
        and outputs that the model itself casts to ``source``.
        """
        graph = self.model.graph
        constants = (v for v in graph.outputs if v.is_initializer())
        kept_results = (v for node in self.kept for v in node.outputs)
        last = (v for v in graph.outputs if self._is_last(v.producer()))
        everything = (*graph.inputs, *constants, *kept_results, *last)
        return {v for v in everything if self._is_source(v.type)}

    def _is_last(self, node: ir.Node | None) -> bool:
        """Whether the node is a cast to an output of the model that no op reads."""
        if node is None or not _is_cast(node):
            return False
        out = node.outputs[0]
        ends = out in self.model.graph.outputs and not out.uses()
        return ends and self._is_source(out.type)

    # The changes.

    def _retype(self, value: ir.Value) -> None:
        if value.type is None or not self._is_source(value.type):
            return
        value.type = _with_float(value.type)
        if value.const_value is not None:
            value.const_value = self._constant(value.const_value, value.name or "")

    def _constant(self, tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
        if self.source is ir.DataType.DOUBLE:
            array = constant_reader(tensor)()
            self.notes += [f"constant {name!r} {text}" for text in _out_of_range(array)]
        return ComputedTensor(tensor, _to_fp32, tensor.name or "")

    def _pass_on(self, value: ir.Value) -> None:
        """Let fp32 ops, and the outputs of bodies, read ``value`` through one cast to fp32.

        The model's own casts still read ``value`` itself: no digit is lost on the way to
        another type.
        """
        readers = [
            Port(owner=use.node, index=use.idx)
            for use in value.uses()
            if use.node not in self.kept and not _is_cast(use.node)
        ]
        ends = [
            Port(owner=body, index=index)
            for body in self.model.graph.subgraphs()
            for index, end in enumerate(body.outputs)
            if end is value
        ]
        if readers or ends:
            wide = self._cast(value, _FLOAT)
            self.editor.place_after(value)
            for port in (*readers, *ends):
                port.read(wide)

    def _cast_for(self, ports: Iterable[Port]) -> None:
        """Cast what ops that keep their types read at ``ports`` back to ``source``."""
        casts: dict[tuple[ir.Value, ir.Graph], ir.Value] = {}
        for port in ports:
            node, value = port.owner, port.value()
            assert isinstance(node, ir.Node)
            home = node.graph
            assert isinstance(home, ir.Graph)
            if (value, home) not in casts:
                casts[value, home] = self._cast(value, self.source)
                node.prepend(self.editor.take())
            port.read(casts[value, home])

    def _cast(self, value: ir.Value, to: ir.DataType) -> ir.Value:
        name = self.editor.fresh(f"{value.name}_{_LABELS[to]}")
        to_type, node = {"to": int(to)}, f"cast_{name}"
        return self.editor.op(
            "Cast", [value], to_type, name=name, node=node, dtype=to, shape=value.shape
        )

    def _drop(self, casts: Iterable[ir.Node]) -> None:
        """Remove those of the model's own ``casts`` that now are from fp32 to fp32."""
        for node in casts:
            source = node.inputs[0]
            if source is not None and source.dtype is node.outputs[0].dtype:
                node.metadata_props[MARK] = ""  # merge_casts removes only finecast's own
        merge_casts(self.model.graphs())

    def _cast_outputs(self, ends: Iterable[int]) -> None:
        """Cast the outputs at the indices ``ends`` to ``source``; they keep their names."""
        graph = self.model.graph
        casts: dict[ir.Value, ir.Value] = {}
        for index in ends:
            value = graph.outputs[index]
            if value not in casts:
                casts[value] = self._cast(value, self.source)
                graph.extend(self.editor.take())
                named = value.name
                value.name = self.editor.fresh(f"{named}_{_LABELS[_FLOAT]}")
                casts[value].name = named
            graph.outputs[index] = casts[value]


def _retype_attributes(
    node: ir.Node,
    types: Collection[ir.DataType],
    converted: Callable[[ir.TensorProtocol, str], ir.TensorProtocol],
) -> None:
    """Let attributes of ``node`` that hold or name one of ``types`` hold or name fp32."""
    for name, attribute in list(node.attributes.items()):
        if attribute.is_ref():
            continue
        if attribute.type is ir.AttributeType.TENSOR:
            if attribute.as_tensor().dtype in types:
                label = node.outputs[0].name or node.name or node.op_type
                tensor = converted(attribute.as_tensor(), label)
                node.attributes[name] = ir.AttrTensor(name, tensor)
        elif name in _TYPE_ATTRIBUTES and attribute.value in types:
            node.attributes[name] = ir.AttrInt64(name, int(_FLOAT))


def _is_cast(node: ir.Node) -> bool:
    return node.op_type == "Cast" and not node.domain


def _element(kind: ir.TypeProtocol) -> ir.DataType | None:
    inner = kind.elem_type
    return inner if isinstance(inner, ir.DataType) else _element(inner)


def _with_float(kind: ir.TypeProtocol) -> ir.TypeProtocol:
    """The type of a tensor, or of a sequence or optional of tensors, with fp32 elements."""
    inner = kind.elem_type
    make: Any = type(kind)
    return make(_FLOAT if isinstance(inner, ir.DataType) else _with_float(inner))


def _to_fp32(array: NDArray[np.generic]) -> NDArray[np.float32]:
    """Round to nearest; finite numbers beyond fp32's range become its largest number."""
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = array.astype(np.float32)
    if np.isfinite(rounded).all():
        return rounded
    beyond = np.isinf(rounded) & np.isfinite(array)
    largest = np.float32(Format.FP32.max)
    return np.where(beyond, np.copysign(largest, rounded), rounded)


def _out_of_range(array: NDArray[np.generic]) -> list[str]:
    """A note if a constant's largest numbers overflow in fp32, or all of them become 0."""
    largest = 0.0
    flat = array.reshape(-1)
    for start in range(0, flat.size, PIECE):
        piece = np.abs(flat[start : start + PIECE].astype(np.float64))
        largest = max(largest, float(piece[np.isfinite(piece)].max(initial=0.0)))
    fp32 = Format.FP32
    if largest > fp32.max:
        return [f"reaches {largest:.3g}, beyond fp32: such numbers become {fp32.max:.3g}"]
    if 0 < largest < fp32.smallest_subnormal / 2:
        return [f"is at most {largest:.3g}, below fp32's smallest number: it becomes 0"]
    return []


# Models whose own low types are emulated.


def widen(model: ir.Model) -> ir.Model:
    """A copy with all low floats in fp32; ``model`` itself if it has none.

    Law: if the copy's values with ``STORED_KEY`` are rounded to that format, the copy computes
    what ``model`` computes. Its inputs and outputs are fp32. Codes of 8 bits that
    QuantizeLinear gives and DequantizeLinear reads stay what they are.
    """
    if not any(_low(v) for v in every_value(model)):
        return model
    copy = model.clone()
    codes = _codes(copy)
    for value in list(every_value(copy)):
        fmt = _low(value)
        if fmt is None or value in codes:
            continue
        value.type = ir.TensorType(_FLOAT)
        if value.const_value is not None:
            value.const_value = _float(value.const_value, value.name or "")
        else:
            value.metadata_props[STORED_KEY] = fmt.label
    for node in copy.graph.all_nodes():
        if codes.isdisjoint(node.outputs):
            _retype_attributes(node, _LOW, _float)
    return copy


def _codes(model: ir.Model) -> set[ir.Value]:
    """Values of a low float type that QuantizeLinear gives, or DequantizeLinear reads."""
    codes: set[ir.Value] = set()
    for node in model.graph.all_nodes():
        if node.op_type == "QuantizeLinear":
            ports = (*node.inputs[2:], *node.outputs)
        elif node.op_type == "DequantizeLinear":
            ports = (node.inputs[0], *node.inputs[2:])
        else:
            continue
        codes.update(v for v in ports if v is not None and _low(v))
    return codes


def stored_formats(values: Iterable[ir.Value]) -> dict[int, Format]:
    """The formats that ``widen`` noted, by the place of the value."""
    labels = ((i, value.metadata_props.get(STORED_KEY)) for i, value in enumerate(values))
    return {i: Format.parse(label) for i, label in labels if label is not None}


def _low(value: ir.Value) -> Format | None:
    return _LOW.get(value.dtype) if value.dtype is not None else None


def _float(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().astype(np.float32), name=name)

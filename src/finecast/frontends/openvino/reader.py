"""Reads an ``ov.Model`` into the neutral graph, with the binding from its ids to OpenVINO."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast import ops
from finecast.errors import ModelError
from finecast.files.staging import staging
from finecast.frontends.dry_run import DryRun
from finecast.frontends.folding import WIDE, ConstantFolding
from finecast.frontends.openvino.bodies import Entry, Region, Tie, bodies, every_op, ties_of
from finecast.frontends.openvino.changes import inserted
from finecast.frontends.openvino.types import (
    FORMATS,
    SCALAR_NAMES,
    OpTypes,
    label_of,
    numbers_of,
    port_key,
)
from finecast.graph import (
    INNER,
    ROUNDS,
    SCALARS,
    Attribute,
    ConstantStats,
    Dim,
    Graph,
    Node,
    Value,
)
from finecast.graph.builder import GraphBuilder, scope_of
from finecast.numbers.formats import Format
from finecast.ops import OpKind

if TYPE_CHECKING:
    import openvino

    Port = tuple[str, int]  # what port_key gives

# Element types of constants that numpy cannot read as numbers: packed, or text.
_OPAQUE: Final = frozenset(
    {"string", "undefined", "dynamic", "u1", "u2", "u3", "u4", "u6", "i4"}
)
# A name that OpenVINO made: the kind of the op and a counter, such as ``MatMul_12``.
_COUNTED: Final = re.compile(r"(?P<kind>[A-Z][A-Za-z0-9]*)_\d+")
# A phi computes nothing, so it admits every type that OpenVINO's ops compute in.
_ADMITS: Final = frozenset({Format.FP32, Format.BF16, Format.FP16})
# Attributes that the core knows by ONNX's names.
_RENAMED: Final[Mapping[str, str]] = {
    "transpose_a": "transA",
    "transpose_b": "transB",
    "keep_dims": "keepdims",
    "kernel": "kernel_shape",
    "eps": "epsilon",
}
# Ops whose axis is an input, and the index of that input.
_AXIS_INPUTS: Final = {"Gather": 2}


@dataclass(slots=True, kw_only=True)
class OvBinding:
    """Which objects of OpenVINO the ids of a Graph stand for.

    Attributes:
        model: The model that was read.
        nodes: Ops by node id; None for a phi.
        entries: For each node id, the inputs of OpenVINO that the node's inputs are.
        regions: Bodies by region number; None for region 0, which is the model itself.
        value_regions: Region numbers by value id.
        values: Ports by value id.
        constants: The ops that give constant values, by value id: Constants, and ops that
            compute floats from constants alone. Where a Convert widens a compressed constant,
            the value is the Convert's result, and the op the constant.
    """

    model: openvino.Model
    nodes: list[openvino.Node | None] = field(default_factory=list["openvino.Node | None"])
    entries: list[tuple[Entry, ...]] = field(default_factory=list[tuple[Entry, ...]])
    regions: list[Region | None] = field(default_factory=lambda: [None])
    value_regions: list[int] = field(default_factory=list[int])
    values: list[openvino.Output] = field(default_factory=list["openvino.Output"])
    constants: dict[int, openvino.Node] = field(default_factory=dict[int, "openvino.Node"])

    def numbers(self, value: int) -> NDArray[np.generic]:
        """The numbers of a constant value; those that ops compute are computed anew."""
        constant = self.constants[value]
        if constant.get_type_name() == "Constant":
            return numbers_of(constant)
        return computed(self.values[value])


class FreshOpNames:
    """Makes names that no op of a model has; each call gives another one."""

    def __init__(self, model: openvino.Model) -> None:
        self._taken = {op.get_friendly_name() for op in every_op(model)}

    def __call__(self, name: str) -> str:
        """``name``; with a number behind it if it is taken."""
        numbered = (f"{name}_{i}" for i in itertools.count(1))
        fresh_name = next(n for n in itertools.chain([name], numbered) if n not in self._taken)
        self._taken.add(fresh_name)
        return fresh_name


def name_ops(model: openvino.Model) -> None:
    """Rename ops whose name an earlier op has, so that no two have the same."""
    fresh = FreshOpNames(model)
    seen: set[str] = set()
    for op in every_op(model):
        name = op.get_friendly_name()
        if name in seen:
            op.set_friendly_name(fresh(name))
        seen.add(name)


def renumber_ops(model: openvino.Model) -> None:
    """Number the ops that OpenVINO named by a counter anew, by their order in the model.

    OpenVINO's counter is one of the process, so the ops would have other names when the model
    is read again, and a plan made before would not find them.
    """
    counts: Counter[str] = Counter()
    taken = {op.get_friendly_name() for op in every_op(model)}
    taken -= {name for name in taken if _COUNTED.fullmatch(name)}
    for op in every_op(model):
        if (match := _COUNTED.fullmatch(op.get_friendly_name())) is None:
            continue
        kind = match["kind"]
        while (name := f"{kind}_{counts[kind]}") in taken:
            counts[kind] += 1
        taken.add(name)
        op.set_friendly_name(name)


def port_name(port: Any) -> str:
    """The name by which users call an input or output, whose tensor may have several.

    It is the op's name if the tensor has it, as those of TensorFlow's models do; else the
    tensor's first name in alphabetical order, or without any the op's.
    """
    own: str = port.get_node().get_friendly_name()
    names = sorted(port.get_names())
    return own if own in names or not names else names[0]


def read(model: openvino.Model, *, digest: str = "") -> tuple[Graph, OvBinding]:
    """Build the neutral graph of ``model``, no two ops of which have the same name.

    Law: every tensor is a Value, and every op but inputs, results and constants, compressed or
    not, a Node. Ops that compute floats from constants alone count as constants. So it is in
    the bodies of If, Loop and TensorIterator, too.
    """
    reader = _Reader(model)
    reader.region(model, 0)
    return reader.finish(digest), reader.binding


class _Reader:
    def __init__(self, model: openvino.Model) -> None:
        self.binding = OvBinding(model=model)
        self.types = OpTypes()
        names = (op.get_friendly_name() for op in every_op(model))
        self.builder: GraphBuilder[Port] = GraphBuilder(names)
        self.computed: set[int] = set()  # values computed from constants alone
        self.decompressed: set[int] = set()  # those of them that a Convert is part of
        self.folding: ConstantFolding[int] = ConstantFolding()
        self.inserted = inserted(model)

    def value(self, port: openvino.Output, region: int = 0) -> int:
        value_id = self.builder.value(port_key(port))
        if value_id == len(self.binding.values):
            self.binding.values.append(port)
            self.binding.value_regions.append(region)
        return value_id

    def region(self, model: openvino.Model, number: int) -> None:
        """Add the ops of region ``number``: the model or a body."""
        for op in model.get_ordered_ops():
            self.op(op, number)

    def op(self, op: openvino.Node, region: int) -> None:
        inner: list[tuple[int, openvino.Model]] = []
        for index, body in enumerate(bodies(op)):
            inner.append((len(self.binding.regions), body))
            self.binding.regions.append(
                Region(owner=op, body=index, model=body, parent=region)
            )
            self.region(body, inner[-1][0])
        kind = op.get_type_name()
        if kind == "Result":
            return
        ties = ties_of(op, region, inner) if inner else []
        results = [] if ties else [self.value(port, region) for port in op.outputs()]
        if kind == "Constant":
            self._note(results[0], op)
        elif (packed := _compressed(op)) is not None:
            self._note(results[0], packed)
        elif self._folds(op, results):
            self.binding.constants.update(dict.fromkeys(results, op))
        elif kind != "Parameter":
            tied = {e.index for tie in ties for e in tie.inputs if e.op is op}
            self.node(op, region, results, tied)
        for number, tie in enumerate(ties):
            self.phi(op, number, tie, region)

    def _note(self, value: int, constant: openvino.Node) -> None:
        self.binding.constants[value] = constant
        port = self.binding.values[value]
        self.folding.add(value, _bytes_of(port), label_of(port.get_element_type()))

    def _folds(self, op: openvino.Node, results: list[int]) -> bool:
        """Whether an op gives floats of constants alone, and no conversion wrote it."""
        ports, name = op.outputs(), op.get_friendly_name()
        fixed = all(port.get_partial_shape().is_static for port in ports)
        if not (results and fixed) or name in self.inserted:
            return False
        if any(t.get_node().get_type_name() == "Result" for p in ports for t in _readers(p)):
            return False
        read = [self.builder.known(port_key(source)) for source in op.input_values()]
        labels = [label_of(port.get_element_type()) for port in ports]
        outputs = {
            value: (_bytes_of(port), label)
            for value, port, label in zip(results, ports, labels, strict=True)
        }
        known = [value for value in read if value is not None]
        folded = len(known) == len(read) and self.folding.fold(
            ops.lookup(f"openvino::{op.get_type_name()}"), known, outputs
        )
        return folded and WIDE.issuperset(labels)

    def node(self, op: openvino.Node, region: int, results: list[int], tied: set[int]) -> None:
        """Add ``op``; its inputs of the indices ``tied`` are read by phis in its place."""
        kind = op.get_type_name()
        info = ops.lookup(f"openvino::{kind}")
        entries = tuple(Entry(op=op, index=i, region=region) for i in range(len(op.inputs())))
        inputs = [None if e.index in tied else self._source(e) for e in entries]
        port_types = self.types.of(op, kind)
        name = op.get_friendly_name()
        if self._decompresses(info, inputs, results) or name in self.inserted:
            port_types = self.types.fixed(op)
        attributes = dict(_attributes(op, kind))
        if rounds := self.inserted.get(name):
            attributes[ROUNDS] = rounds
        node = Node(
            id=len(self.builder.nodes),
            name=name,
            op=info.name,
            native=f"openvino::{kind}",
            inputs=tuple(inputs),
            outputs=tuple(results),
            follows_in=port_types.follows_in,
            follows_out=port_types.follows_out[: len(results)],
            format=port_types.format,
            admits=port_types.admits,
            attributes=attributes,
            scope=scope_of(name),
            region=region,
        )
        self.binding.nodes.append(op)
        self.binding.entries.append(entries)
        self.builder.add(node)

    def phi(self, op: openvino.Node, number: int, tie: Tie, region: int) -> None:
        """Add a phi, which joins the values that ``tie`` forces to have one type."""
        inputs = [self._source(entry) for entry in tie.inputs]
        outputs = [self.value(port, region) for port in (*tie.inner, *tie.outer)]
        values = [self.binding.values[i] for i in (*inputs, *outputs)]
        labels = {label_of(port.get_element_type()) for port in values}
        self.binding.nodes.append(None)
        self.binding.entries.append(tie.inputs)
        self.builder.add_phi(
            op.get_friendly_name(),
            number,
            (inputs, outputs),
            FORMATS.get(labels.pop()) if len(labels) == 1 else None,
            admits=_ADMITS,
            attributes={"of": op.get_type_name(), INNER: len(tie.inner)},
            region=region,
        )

    def _source(self, entry: Entry) -> int:
        return self.value(entry.port.get_source_output(), entry.region)

    def _decompresses(
        self, info: ops.OpInfo, inputs: list[int | None], results: list[int]
    ) -> bool:
        """Whether an op helps to decompress a constant: a Convert, or one that follows it.

        OpenVINO's kernels multiply by such weights as they are stored. A cast among these ops
        would have it decompress them beforehand.
        """
        if not inputs or not all(
            i in self.binding.constants or i in self.computed for i in inputs
        ):
            return False
        self.computed.update(results)
        decompresses = info.kind is OpKind.CAST or any(i in self.decompressed for i in inputs)
        if decompresses:
            self.decompressed.update(results)
        return decompresses

    def finish(self, digest: str) -> Graph:
        model = self.binding.model
        inputs = {self.value(port): port_name(port) for port in model.inputs}
        # Of a value that is several outputs the first one's name counts.
        outputs = {
            self.value(port.get_node().input_value(0)): port_name(port)
            for port in reversed(model.outputs)
        }
        names = outputs | inputs
        values = (
            Value(
                id=i,
                name=names.get(i) or _name(port),
                dtype=label_of(port.get_element_type()),
                shape=shape_of(port),
                producer=self.builder.producer(i),
                uses=self.builder.uses(i),
                constant=self._constant(i),
                is_input=i in inputs,
                is_output=i in outputs,
            )
            for i, port in enumerate(self.binding.values)
        )
        return self.builder.finish(
            values, digest, map(port_name, model.inputs), map(port_name, model.outputs)
        )

    def _constant(self, index: int) -> ConstantStats | None:
        if index not in self.binding.constants:
            return None
        stored = self.binding.constants[index].output(0).get_element_type()
        if stored.get_type_name() in _OPAQUE:
            return None
        size = math.prod(self.binding.values[index].get_shape())
        return ConstantStats(size=size, read=partial(self.binding.numbers, index))


def _bytes_of(port: openvino.Output) -> int:
    bits: int = port.get_element_type().bitwidth
    return math.prod(port.get_shape()) * bits // 8


def _readers(port: openvino.Output) -> Iterable[openvino.Input]:
    return port.get_target_inputs()


def _compressed(op: openvino.Node) -> openvino.Node | None:
    """The fp16 or bf16 Constant that ``op`` widens to fp32; None if ``op`` does not."""
    if (
        op.get_type_name() != "Convert"
        or op.get_output_element_type(0).get_type_name() != "f32"
    ):
        return None
    source = op.input_value(0).get_node()
    low = source.get_output_element_type(0).get_type_name() in ("f16", "bf16")
    return source if low and source.get_type_name() == "Constant" else None


def _attributes(op: openvino.Node, kind: str) -> Iterator[tuple[str, Attribute]]:
    attributes: Mapping[str, Any] = op.get_attributes()
    scalars = [attributes[name] for name in SCALAR_NAMES.get(kind, ()) if name in attributes]
    if scalars:
        yield SCALARS, tuple(float(number) for number in scalars)
    for name, value in attributes.items():
        named = _RENAMED.get(name) or name
        if isinstance(value, bool):
            yield named, int(value)
        elif isinstance(value, int | float | str):
            yield named, value
        elif isinstance(value, list | tuple) and all(
            isinstance(v, int | float | str) for v in value
        ):
            yield named, tuple(value)
    axis = _AXIS_INPUTS.get(kind)
    if axis is not None and op.input_value(axis).get_node().get_type_name() == "Constant":
        yield "axis", int(numbers_of(op.input_value(axis).get_node()).reshape(-1)[0])


def _name(port: openvino.Output) -> str:
    node = port.get_node()
    name: str = node.get_friendly_name()
    return name if node.get_output_size() == 1 else f"{name}:{port.get_index()}"


def shape_of(port: openvino.Output) -> tuple[Dim, ...] | None:
    """The declared shape; None if its rank is open.

    An open dimension is ``INPUT.AXIS`` in an input's shape, and None elsewhere.
    """
    sizes = port.get_partial_shape()
    if sizes.rank.is_dynamic:
        return None
    is_input = port.get_node().get_type_name() == "Parameter"
    names = (f"{port_name(port)}.{axis}" if is_input else None for axis in range(len(sizes)))
    return tuple(
        d.get_length() if d.is_static else n for d, n in zip(sizes, names, strict=True)
    )


# The numbers of values that a model computes from constants alone.

_FIX: Final = "fold constants as the model is exported"
_EXACT: Final = {"INFERENCE_PRECISION_HINT": "f32"}


def computed(port: openvino.Output) -> NDArray[np.generic]:
    """The numbers of a value that is computed from constants alone.

    OpenVINO evaluates most ops by themselves. It has kernels for others, such as Identity and
    Elu: these run in another process, which a hostile model may crash.

    Raises:
        ModelError: If OpenVINO cannot compute it.
    """
    import openvino
    from openvino import opset13

    results: Any = [opset13.result(port)]
    of_results: Any = openvino.Model  # its stub does not bind this constructor
    model: Any = of_results(results, [], "computed")
    tensor = openvino.Tensor(port.get_element_type(), port.get_shape())
    evaluated = False
    with suppress(RuntimeError):
        evaluated = model.evaluate([tensor], [])
    raw = tensor.data if evaluated else _compiled(model, port)
    fmt = FORMATS.get(label_of(port.get_element_type()))
    return raw if fmt is None or raw.dtype == fmt.dtype else raw.view(fmt.dtype)


def _compiled(model: openvino.Model, port: openvino.Output) -> NDArray[Any]:
    """The result of a model without inputs, from kernels of the CPU."""
    import openvino

    source: Any = port.get_node()
    where = f"op {source.get_friendly_name()!r}"
    settings = {"compile": _EXACT, "device": "CPU"}
    with staging() as folder:
        path = folder / "computed.xml"
        openvino.save_model(model, path, compress_to_fp16=False)
        run = DryRun(library="openvino", settings=settings, model=path, where=where, fix=_FIX)
        with suppress(RuntimeError):
            if kept := run.keep():
                return kept.run([], fresh=True)[0]
    what = f"OpenVINO cannot compute {source.get_type_name()} of constants"
    raise ModelError(what, where=where, fix=_FIX)

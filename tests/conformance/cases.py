"""The models and data that the onnx package carries to test backends with."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import numpy_helper

STORED: Final = ("simple", "pytorch-operator", "pytorch-converted")
LIGHT: Final = "light"
_DATA: Final = Path(onnx.__file__).parent / "backend" / "test" / "data"
_FLOATS: Final = frozenset(
    {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its data sets: inputs and expected outputs, in the order of its ports."""

    name: str
    kind: str
    model: onnx.ModelProto
    folder: Path | None = None
    generated: Sequence[tuple[Sequence[Any], Sequence[Any]]] = ()

    @property
    def op(self) -> str:
        """The op it is about: of a node case the one op, of others the kind."""
        types = sorted({n.op_type for n in self.model.graph.node})  # ties are by name
        if self.kind != "node" or not types:
            return self.kind
        named = [t for t in types if t.lower() in self.name.replace("_", "").lower()]
        return max(named, key=len) if named else self.model.graph.node[-1].op_type

    @cached_property
    def data_sets(self) -> Sequence[tuple[Sequence[Any], Sequence[Any]]]:
        """Pairs of inputs and expected outputs."""
        if self.folder is None:
            return [
                ([_plain(v) for v in inputs], [_plain(v) for v in outputs])
                for inputs, outputs in self.generated
            ]
        graph = self.model.graph
        weights = {t.name for t in graph.initializer}
        ports = [v for v in graph.input if v.name not in weights]
        return [
            (_read(f, "input", ports), _read(f, "output", graph.output))
            for f in sorted(self.folder.glob("test_data_set_*"))
        ]

    @property
    def carries_floats(self) -> bool:
        """Whether any value of the model is an fp32, fp16 or bf16 tensor."""
        try:
            typed = onnx.shape_inference.infer_shapes(self.model)
        except (RuntimeError, ValueError):
            typed = self.model
        return any(t in _FLOATS for t in _element_types(typed.graph)) or any(
            t in _FLOATS for f in self.model.functions for t in _node_types(f.node)
        )


def node_cases() -> list[Case]:
    """Every case that the generators of the onnx package give."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():  # the generators divide by zero and overflow on purpose
        warnings.simplefilter("ignore")
        found = collect_testcases(None)
    return [
        Case(name=c.name, kind="node", model=c.model, generated=c.data_sets or ())
        for c in found
        if c.model is not None
    ]


def light_cases() -> Iterator[Case]:
    """Whole nets in an old opset, whose weights are ConstantOfShape; what the package ships.

    The suite feeds them numbers from 0 to 1 in order.
    """
    for path in sorted((_DATA / LIGHT).glob("*.onnx")):
        model = onnx.load(path)
        graph, weights = model.graph, {t.name for t in model.graph.initializer}
        shapes = [
            tuple(d.dim_value for d in v.type.tensor_type.shape.dim)
            for v in graph.input
            if v.name not in weights
        ]
        inputs = [
            np.linspace(0, 1, math.prod(s), endpoint=False, dtype=np.float32).reshape(s)
            for s in shapes
        ]
        stored = path.with_name(f"{path.stem}_output_0.pb").read_bytes()
        outputs = [_parse(stored, graph.output[0].type)]
        yield Case(name=path.stem, kind=LIGHT, model=model, generated=[(inputs, outputs)])


def stored_cases(kind: str) -> Iterator[Case]:
    """The cases of one folder of the package's data."""
    root = _DATA / kind
    for folder in sorted(root.iterdir()):
        if (folder / "model.onnx").exists():
            model = onnx.load(folder / "model.onnx")
            yield Case(name=folder.name, kind=kind, model=model, folder=folder)


def all_cases() -> list[Case]:
    """Generated and stored cases, always in the same order."""
    stored = (c for kind in STORED for c in stored_cases(kind))
    return [*node_cases(), *stored, *light_cases()]


def _read(folder: Path, stem: str, ports: Sequence[onnx.ValueInfoProto]) -> list[Any]:
    return [
        _parse((folder / f"{stem}_{i}.pb").read_bytes(), port.type)
        for i, port in enumerate(ports)
        if (folder / f"{stem}_{i}.pb").exists()
    ]


def _plain(value: Any) -> Any:
    """The suite keeps types that numpy lacks as messages."""
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _parse(data: bytes, kind: onnx.TypeProto) -> Any:
    which = kind.WhichOneof("value")
    if which == "sequence_type":
        return numpy_helper.to_list(onnx.SequenceProto.FromString(data))
    if which == "optional_type":
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(data))
    return numpy_helper.to_array(onnx.TensorProto.FromString(data))


def _element_types(graph: onnx.GraphProto) -> Iterator[int]:
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield from _type_elements(value.type)
    yield from (t.data_type for t in graph.initializer)
    yield from _node_types(graph.node)


def _node_types(nodes: Sequence[onnx.NodeProto]) -> Iterator[int]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t.data_type
            for body in (attribute.g, *attribute.graphs):
                yield from _element_types(body)


def _type_elements(kind: onnx.TypeProto) -> Iterator[int]:
    which = kind.WhichOneof("value")
    if which in ("sequence_type", "optional_type"):
        yield from _type_elements(getattr(kind, which).elem_type)
    elif which in ("tensor_type", "sparse_tensor_type"):
        yield getattr(kind, which).elem_type

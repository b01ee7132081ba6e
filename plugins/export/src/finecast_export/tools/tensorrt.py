"""TensorRT 11: a strongly typed ONNX model, and a script that builds, times and verifies it.

The model is the one that the plan gives, whose casts are nodes already. Casts to fp8, which
TensorRT does not have, become QuantizeLinear and DequantizeLinear with the scale 1: numbers
are the same, as both saturate. Biases are stored in fp32 as they were rounded. Whatever then
breaks a rule of ``strong_types`` stays in FP32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnx_ir as ir
from onnx import NodeProto, TensorProto, helper, numpy_helper

from finecast import Format, Plan, api
from finecast.errors import UsageError
from finecast.frontends import onnx as frontend
from finecast.numbers import Scaled
from finecast.ops import by_name
from finecast.planning import Decision
from finecast_export.exporting import Exported, LeftOut, Sorted, check_library, heading
from finecast_export.strong_types import Violation, violations

TOOL: Final = "tensorrt"
_FORMATS: Final = (Format.FP16, Format.BF16, Format.FP8_E4M3, Format.INT8)
_NOTE: Final = (
    "not verified here: whether TensorRT builds it, and how fast it is; the model keeps to the"
    " documented rules"
)
_FP8: Final = TensorProto.FLOAT8E4M3FN
_MATRIX: Final = TensorProto(dims=[1, 1])


def export(plan: Plan, model: Path | onnx.ModelProto) -> Exported:
    """A script, and the ONNX model that it builds, of the plan's model in FP32.

    Raises:
        UsageError: If the model itself is none that TensorRT takes, or the plan leaves types
            to an engine's hint.
    """
    check_library(plan, TOOL, "onnx")
    if plan.by_hint:
        raise UsageError(
            "the plan leaves types to an engine's own hint",
            fix="make it with --target, such as sm90",
        )
    tf32 = _one_switch(plan)
    formats = (*_FORMATS, Format.TF32) if tf32 else _FORMATS
    ops = Sorted.of(plan, TOOL, formats, _asymmetric)
    made, broken = _allowed(plan, ops, model)
    left_out = (*ops.left_out, *broken)
    names = {one.node for one in left_out}
    stated = replace(ops, low=tuple(d for d in ops.low if d.node not in names))
    text = files("finecast_export").joinpath("tensorrt_engine.py").read_text("utf-8")
    text = text.partition('"""\n\n')[2].replace("TF32 = False", f"TF32 = {tf32}")
    what = "Builds a TensorRT engine of the model beside this file, times and verifies it."
    return Exported(
        tool=TOOL,
        text=heading(plan, f"{TOOL} 11", what) + text,
        stated=stated.counts,
        left_out=left_out,
        notes=(_NOTE,),
        write_model=lambda path: frontend.save(ir.from_proto(made), path, force=True),
    )


def _asymmetric(decision: Decision) -> str:
    """Why an op on integers cannot be stated; empty if it can, or is not on integers."""
    operands = decision.encodings.operands.values()
    scaled = [e for e in (*operands, decision.encodings.result) if isinstance(e, Scaled)]
    if all(e.grid.symmetric for e in scaled):
        return ""
    return "TensorRT's int8 is symmetric around 0 (plans for targets such as sm90 are)"


def _one_switch(plan: Plan) -> bool:
    """Whether tf32 is stated: TensorRT has one switch for all products in FP32."""
    products = [d.format for d in plan.counted if by_name(d.op).matmul_engine]
    return Format.TF32 in products and Format.FP32 not in products


def _allowed(
    plan: Plan, ops: Sorted, model: Path | onnx.ModelProto
) -> tuple[onnx.ModelProto, list[LeftOut]]:
    """The model of what TensorRT can have of the plan, and the ops that break its rules."""
    left_out: list[LeftOut] = []
    low = {d.node: d for d in ops.low if d.format is not Format.TF32}
    while True:
        candidate = _without_fp8_casts(_applied(plan, low, model))
        broken = violations(candidate)
        breaking = _ops_of(broken, candidate, low)
        if not breaking:
            if broken:
                first = broken[0]
                raise UsageError(
                    f"TensorRT does not take the model: {first.text}", where=first.node
                )
            return candidate, left_out
        left_out += [LeftOut.of(low.pop(node), text) for node, text in breaking.items()]


def _applied(
    plan: Plan, low: Mapping[str, Decision], model: Path | onnx.ModelProto
) -> onnx.ModelProto:
    """The model where only the ops of ``low`` have the plan's formats; others are in FP32."""
    decisions = tuple(
        d if d.node in low else Decision(node=d.node, op=d.op, format=Format.FP32)
        for d in plan.decisions
    )
    applied = api.apply(replace(plan, decisions=decisions), model, verify=False).model
    assert isinstance(applied, onnx.ModelProto)
    return applied


def _ops_of(
    broken: list[Violation], model: onnx.ModelProto, low: Mapping[str, Decision]
) -> dict[str, str]:
    """The lowered ops that break a rule, or that read or give what breaks one; with the text.

    A cast that breaks a rule is there for the ops around it.
    """
    around: dict[str, set[str]] = {}
    for node in model.graph.node:
        for name in (*node.input, *node.output):
            around.setdefault(name, set()).add(node.name)
    nodes = {node.name: node for node in model.graph.node}
    breaking: dict[str, str] = {}
    for one in broken:
        names, seen = {one.node}, set[str]()
        while names - seen and not names & low.keys():
            seen |= names
            near = [nodes[n] for n in names if n in nodes]
            names |= {
                n for node in near for t in (*node.input, *node.output) for n in around[t]
            }
        breaking |= dict.fromkeys(sorted(names & low.keys()), one.text)
    return breaking


def _without_fp8_casts(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with Q and DQ in place of casts to and from fp8; changed in place."""
    constants = {t.name: t for t in model.graph.initializer}
    types = {name: t.data_type for name, t in constants.items()}
    known = (*model.graph.input, *model.graph.value_info)
    types |= {v.name: v.type.tensor_type.elem_type for v in known}
    needed: dict[str, TensorProto] = {}

    def one(kind: int) -> str:
        name = f"tensorrt_one_{TensorProto.DataType.Name(kind).lower()}"
        array = np.ones((), helper.tensor_dtype_to_np_dtype(kind))
        needed[name] = numpy_helper.from_array(array, name)
        return name

    def becomes(node: NodeProto, kind: str, *inputs: str) -> None:
        node.op_type = kind
        del node.attribute[:]
        node.input.extend(inputs)

    for node in [n for n in model.graph.node if n.op_type == "Cast"]:
        to = next(a.i for a in node.attribute if a.name == "to")
        came = types.get(node.input[0], TensorProto.FLOAT)
        types[node.output[0]] = to
        if to == _FP8:
            zero = "tensorrt_zero_fp8"
            needed[zero] = helper.make_tensor(zero, _FP8, [], b"\0", raw=True)
            becomes(node, "QuantizeLinear", one(came), zero)
        elif came == _FP8 and len((bias := constants.get(node.input[0], _MATRIX)).dims) < 2:
            array = numpy_helper.to_array(bias).astype(helper.tensor_dtype_to_np_dtype(to))
            needed[node.output[0]] = numpy_helper.from_array(array, node.output[0])
            model.graph.node.remove(node)
        elif came == _FP8:
            becomes(node, "DequantizeLinear", one(to))
    read = {name for node in model.graph.node for name in node.input}
    read |= {port.name for port in model.graph.output}
    for tensor in [t for t in model.graph.initializer if t.name not in read]:
        model.graph.initializer.remove(tensor)
    model.graph.initializer.extend(needed.values())
    return model

"""NNCF: quantization and compression of weights, each with a scope of ops that it ignores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from finecast import Format, Plan
from finecast.graph import MODEL_INPUT, OpStructure, Structure
from finecast.numbers import Scaled
from finecast.planning import Decision
from finecast_export.exporting import Exported, Sorted, check_library, heading, listing

TOOL: Final = "nncf"
_MODES: Final = {
    Format.INT8_WEIGHTS: "INT8_SYM",
    Format.INT4_WEIGHTS: "INT4_SYM",
}
# Sizes of groups are for modes of 4 bits; their codes are for all ops that are not ignored.
_BY_GROUPS: Final = frozenset({"INT4_SYM"})


def export(plan: Plan) -> Exported:
    """A module with ``compress(model, dataset)``: of ONNX or OpenVINO.

    Ops in int8 are quantized; where the plan has none, weights are compressed.
    """
    check_library(plan, TOOL, "onnx", "openvino")
    quantizes = any(d.format is Format.INT8 for d in plan.counted)
    never = dict(_ignored(plan.structure)) if quantizes else {}

    def refusal(decision: Decision) -> str:
        if quantizes and decision.format is not Format.INT8:
            return "nncf quantizes to int8, and has no other format for single ops"
        return never.get(decision.node, "")

    ops = Sorted.of(plan, TOOL, (Format.INT8, *_MODES), refusal)
    text = heading(plan, TOOL, "Quantizes a model, or compresses its weights, op by op.")
    text += "import nncf\n\n"
    if quantizes:
        text += listing("IGNORED", [d.node for d in ops.kept])
        text += (
            "\n\ndef compress(model, dataset):\n"
            '    """The model with all that is not ignored in int8; ``dataset`` is an'
            ' nncf.Dataset."""\n'
            "    ignored = nncf.IgnoredScope(names=IGNORED, validate=False)\n"
            "    return nncf.quantize(model, dataset, ignored_scope=ignored)\n"
        )
    else:
        calls = list(_calls(ops))
        text += "# A mode, the numbers that share a scale (-1: a channel), the ignored ops.\n"
        text += "CALLS = [\n"
        for mode, group, ignored in calls:
            text += f"    ({mode!r}, {group}, {ignored!r}),\n"
        text += (
            "]\n\n\ndef compress(model, dataset=None):\n"
            '    """The model with weights as they are planned."""\n'
            "    for mode, group, names in CALLS:\n"
            "        by_groups = {} if group == -1 else "
            '{"group_size": group, "ratio": 1.0, "all_layers": True}\n'
            "        model = nncf.compress_weights(\n"
            "            model,\n"
            "            mode=nncf.CompressWeightsMode[mode],\n"
            "            ignored_scope=nncf.IgnoredScope(names=names, validate=False),\n"
            "            **by_groups,\n"
            "        )\n"
            "    return model\n"
        )
    notes = ("scales of values are those that nncf finds on its own data",)
    return Exported(
        tool=TOOL,
        text=text,
        stated=ops.counts,
        left_out=ops.left_out,
        notes=notes if quantizes else (),
    )


# nncf 3.4 leaves products in some places as they are, whatever its ignored scope says
# (``ignored_patterns.py`` of its libraries).
_MEANS: Final = frozenset({"reduce_mean", "global_average_pool"})
_GATES: Final = frozenset({"sigmoid", "hard_sigmoid"})
_LINEAR: Final = frozenset({"conv", "group_conv", "gemm", "linear", "matmul"})
_BETWEEN: Final = frozenset(
    {"add", "clip", "elu", "gelu", "hard_swish", "mish", "mul", "prelu", "relu", "swish"}
)
_PRODUCTS: Final = 2
_IN_GATE: Final = "nncf quantizes no products of a gate (mean, two products, sigmoid)"
_OF_SOFTMAX: Final = "nncf quantizes no product by a softmax"


def _ignored(ops: Structure) -> Iterator[tuple[str, str]]:
    """The names of ops that nncf never quantizes, each with the reason."""
    for op in ops:
        read = [ops[i] for i in op.inputs if i != MODEL_INPUT]
        if op.op == "mul":
            for gate in (one for one in read if one.op in _GATES):
                yield from ((name, _IN_GATE) for name in _products_of(ops, gate))
        elif op.op == "matmul":
            made = (_read(ops, one) if one.op == "reshape" else one for one in read)
            if any(one is not None and one.op == "softmax" for one in made):
                yield op.name, _OF_SOFTMAX


def _products_of(ops: Structure, gate: OpStructure) -> list[str]:
    """The two products between a mean and a gate; none if these are no such block."""
    names: list[str] = []
    op = gate
    while (before := _read(ops, op)) is not None and len(names) <= _PRODUCTS:
        # Of the factors of a swish the first may be the sigmoid of the second.
        swish = op.op == "mul" and before.op in _GATES
        op = (_read(ops, before) if swish else before) or before
        if op.op in _MEANS:
            return names if len(names) == _PRODUCTS else []
        if op.op in _LINEAR:
            names.append(op.name)
        elif op.op not in _BETWEEN:
            return []
    return []


def _read(ops: Structure, op: OpStructure) -> OpStructure | None:
    """The op whose result is the first input; None if that is the model's."""
    made = next(iter(op.inputs), MODEL_INPUT)
    return None if made == MODEL_INPUT else ops[made]


def _calls(ops: Sorted) -> Iterator[tuple[str, int, list[str]]]:
    """A call for each mode and size of groups: all other ops are ignored."""
    wanted = {d.node: (_MODES[d.format], _group(d)) for d in ops.low}
    everything = [d.node for d in (*ops.low, *ops.kept)]
    for mode, group in dict.fromkeys(wanted.values()):
        yield mode, group, [name for name in everything if wanted.get(name) != (mode, group)]


def _group(decision: Decision) -> int:
    constants = decision.encodings.constants.values()
    groups = (e.group for e in constants if isinstance(e, Scaled) and e.group)
    return next(groups, -1)

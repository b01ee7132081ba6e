"""ONNX Runtime's ``quantize_static``: the nodes to quantize."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from finecast import Format, Plan
from finecast.ops import by_name
from finecast.planning import Decision
from finecast_export.exporting import Exported, Sorted, check_library, heading, listing

TOOL: Final = "onnxruntime"
_ONNX: Final = "onnx::"


def _types(decision: Decision) -> frozenset[str]:
    """The types that ONNX has for the op."""
    natives = by_name(decision.op).natives
    return frozenset(n.removeprefix(_ONNX) for n in natives if n.startswith(_ONNX))


def _rounds_result(decision: Decision) -> bool:
    """Whether the op gives codes, to whatever reads its result."""
    return decision.encodings.result is not Format.FP32


def export(plan: Plan) -> Exported:
    """A module with ``quantize(model, output, reader)``."""
    check_library(plan, TOOL, "onnx")
    ops = Sorted.of(plan, TOOL, (Format.INT8,))
    rounded = {t for d in ops.low if _rounds_result(d) for t in _types(d)}
    exact = {t for d in ops.low for t in _types(d)} - rounded
    text = heading(plan, TOOL, "Quantizes an ONNX model, node by node.")
    text += (
        "from onnxruntime.quantization import QuantFormat, QuantType, quantize_static\n\n"
        + listing("NODES_TO_QUANTIZE", [d.node for d in ops.low])
        + listing("NODES_TO_EXCLUDE", [d.node for d in ops.kept])
        + "# Types of nodes whose results are rounded only if a quantized node reads them.\n"
        + listing("RESULTS_IN_FP32", sorted(exact))
        + "\n\ndef quantize(model, output, reader):\n"
        '    """Write the model with the listed nodes in int8; ``reader`` gives calibration'
        ' data."""\n'
        "    quantize_static(\n"
        "        model,\n"
        "        output,\n"
        "        reader,\n"
        "        quant_format=QuantFormat.QDQ,\n"
        "        activation_type=QuantType.QUInt8,\n"
        "        weight_type=QuantType.QInt8,\n"
        "        per_channel=True,\n"
        "        nodes_to_quantize=NODES_TO_QUANTIZE,\n"
        "        nodes_to_exclude=NODES_TO_EXCLUDE,\n"
        "        extra_options={\n"
        '            "WeightSymmetric": True,\n'
        '            "ActivationSymmetric": False,\n'
        '            "OpTypesToExcludeOutputQuantization": RESULTS_IN_FP32,\n'
        "        },\n"
        "    )\n"
    )
    return Exported(
        tool=TOOL,
        text=text,
        stated=ops.counts,
        left_out=ops.left_out,
        notes=tuple(_notes(ops.low, rounded)),
    )


def _notes(low: Sequence[Decision], rounded: Collection[str]) -> Iterator[str]:
    """What ``quantize_static`` does otherwise than the plan.

    Args:
        low: The ops in int8.
        rounded: The types of nodes whose results it quantizes.
    """
    if low:
        yield (
            "scales of values are those that quantize_static finds on its own data, and a"
            " value that any quantized node reads is rounded for all that read it"
        )
    exact = [d for d in low if not _rounds_result(d)]
    more = [d.node for d in exact if not _types(d).isdisjoint(rounded)]
    if rounded:
        others = f", those of {', '.join(more)}, too" if more else ""
        yield (
            f"results of all {' and '.join(sorted(rounded))} nodes that are quantized are"
            f" rounded{others}: right behind the node, where the plan rounds behind its bias"
            " and Relu"
        )
    if any("Conv" in _types(d) and d.node not in more for d in exact):
        yield (
            "results of convolutions stay FP32, as planned, and ONNX Runtime computes such"
            " convolutions in FP32: a plan made with --engine onnxruntime rounds them"
        )

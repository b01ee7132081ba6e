"""ONNX Runtime's ``quantize_static``: the nodes to quantize."""

from __future__ import annotations

from typing import Final

from finecast import Format, Plan
from finecast_export.exporting import Exported, Sorted, check_library, heading, listing

TOOL: Final = "onnxruntime"


def export(plan: Plan) -> Exported:
    """A module with ``quantize(model, output, reader)``."""
    check_library(plan, TOOL, "onnx")
    ops = Sorted.of(plan, TOOL, (Format.INT8,))
    text = heading(plan, TOOL, "Quantizes an ONNX model, node by node.")
    text += (
        "from onnxruntime.quantization import QuantFormat, QuantType, quantize_static\n\n"
        + listing("NODES_TO_QUANTIZE", [d.node for d in ops.low])
        + listing("NODES_TO_EXCLUDE", [d.node for d in ops.kept])
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
        '        extra_options={"WeightSymmetric": True, "ActivationSymmetric": False},\n'
        "    )\n"
    )
    note = (
        "scales of values are those that quantize_static finds on its own data, and a value"
        " that any quantized node reads is rounded for all that read it"
    )
    return Exported(
        tool=TOOL,
        text=text,
        stated=ops.counts,
        left_out=ops.left_out,
        notes=(note,) if ops.low else (),
    )

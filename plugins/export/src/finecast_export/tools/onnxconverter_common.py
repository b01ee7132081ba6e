"""onnxconverter-common's float16: all nodes are fp16 but those in ``node_block_list``."""

from __future__ import annotations

from typing import Final

from finecast import Format, Plan
from finecast_export.exporting import Exported, Sorted, check_library, heading, listing

TOOL: Final = "onnxconverter-common"


def export(plan: Plan) -> Exported:
    """A module with ``convert(model)``, which gives an onnx.ModelProto."""
    check_library(plan, TOOL, "onnx")
    ops = Sorted.of(plan, TOOL, (Format.FP16,))
    text = heading(plan, TOOL, "Converts an ONNX model to fp16, node by node.")
    text += "from onnxconverter_common import float16\n\n"
    text += listing("NODE_BLOCK_LIST", [d.node for d in ops.kept])
    text += (
        "\n\ndef convert(model):\n"
        '    """The model in fp16 but for the listed nodes; ports keep their types."""\n'
        "    return float16.convert_float_to_float16(\n"
        "        model,\n"
        "        keep_io_types=True,\n"
        "        op_block_list=[],  # the list of nodes says all\n"
        "        node_block_list=NODE_BLOCK_LIST,\n"
        "        min_positive_val=0.0,\n"
        "        max_finite_val=65504.0,\n"
        "    )\n"
    )
    return Exported(tool=TOOL, text=text, stated=ops.counts, left_out=ops.left_out)

"""ModelOpt's AutoCast: ``nodes_to_exclude`` keep FP32, all others get one low type."""

from __future__ import annotations

import re
from typing import Final

from finecast import Format, Plan
from finecast.errors import UsageError
from finecast.planning import Decision
from finecast_export.exporting import Exported, Sorted, check_library, heading, listing

TOOL: Final = "modelopt-autocast"
_TYPES: Final = (Format.FP16, Format.BF16)


def export(plan: Plan) -> Exported:
    """A module with ``convert(path)``, which gives an onnx.ModelProto.

    Raises:
        UsageError: If the plan has neither fp16 nor bf16.
    """
    check_library(plan, TOOL, "onnx")
    formats = [d.format for d in plan.counted if d.format in _TYPES]
    if not formats:
        raise UsageError("the plan has no op in fp16 or bf16", fix="name another tool")
    one = max(_TYPES, key=formats.count)

    def refusal(decision: Decision) -> str:
        other = decision.format in _TYPES and decision.format is not one
        return f"it has one reduced-precision type, here {one.label}" if other else ""

    ops = Sorted.of(plan, TOOL, _TYPES, refusal)
    patterns = [f"^{re.escape(d.node)}$" for d in ops.kept]
    text = heading(plan, TOOL, f"Converts an ONNX model to {one.label}, node by node.")
    text += "import math\n\nfrom modelopt.onnx.autocast import convert_to_mixed_precision\n\n"
    text += "# Regular expressions, each of which is the name of a node.\n"
    text += listing("NODES_TO_EXCLUDE", patterns)
    text += (
        "\n\ndef convert(path):\n"
        f'    """The model at ``path`` in {one.label} but for the listed nodes."""\n'
        "    return convert_to_mixed_precision(\n"
        "        onnx_path=str(path),\n"
        f"        low_precision_type={one.label!r},\n"
        "        nodes_to_exclude=NODES_TO_EXCLUDE,\n"
        "        op_types_to_exclude=[],\n"
        "        data_max=math.inf,  # the plan has looked at ranges\n"
        "        init_max=math.inf,\n"
        "        keep_io_types=True,\n"
        "    )\n"
    )
    return Exported(tool=TOOL, text=text, stated=ops.counts, left_out=ops.left_out)

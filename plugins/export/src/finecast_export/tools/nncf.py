"""NNCF: quantization and compression of weights, each with a scope of ops that it ignores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from finecast import Format, Plan
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

    def refusal(decision: Decision) -> str:
        beside = quantizes and decision.format is not Format.INT8
        return (
            "nncf quantizes to int8, and has no other format for single ops" if beside else ""
        )

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

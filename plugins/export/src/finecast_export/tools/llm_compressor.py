"""llm-compressor: a recipe with a group of a quantization modifier for each format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from finecast import Format, Plan
from finecast.numbers import Scaled
from finecast.planning import Decision
from finecast_export.exporting import Exported, Sorted, check_library, not_linear
from finecast_export.tools.torchao import module_of

TOOL: Final = "llm-compressor"


def _numbers(bits: int, kind: str, strategy: str, **more: object) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "dynamic": False,
        **more,
    }


_INT8: Final = _numbers(8, "int", "channel")
_ROWS: Final = _numbers(8, "int", "token", dynamic=True)
_NV: Final = {"group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
_FP4: Final = _numbers(4, "float", "tensor_group", **_NV)
# Of weights, and of the values that meet them.
SCHEMES: Final[Mapping[Format, tuple[dict[str, Any], dict[str, Any] | None]]] = {
    Format.INT8_WEIGHTS: (_INT8, None),
    Format.INT8_DYNAMIC_ROW: (_INT8, _ROWS),
    Format.FP8_DYNAMIC_ROW: (
        _numbers(8, "float", "channel"),
        _numbers(8, "float", "token", dynamic=True),
    ),
    Format.INT4_WEIGHTS: (_numbers(4, "int", "group", group_size=128), None),
    Format.NVFP4: (_FP4, {**_FP4, "dynamic": "local"}),
    Format.NVFP4_WEIGHTS_BF16: (_FP4, None),
}


def _scheme(decision: Decision) -> tuple[dict[str, Any], dict[str, Any] | None]:
    weights, values = SCHEMES[decision.format]
    constants = decision.encodings.constants.values()
    groups = [e.group for e in constants if isinstance(e, Scaled) and e.group]
    return ({**weights, "group_size": groups[0]} if groups else weights), values


def export(plan: Plan) -> Exported:
    """The recipe as YAML, which JSON is, too."""
    check_library(plan, TOOL, "aten")
    ops = Sorted.of(plan, TOOL, SCHEMES, not_linear)
    groups: dict[str, dict[str, Any]] = {}
    for decision in ops.low:
        weights, values = _scheme(decision)
        key = json.dumps([decision.format.label, weights])
        group = groups.setdefault(
            key, {"targets": [], "weights": weights, "input_activations": values}
        )
        group["targets"].append(f"re:^{re.escape(module_of(decision))}$")
    named = {f"group_{i}": group for i, group in enumerate(groups.values())}
    recipe = {
        "quantization_stage": {
            "quantization_modifiers": {
                "QuantizationModifier": {"ignore": [], "config_groups": named}
            }
        }
    }
    text = f"# Of the plan {plan.digest}, for llm-compressor's oneshot(recipe=...).\n"
    text += json.dumps(recipe, indent=2) + "\n"
    return Exported(tool=TOOL, text=text, stated=ops.counts, left_out=ops.left_out)

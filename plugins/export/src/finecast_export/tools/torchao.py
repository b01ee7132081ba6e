"""torchao: ``FqnToConfig``, a configuration for each module by its qualified name."""

from __future__ import annotations

from typing import Final

from finecast import Format, Plan
from finecast.planning import Decision
from finecast_export.exporting import Exported, Sorted, check_library, heading, not_linear

TOOL: Final = "torchao"
_QUANTIZATION: Final = "torchao.quantization"
_MX: Final = "torchao.prototype.mx_formats"
_FP4: Final = "torch.float4_e2m1fn_x2"
_FLOOR: Final = "scaling_mode=ScaleCalculationMode.FLOOR"
_BY_ROW: Final = "granularity=PerRow()"
# The module that has the configuration, its name, and its arguments.
CONFIGS: Final = {
    Format.INT8_WEIGHTS: (_QUANTIZATION, "Int8WeightOnlyConfig", "version=2"),
    Format.INT8_DYNAMIC_ROW: (
        _QUANTIZATION,
        "Int8DynamicActivationInt8WeightConfig",
        "version=2",
    ),
    Format.FP8_DYNAMIC_ROW: (
        _QUANTIZATION,
        "Float8DynamicActivationFloat8WeightConfig",
        _BY_ROW,
    ),
    Format.INT4_WEIGHTS: (_QUANTIZATION, "IntxWeightOnlyConfig", "weight_dtype=torch.int4"),
    Format.MXFP8_E4M3: (_MX, "MXDynamicActivationMXWeightConfig", _FLOOR),
    Format.MXFP4: (
        _MX,
        "MXDynamicActivationMXWeightConfig",
        f"activation_dtype={_FP4}, weight_dtype={_FP4}, {_FLOOR}",
    ),
    Format.NVFP4: (
        _MX,
        "NVFP4DynamicActivationNVFP4WeightConfig",
        "use_triton_kernel=False",
    ),
}


def module_of(decision: Decision) -> str:
    """The qualified name of the module whose op this is."""
    return decision.node.rpartition("/")[0]


def export(plan: Plan) -> Exported:
    """A module with ``CONFIG``, and ``quantize(module)``, which changes the module."""
    check_library(plan, TOOL, "aten")
    ops = Sorted.of(plan, TOOL, CONFIGS, not_linear)
    used = dict.fromkeys(CONFIGS[d.format] for d in ops.low)
    by_row = any(_BY_ROW in arguments for _, _, arguments in used)
    mx = any(_FLOOR in arguments for _, _, arguments in used)
    imports = {f"from {module} import {name}" for module, name, _ in used}
    imports |= {f"from {_QUANTIZATION} import FqnToConfig, quantize_"}
    if by_row:
        imports |= {f"from {_QUANTIZATION} import PerRow"}
    if mx:
        imports |= {f"from {_MX}.config import ScaleCalculationMode"}
    text = heading(plan, TOOL, "Quantizes a module, one linear layer after the other.")
    text += "import torch\n" + "".join(f"{line}\n" for line in sorted(imports))
    text += "\nCONFIG = FqnToConfig(\n    {\n"
    for decision in ops.low:
        _, name, arguments = CONFIGS[decision.format]
        text += f"        {module_of(decision)!r}: {name}({arguments}),\n"
    text += (
        "    }\n)\n\n\ndef quantize(module: torch.nn.Module) -> None:\n"
        '    """Quantize the listed layers in place; all others stay as they are."""\n'
        "    quantize_(module, CONFIG, filter_fn=None)\n"
    )
    blocks = [d.format.label for d in ops.low if CONFIGS[d.format][0] == _MX]
    notes = [f"{label} in torchao is for modules in bf16 on a GPU" for label in blocks]
    return Exported(
        tool=TOOL,
        text=text,
        stated=ops.counts,
        left_out=ops.left_out,
        notes=tuple(dict.fromkeys(notes)),
    )

"""How a tuned model is run: one line, with which ``tune`` ends; README.md says more."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path


def how_to_run(output: Path, engine: str, formats: Collection[str]) -> str:
    """What runs ``output`` as it was tuned; empty where nothing here does.

    Args:
        output: The tuned model.
        engine: The engine it was tuned in.
        formats: Labels of the formats that its ops compute in.
    """
    name = repr(str(output))
    if engine == "openvino":
        hint = '{"INFERENCE_PRECISION_HINT": "f32"}'
        text = f"openvino.Core().compile_model({name}, config={hint})"
        # Its default lowers the ops that were left in fp32, too.
        text += "; without the hint OpenVINO chooses types itself"
    elif engine == "onnxruntime":
        text = f"onnxruntime.InferenceSession({name})"
    elif engine == "torch":
        text = f"torch.compile(torch.export.load({name}).module())"
    else:
        return ""
    low = "bf16" in formats and engine == "openvino"
    return f"run it: {text}" + ("; ONNX Runtime has no bf16 on CPUs" if low else "")

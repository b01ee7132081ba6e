"""How a tuned model is run in each engine: the line that ``tune`` prints last."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from finecast.engines.numerics import (
    DYNAMIC_QUANTIZATION,
    HINTS,
    ONNXRUNTIME_CHANGED,
    dynamic_group,
    openvino_settings,
)
from finecast.numbers.formats import DYNAMIC, Format
from finecast.planning.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Code that runs a model in the types that it states.

    Attributes:
        code: Python; ``{path}`` stands for a literal of the model's path, ``{config}`` for
            one of the engine's settings that change numbers.
        modules: What the code imports.
        call: Python that calls the ``model`` that the code gives.
        throughput: The code for many requests at once, if it differs.
        settings: What the code's settings are for.
        types: What they say of a model that states its types itself.
        serving: How the model is given many requests at once.
        notes: Notes for users of a low format, by its label.
    """

    code: str
    modules: tuple[str, ...]
    call: str
    throughput: str = ""
    settings: str = ""
    types: str = ""
    serving: str = ""
    notes: Mapping[str, str] = field(default_factory=dict[str, str])


# Statements that make ONNX Runtime's session options.
_OPTIONS: Final = "; ".join(
    (
        "options = onnxruntime.SessionOptions()",
        *(f"options.add_session_config_entry{entry}" for entry in ONNXRUNTIME_CHANGED.items()),
    )
)

USAGES: Final[Mapping[str, Usage]] = {
    "openvino": Usage(
        # By default OpenVINO lowers the ops that the plan left in fp32, too.
        code="openvino.Core().compile_model({path}, config={config})",
        modules=("openvino",),
        call="outputs = model(inputs)  # inputs: an array for each input, by its name",
        settings="without these settings OpenVINO chooses types itself",
        types="f32 is for the ops that the plan left in fp32: low types are in the model, and"
        " stay",
        serving="give it requests by an openvino.AsyncInferQueue; without the performance hint"
        " OpenVINO serves one request at a time",
        notes={
            "bf16": "ONNX Runtime has no bf16 on CPUs",
            "int8_weights": "by default OpenVINO rounds what meets such weights, too: faster"
            " and less exact",
            **dict.fromkeys(
                (fmt.label for fmt in DYNAMIC),
                f"{DYNAMIC_QUANTIZATION} has OpenVINO round what meets such weights, as"
                " planned; with 0 it does not: slower and more exact",
            ),
        },
    ),
    "onnxruntime": Usage(
        code=f"{_OPTIONS}; onnxruntime.InferenceSession({{path}}, options)",
        modules=("onnxruntime",),
        call="outputs = model.run(None, inputs)  # inputs: an array for each, by its name",
        throughput=f"{_OPTIONS}; options.intra_op_num_threads = 1;"
        " onnxruntime.InferenceSession({path}, options)",
        serving="call it from a thread for each CPU",
    ),
    "tensorflow": Usage(
        code='tensorflow.saved_model.load({path}).signatures["serving_default"]',
        modules=("tensorflow",),
        call="outputs = model(**inputs)  # inputs: a tensor for each input, by its name",
    ),
    "torch": Usage(
        code="torch.compile(torch.export.load({path}).module())",
        modules=("torch",),
        call="outputs = model(*inputs)  # inputs: the tensors that the module takes",
        notes={
            "int8": "before, import torch.ao.quantization.fx._decomposed, which has the ops on"
            " codes, and set torch._inductor.config.freezing = True; run it under"
            " torch.no_grad()",
        },
    ),
}


def how_to_run(
    output: Path,
    engine: str,
    formats: Collection[str],
    *,
    throughput: bool = False,
    by_hint: bool = False,
) -> str:
    """The text that says how to run ``output``; empty for an engine without a usage.

    Its first line is code alone, to be copied; the lines after it are notes.

    Args:
        output: The tuned model.
        engine: The engine it was tuned in.
        formats: Labels of the formats that its ops compute in.
        throughput: Whether it was tuned for many requests at once.
        by_hint: Whether the engine's hint lowers its ops, and not casts in the model.
    """
    usage = USAGES.get(engine)
    if usage is None:
        return ""
    stated, notes = _stated(usage, output, formats, throughput=throughput, by_hint=by_hint)
    return "\n".join((f"run it: {'; '.join(stated)}", *notes))


def script(
    output: Path,
    engine: str,
    formats: Collection[str],
    *,
    throughput: bool = False,
    by_hint: bool = False,
) -> str:
    """Complete Python that loads ``output`` and calls it; its arguments are as ``how_to_run``.

    Empty for an engine without a usage.
    """
    usage = USAGES.get(engine)
    if usage is None:
        return ""
    stated, notes = _stated(usage, output, formats, throughput=throughput, by_hint=by_hint)
    *before, model = stated
    lines = [f"import {module}" for module in usage.modules]
    notes += [usage.types] if usage.types and not by_hint else []
    lines += ["", *(f"# {note}" for note in notes), *before, f"model = {model}", usage.call]
    return "\n".join(lines)


def _stated(
    usage: Usage, output: Path, formats: Collection[str], *, throughput: bool, by_hint: bool
) -> tuple[list[str], list[str]]:
    """The statements that give a model of ``output``, the last its value; notes on it."""
    low = _lowered_by(formats) if by_hint else None
    hint = HINTS[low or Format.FP32]
    notes = (n for label, n in usage.notes.items() if label in formats and not by_hint)
    code = (throughput and usage.throughput) or usage.code
    config = _config(hint, formats, throughput=throughput)
    parts = {"path": repr(str(output)), "config": config}
    stated = [statement.format(**parts) for statement in code.split("; ")]
    told = (usage.settings, usage.serving if throughput else "", *notes)
    return stated, [*dict.fromkeys(note for note in told if note)]


def in_memory_notes(plan: Plan) -> tuple[str, ...]:
    """What to tell users of a model in memory that computes low by the engine's settings."""
    low = _lowered_by(plan.counts) if plan.by_hint else None
    rounds = bool(dynamic_group(plan.counts))
    if (low is None and not rounds) or plan.engine not in USAGES:
        return ()
    config = _config(HINTS[low or Format.FP32], plan.counts)
    code = USAGES[plan.engine].code.format(path="model", config=config)
    if low is None:
        made = f"the model is made for {plan.engine}'s dynamic quantization: run it by {code}"
        return (f"{made}; with a {DYNAMIC_QUANTIZATION} of 0 all values are read exactly",)
    made = f"the model is made for {plan.engine}'s precision hint: run it by {code}"
    return (f'{made}; under "{HINTS[Format.FP32]}" all of it computes in fp32',)


def _config(hint: str, formats: Collection[str], *, throughput: bool = False) -> str:
    """OpenVINO's settings as a dictionary in Python."""
    serving = {"PERFORMANCE_HINT": "THROUGHPUT"} if throughput else {}
    return str(openvino_settings(hint, formats) | serving).replace("'", '"')


def _lowered_by(formats: Collection[str]) -> Format | None:
    """The format among those of ``formats`` to which a precision hint lowers ops."""
    return next((f for f in HINTS if f.label in formats and f is not Format.FP32), None)

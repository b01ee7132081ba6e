"""How a tuned model is run in each engine: the Python that ``tune`` prints last.

Law: the code runs as it is pasted, from imports to a call, in the types that were measured.
The inputs of that call are zeros, where their shapes are known; the user's take their place.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from finecast.devices.kv_cache import BEAM_INPUT, kv_cache_settings
from finecast.engines.numerics import (
    DYNAMIC_QUANTIZATION,
    HINTS,
    ONNXRUNTIME_CHANGED,
    TENSORFLOW_REWRITES,
    dynamic_group,
    openvino_settings,
)
from finecast.numbers.formats import DYNAMIC, Format
from finecast.planning.plan import Plan
from finecast.plugin import title_of

Inputs = Mapping[str, tuple[tuple[int, ...], str]]
"""By the name of an input the shape and NumPy's type of an array for it."""
_WIDTH: Final = 80
NO_BF16: Final = "ONNX Runtime has no bf16 on CPUs"
"""Why a file in bf16 runs in OpenVINO alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Code that runs a model in the types that it states.

    In the templates ``{path}`` stands for a literal of the model's path, ``{device}`` for one
    of the engine's device, and ``settings`` is a name in the code for its settings.

    Attributes:
        modules: What the code imports.
        model: An expression that gives the model.
        call: Statements that call ``model`` on ``inputs``.
        zeros: An expression that gives zeros of a ``{shape}`` and a ``{dtype}``; empty where
            the call needs no ``inputs``.
        tensors: For a type that NumPy lacks, by its name, that expression, and statements
            that it needs.
        named: For an input by its name, an expression in place of zeros.
        before: Statements that stand before the model.
        four_bits: Statements that follow them for a model with weights of 4 bits.
        throughput: Statements that follow them for many requests at once.
        settings: Whether there are settings that change numbers, and why they are stated.
        types: What the settings say of a model that states its types itself.
        serving: How the model is given many requests at once.
        notes: Notes for users of a low format, by its label and the end of the model's name.
        low: Further statements before the model of a low format, by its label.
        hint: How the fp32 model is run by the engine's hint for a format, where it has one;
            ``{settings}`` are OpenVINO's under the hint, ``{rewrite}`` is TensorFlow's.
    """

    modules: tuple[str, ...]
    model: str
    call: tuple[str, ...]
    zeros: str = ""
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    named: Mapping[str, str] = field(default_factory=dict[str, str])
    before: tuple[str, ...] = ()
    four_bits: tuple[str, ...] = ()
    throughput: tuple[str, ...] = ()
    settings: str = ""
    types: str = ""
    serving: str = ""
    notes: Mapping[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    low: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    hint: str = ""


_FREEZES: Final = (
    "import torch.ao.quantization.fx._decomposed  # the ops on quantized integers",
    "torch._inductor.config.freezing = True",
)
_COMPILED: Final = Usage(
    modules=("torch",),
    before=("program = torch.export.load({path})",),
    model="torch.compile(program.module(), dynamic=False)",
    call=(
        "args, kwargs = program.example_inputs",
        "with torch.no_grad():",
        "    outputs = model(*args, **kwargs)",
    ),
    low={"int8": _FREEZES, "int8_dynamic_row": _FREEZES},
)

USAGES: Final[Mapping[str, Usage]] = {
    "openvino": Usage(
        modules=("numpy", "openvino"),
        # By default OpenVINO lowers the ops that the plan left in fp32, too.
        model="openvino.Core().compile_model({path}, {device}, settings)",
        zeros="numpy.zeros({shape}, {dtype})",
        # OpenVINO (2026.4) takes no array for such an input, not even one of ml_dtypes.
        tensors={
            "bfloat16": (
                "bf16(numpy.zeros({shape}, 'uint16'))",
                "# an output in bf16 is given as bits: bf16(outputs[NAME]) passes state on",
                "bf16 = lambda bits: openvino.Tensor(bits, bits.shape, openvino.Type.bf16)",
            )
        },
        # Each row of a batch goes on with its own text.
        named={BEAM_INPUT: "numpy.arange({shape[0]}, dtype={dtype})"},
        call=("outputs = model(inputs)",),
        settings="without these settings OpenVINO chooses types itself",
        types="f32 is for the plan's fp32 ops: ops in reduced precision keep their types",
        serving="give it requests by an openvino.AsyncInferQueue; without the performance hint"
        " OpenVINO serves one request at a time",
        notes={
            ("bf16", ".onnx"): NO_BF16,
            **{
                (label, ".onnx"): "by default OpenVINO rounds what meets such weights, too:"
                " faster and less exact"
                for label in ("int8_weights", "int4_weights")
            },
            **{
                (fmt.label, ""): f"{DYNAMIC_QUANTIZATION} has OpenVINO round what meets such"
                " weights, as planned; with 0 it does not: slower and more exact"
                for fmt in DYNAMIC
            },
        },
        hint="openvino.Core().compile_model({path}, {device}, {settings})",
    ),
    "onnxruntime": Usage(
        modules=("numpy", "onnxruntime"),
        before=("options = onnxruntime.SessionOptions()",),
        four_bits=(
            "# by default ONNX Runtime rounds what meets weights of 4 bits to 8 bits",
            *(
                f"options.add_session_config_entry{entry}"
                for entry in ONNXRUNTIME_CHANGED.items()
            ),
        ),
        throughput=("options.intra_op_num_threads = 1",),
        model="onnxruntime.InferenceSession({path}, options)",
        zeros="numpy.zeros({shape}, {dtype})",
        call=("outputs = model.run(None, inputs)",),
        serving="call it from a thread for each CPU",
    ),
    "tensorflow": Usage(
        modules=("tensorflow",),
        model='tensorflow.saved_model.load({path}).signatures["serving_default"]',
        zeros="tensorflow.zeros({shape}, {dtype})",
        call=("outputs = model(**inputs)",),
        hint="call tensorflow.config.optimizer.set_experimental_options({rewrite}) before"
        " the model is called for the first time",
    ),
    "torch": _COMPILED,
    "torch-eager": replace(_COMPILED, model="program.module()"),
}


def how_to_run(
    output: Path,
    engine: str,
    formats: Collection[str],
    *,
    inputs: Inputs | None = None,
    throughput: bool = False,
    by_hint: bool = False,
    kv_cache: Format = Format.FP32,
) -> tuple[str, ...]:
    """Lines of Python that load ``output`` and call it; none for an engine without a usage.

    Args:
        output: The tuned model.
        engine: The engine it was tuned in, as ``NAME`` or ``NAME:DEVICE``.
        formats: Labels of the formats that its ops compute in, and of 4-bit types in it.
        inputs: Arrays that it was called with; None where they are not known.
        throughput: Whether it was tuned for many requests at once.
        by_hint: Whether the engine's hint lowers its ops, and not casts in the model.
        kv_cache: The format in which the engine keeps keys and values of earlier calls.
    """
    name, _, device = engine.partition(":")
    usage = USAGES.get(name)
    if usage is None:
        return ()
    low = _lowered_by(formats) if by_hint else None
    notes = [usage.settings, usage.types if not by_hint else ""]
    notes += [usage.serving] if throughput else []
    notes += [
        note
        for (label, end), note in usage.notes.items()
        if label in formats and output.name.endswith(end) and not by_hint
    ]
    lines = [f"import {', '.join(usage.modules)}"]
    low_lines = [line for label, of in usage.low.items() if label in formats for line in of]
    lines += dict.fromkeys(low_lines)
    for note in dict.fromkeys(filter(None, notes)):
        indent = "# "
        lines += textwrap.wrap(f"# {note}", _WIDTH, subsequent_indent=indent)
    if usage.settings:
        settings = _settings(HINTS[low or Format.FP32], formats, throughput=throughput)
        settings |= {} if kv_cache is Format.FP32 else kv_cache_settings(kv_cache)
        lines += ["settings = {", *_filled(settings), "}"]
    parts = {"path": repr(str(output)), "device": repr(device or "CPU")}
    lines += [line.format(**parts) for line in usage.before]
    lines += usage.four_bits if any("int4" in label for label in formats) else ()
    lines += usage.throughput if throughput else ()
    lines.append(f"model = {usage.model.format(**parts)}")
    if usage.zeros:
        lines += _zeros(usage, inputs)
    return (*lines, *usage.call)


def _zeros(usage: Usage, inputs: Inputs | None) -> list[str]:
    """The statement that makes ``inputs``, of zeros where their shapes are known."""
    if not inputs:
        return ["inputs = {}  # an array for each input, by its name"]
    templates = {
        dtype: usage.tensors.get(dtype, (usage.zeros,)) for _, dtype in inputs.values()
    }
    needed = [line for _, *lines in templates.values() for line in lines]
    zeros = [
        f"{name!r}: "
        + usage.named.get(name, templates[dtype][0]).format(shape=shape, dtype=repr(dtype))
        for name, (shape, dtype) in inputs.items()
    ]
    if len(zeros) == 1:
        return [*needed, f"inputs = {{{zeros[0]}}}  # your data"]
    return [*needed, "inputs = {  # your data", *(f"    {zero}," for zero in zeros), "}"]


def _filled(settings: Mapping[str, Any]) -> list[str]:
    """A dictionary's items as lines of no more than the usual width."""
    items = [f"{_literal(key)}: {_literal(value)}," for key, value in settings.items()]
    lines = [""]
    for item in items:
        if len(lines[-1]) + len(item) + 1 > _WIDTH - 4:
            lines.append("")
        lines[-1] += f" {item}" if lines[-1] else item
    return [f"    {line}" for line in lines]


def by_the_hint(engine: str, fmt: Format, model: str, formats: Collection[str] = ()) -> str:
    """How a model is run by an engine's hint; empty where the engine has none.

    Args:
        engine: The engine, as ``NAME`` or ``NAME:DEVICE``.
        fmt: The format that the hint lowers to.
        model: The model in Python: a variable, or a literal of its path.
        formats: Labels of the formats that the model itself states.
    """
    name, _, device = engine.partition(":")
    settings = ", ".join(
        f"{_literal(k)}: {_literal(v)}"
        for k, v in _settings(HINTS.get(fmt, ""), formats).items()
    )
    return (
        USAGES[name].hint.format(
            path=model,
            device=repr(device or "CPU"),
            settings=f"{{{settings}}}",
            rewrite={TENSORFLOW_REWRITES.get(fmt, ""): True},
        )
        if name in USAGES
        else ""
    )


def in_memory_notes(plan: Plan) -> tuple[str, ...]:
    """What to tell users of a model in memory that computes low by the engine's settings."""
    low = _lowered_by(plan.counts) if plan.by_hint else None
    made_for = low or (Format.FP32 if dynamic_group(plan.counts) else None)
    code = by_the_hint(plan.engine, made_for, "model", plan.counts) if made_for else ""
    if not code:
        return ()
    made = f"the model is made for {title_of(plan.engine)}'s"
    if low is None:
        note = f"{made} dynamic quantization: run it by {code}"
        return (f"{note}; with a {DYNAMIC_QUANTIZATION} of 0 all values are read exactly",)
    note = f"{made} precision hint: run it by {code}"
    return (f'{note}; under "{HINTS[Format.FP32]}" all of it computes in fp32',)


def _settings(
    hint: str, formats: Collection[str] = (), *, throughput: bool = False
) -> dict[str, Any]:
    """OpenVINO's settings under a precision hint, for a model with these formats."""
    serving = {"PERFORMANCE_HINT": "THROUGHPUT"} if throughput else {}
    return openvino_settings(hint, formats) | serving


def _literal(value: object) -> str:
    """A value in Python, text in double quotes."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _lowered_by(formats: Collection[str]) -> Format | None:
    """The format among those of ``formats`` to which a precision hint lowers ops."""
    return next((f for f in HINTS if f.label in formats and f is not Format.FP32), None)

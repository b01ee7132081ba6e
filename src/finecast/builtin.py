"""What the core itself registers, by the values that plugins use."""

from __future__ import annotations

from typing import Final

from finecast.plugin import IR, ONNX, PROGRAMS, EngineEntry, FrontendEntry, Plugin, Verb

_VERBS: Final = {
    "doctor": "Which formats are faster on this machine, measured by engine.",
    "inspect": "A model's ops by class and type, parameters, FLOPs and bytes.",
    "convert": "Convert a model to reduced precision by rules, and verify it.",
    "tune": "Find the fastest mixed-precision model that keeps your accuracy.",
    "apply": "Apply a saved plan to a model.",
    "verify": "Check that a tuned model computes the same on another machine.",
    "diff": "What differs between two plans, two models, or one of each.",
    "explain": "Why each op has its format.",
    "blame": "Find the ops that make a quantized model lose accuracy.",
    "emulate": "Accuracy on a device that is not here, and the ops that cost it.",
    "targets": "The devices that --target takes.",
    "formats": "Range, precision, strengths and weaknesses of the number formats.",
    "profile": "Compare latency, throughput, memory and times by op of models.",
    "cache": "Show or clear the timing cache of tune.",
}
_TORCH: Final = "pip install torch onnxscript"
_EXTERNAL_DATA: Final = "--external-data/--one-file"

CORE: Final = Plugin(
    name="finecast",
    summary="ONNX, OpenVINO and PyTorch models on engines here and on emulated devices",
    verbs=tuple(
        Verb(name, summary, f"finecast.cli.{name}") for name, summary in _VERBS.items()
    ),
    engines=(
        EngineEntry(
            name="openvino",
            title="OpenVINO",
            module="finecast.engines.openvino",
            factory="OpenVinoEngine",
            requires="openvino",
            install="pip install openvino",
            reads=(ONNX, IR),
        ),
        EngineEntry(
            name="onnxruntime",
            title="ONNX Runtime",
            module="finecast.engines.onnxruntime",
            factory="OnnxRuntimeEngine",
            requires="onnxruntime",
            install="pip install onnxruntime",
        ),
        EngineEntry(
            name="torch",
            title="PyTorch (compiled)",
            module="finecast.engines.torch",
            factory="compiled",
            requires="torch",
            install=_TORCH,
            reads=(PROGRAMS,),
            framework="PyTorch",
        ),
        EngineEntry(
            name="torch-eager",
            title="PyTorch (eager)",
            module="finecast.engines.torch",
            factory="eager",
            requires="torch",
            install=_TORCH,
            reads=(PROGRAMS,),
            framework="PyTorch",
        ),
    ),
    frontends=(
        FrontendEntry(
            suffixes=(".onnx",),
            packages=("onnx", "onnx_ir", "finecast.frontends.onnx"),
            module="finecast.native.onnx",
            requires="onnx",
            install="pip install finecast",
            files=ONNX,
            beside=("{name}.data",),
            opsets=True,
        ),
        FrontendEntry(
            suffixes=(".xml", ".onnx", ".keras", ".tflite", ".pb", ".pdmodel"),
            packages=("openvino", "finecast.frontends.openvino", "keras"),
            module="finecast.native.openvino",
            requires="openvino",
            install="pip install openvino",
            files=IR,
            lacks={
                _EXTERNAL_DATA: "leave it out: constants are in the .bin beside it",
                "--from-type": "convert the model in fp32",
            },
            folders=("saved_model.pb",),
            beside=("{stem}.bin",),
        ),
        FrontendEntry(
            suffixes=(".pt2",),
            packages=("torch", "finecast.frontends.torch"),
            module="finecast.native.torch.model",
            requires="torch",
            install=_TORCH,
            files=PROGRAMS,
            lacks={
                _EXTERNAL_DATA: "leave it out",
                "--from-type": "export the module in fp32: copy.deepcopy(module).float()",
            },
            captures=True,
        ),
    ),
)
"""The core. The frontend of ONNX comes first: it reads files of unknown suffix, too."""

"""What the toy adds."""

from typing import Final

from finecast.plugin import IR, ONNX, EngineEntry, Plugin, Verb

PLUGIN: Final = Plugin(
    name="toy",
    summary="a verb and an engine",
    packages={"finecast.toy": "finecast_toy.greet"},
    names={"finecast.greet": "finecast_toy.greet:greeting"},
    verbs=(Verb("greet", "Say how many ops a model has.", "finecast_toy.greet"),),
    engines=(
        EngineEntry(
            name="reference",
            module="finecast_toy.engine",
            factory="ReferenceEngine",
            requires="onnx",
            install="pip install onnx",
            reads=(ONNX, IR),
        ),
    ),
)

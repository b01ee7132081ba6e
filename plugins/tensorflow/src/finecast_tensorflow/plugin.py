"""What the plugin for TensorFlow adds to finecast."""

from __future__ import annotations

from typing import Final

from finecast.plugin import SAVED_MODELS, EngineEntry, FrontendEntry, Plugin

PLUGIN: Final = Plugin(
    name="tensorflow",
    summary="SavedModels and Keras models, as TensorFlow runs them; Keras's dtype policies",
    packages={
        "finecast.tensorflow": "finecast_tensorflow.functions",
        "finecast.keras": "finecast_tensorflow.keras",
    },
    engines=(
        EngineEntry(
            name="tensorflow",
            title="TensorFlow",
            module="finecast_tensorflow.engine",
            factory="TensorFlowEngine",
            requires="tensorflow",
            install="pip install tensorflow",
            reads=(SAVED_MODELS,),
            framework="TensorFlow",
        ),
    ),
    frontends=(
        FrontendEntry(
            suffixes=(".keras",),
            packages=("keras", "tensorflow", "finecast_tensorflow"),
            module="finecast_tensorflow.native",
            requires="tensorflow",
            install="pip install tensorflow; or name an output .xml, for OpenVINO",
            files=SAVED_MODELS,
            lacks={
                "--external-data/--one-file": "leave it out",
                "--from-type": "save the model in fp32 first",
            },
            folders=("saved_model.pb",),
            writes_folder=True,
        ),
    ),
)

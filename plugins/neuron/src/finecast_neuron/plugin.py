"""What the plugin for the Neuron compilers adds to finecast."""

from __future__ import annotations

from typing import Final

from finecast.plugin import OptionGroup, Plugin, Verb

PLUGIN: Final = Plugin(
    name="neuron",
    summary="options of neuronx-cc and neuron-cc, and the ladder of each",
    packages={"finecast.compat.neuron": "finecast_neuron"},
    names={"finecast.ladder": "finecast_neuron.api:ladder"},
    options=(
        OptionGroup(
            "finecast_neuron.options:CompilerOptions",
            verbs=("convert", "tune", "explain", "emulate", "blame"),
            heading="The compiler of a device",
            several=("--fast-math",),
        ),
    ),
    verbs=(
        Verb(
            "ladder",
            "Emulate a device's compiler with each of its options.",
            "finecast_neuron.command",
        ),
    ),
)

"""The Neuron compilers' precision options, as neuronx-cc and neuron-cc take them."""

from __future__ import annotations

from finecast.devices.neuron.choice import (
    TF32_NOTE,
    CompilerChoice,
    check_formats,
    choose,
    emulated,
    explicit_casts,
)
from finecast.devices.neuron.ladders import LADDERS, NEURON_TARGETS, Rung, casts_off, ladder
from finecast.devices.neuron.options import (
    Compiler,
    NeuronOptions,
    after_environment,
    compiler_for,
    resolve,
)
from finecast.devices.neuron.reading import Given, from_environment, read

__all__ = [
    "LADDERS",
    "NEURON_TARGETS",
    "TF32_NOTE",
    "Compiler",
    "CompilerChoice",
    "Given",
    "NeuronOptions",
    "Rung",
    "after_environment",
    "casts_off",
    "check_formats",
    "choose",
    "compiler_for",
    "emulated",
    "explicit_casts",
    "from_environment",
    "ladder",
    "read",
    "resolve",
]

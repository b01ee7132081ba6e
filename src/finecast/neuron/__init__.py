"""The Neuron compilers' precision options, as neuronx-cc and neuron-cc take them."""

from __future__ import annotations

from finecast.neuron.ladders import LADDERS, Rung, ladder
from finecast.neuron.options import Compiler, NeuronOptions, compiler_for, resolve
from finecast.neuron.reading import Given, from_environment, read

__all__ = [
    "LADDERS",
    "Compiler",
    "Given",
    "NeuronOptions",
    "Rung",
    "compiler_for",
    "from_environment",
    "ladder",
    "read",
    "resolve",
]

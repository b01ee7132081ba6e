"""Ladders: each compiler's documented options in order of accuracy, as commands and code."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from typing import Final

from finecast.devices.neuron.options import Compiler, NeuronOptions, compiler_for, resolve
from finecast.devices.neuron.reading import Given, read

LADDERS: Final[dict[Compiler, tuple[str, ...]]] = {
    Compiler.NEURONX_CC: (
        "--auto-cast none",
        "--auto-cast matmult --auto-cast-type tf32",
        "--auto-cast all --auto-cast-type tf32",
        "--auto-cast matmult --auto-cast-type fp16",
        "--auto-cast all --auto-cast-type fp16",
        "--auto-cast matmult --auto-cast-type bf16",
        "--auto-cast all --auto-cast-type bf16",
    ),
    Compiler.NEURON_CC: (
        "--fast-math none",
        "--fast-math fp32-cast-matmult no-fast-relayout",
        "--fast-math fp32-cast-matmult",
        "--fast-math all",
    ),
}
"""The options that each compiler's guide lists, most accurate first."""

NEURON_TARGETS: Final = ("trn1", "trn1n", "inf2", "trn2", "trn3", "inf1")
"""The devices that the two compilers build for."""

_SNIPPETS: Final = {
    Compiler.NEURONX_CC: (
        "torch_neuronx.trace(model, example_inputs, compiler_args={arguments})"
        "  # or NEURON_CC_FLAGS={flags}"
    ),
    Compiler.NEURON_CC: "torch.neuron.trace(model, example_inputs, compiler_args={arguments})",
}
# Neither compiler reads ONNX: a framework traces the model and passes it as HLO.
_COMMANDS: Final = {
    Compiler.NEURONX_CC: (
        "neuronx-cc compile {model} --framework XLA --target {target} {arguments}"
        " --output {output}"
    ),
    Compiler.NEURON_CC: (
        "neuron-cc compile {model} --framework XLA {arguments} --output {output}"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One step of a ladder: its options as the guide spells them, and in full."""

    name: str
    options: NeuronOptions

    def command(self, model: str = "model.hlo", output: str = "model.neff") -> str:
        """The compiler's exact command line."""
        return _COMMANDS[self.options.compiler].format(
            model=shlex.quote(model),
            target=self.options.target,
            arguments=shlex.join(self.arguments),
            output=shlex.quote(output),
        )

    @property
    def arguments(self) -> tuple[str, ...]:
        """The rung's own options, then the flags that were asked for on all rungs."""
        flags = (a for a in self.options.arguments if a.startswith(("--enable", "--disable")))
        return (*self.name.split(), *flags)

    @property
    def snippet(self) -> str:
        """One line of Python that passes the options through the framework."""
        return _SNIPPETS[self.options.compiler].format(
            arguments=json.dumps(list(self.arguments)),
            flags=json.dumps(shlex.join(self.arguments)),
        )


def casts_off(target: str) -> str:
    """The flags by which the compiler for ``target`` adds no casts; empty if it has none."""
    return LADDERS[compiler_for(target)][0] if target in NEURON_TARGETS else ""


def ladder(target: str, base: Given | None = None, *, sdk: str | None = None) -> list[Rung]:
    """All rungs of the compiler for ``target``, most accurate first.

    Args:
        target: The target.
        base: Options that hold on every rung: saturation, accumulation, rounding. Its
            options about casts are ignored.
        sdk: Release of the Neuron SDK.
    """
    rungs: list[Rung] = []
    held = replace(
        base or Given(),
        auto_cast=None,
        auto_cast_type=None,
        fast_math=None,
        fp32_cast=None,
        target=None,
    )
    for name in LADDERS[compiler_for(target)]:
        given = read(name.split()).over(held)
        rungs.append(Rung(name=name, options=resolve(given, sdk=sdk, target=target)))
    return rungs

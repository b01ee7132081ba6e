"""Ladders: each compiler's documented options in order of accuracy, as commands and code."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Final

from finecast.compat.neuron.compilers import Compiler, compiler_for, resolve
from finecast.compat.neuron.flags import Given, read
from finecast.errors import UsageError
from finecast.naming import spelled
from finecast.tuning.ladder import Rung

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

# How a framework takes the options: {arguments} as a list, {flags} as one string.
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
        "neuronx-cc compile {{model}} --framework XLA --target {target} {arguments}"
        " --output {{output}}"
    ),
    Compiler.NEURON_CC: (
        "neuron-cc compile {{model}} --framework XLA {arguments} --output {{output}}"
    ),
}


def ladder(target: str, base: Given | None = None, *, sdk: str | None = None) -> list[Rung]:
    """All rungs of the compiler for ``target``, most accurate first.

    Args:
        target: The target.
        base: Options that hold on every rung: saturation, accumulation, rounding. Its
            options about casts are ignored.
        sdk: Release of the Neuron SDK.

    Raises:
        UsageError: If no compiler's ladder is known for the target.
    """
    if spelled(target) not in NEURON_TARGETS:
        raise UsageError(
            f"{target!r} has no ladder of compiler options",
            where="--target",
            fix=f"use one of {', '.join(NEURON_TARGETS)}; finecast emulate takes every target",
        )
    target, compiler = spelled(target), compiler_for(target)
    held = replace(
        base or Given(),
        auto_cast=None,
        auto_cast_type=None,
        fast_math=None,
        fp32_cast=None,
        target=None,
    )
    rungs: list[Rung] = []
    for name in LADDERS[compiler]:
        options = resolve(read(name.split()).over(held), sdk=sdk, target=target)
        # The rung's own options, then the flags that were asked for on all rungs.
        flags = (a for a in options.arguments if a.startswith(("--enable", "--disable")))
        words = (*name.split(), *flags)
        together = shlex.join(words)
        rungs.append(
            Rung(
                name=name,
                emulation=options.emulation,
                template=_COMMANDS[compiler].format(target=target, arguments=together),
                snippet=_SNIPPETS[compiler].format(
                    arguments=json.dumps(list(words)), flags=json.dumps(together)
                ),
            )
        )
    return rungs

"""What OpenVINO runs of a model: its kernels, their types, how two models differ in them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import openvino

from finecast.engines.base import Array, Feeds, KernelFormats
from finecast.engines.openvino import config

_FIXED: Final = "Const"
_REORDER: Final = "Reorder"
# Kinds that move no data: a reshaped tensor stays where it is.
_NOTHING: Final = frozenset({"Input", "Output", "Reshape"})
_CASTS: Final = frozenset({"Convert", _REORDER})
_FLOATS: Final = frozenset({"f32", "f16", "bf16"})
_LOW: Final = "bf16"
_ONE_THREAD: Final = {"INFERENCE_NUM_THREADS": 1, "ENABLE_CPU_PINNING": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A model that is ready to run, under one of OpenVINO's precision hints."""

    model: openvino.CompiledModel
    run: Callable[[Feeds], list[Array]]

    @classmethod
    def of(cls, path: Path, hint: str) -> Compiled:
        """Compile it for one call at a time, on one thread."""
        core = openvino.Core()
        settings = config(core, "CPU", hint) | _ONE_THREAD
        compiled = core.compile_model(str(path), "CPU", settings)
        request = compiled.create_infer_request()
        names = {name for port in compiled.inputs for name in port.names}

        def run(feeds: Feeds) -> list[Array]:
            given = {name: array for name, array in feeds.items() if name in names}
            return [*request.infer(given).values()]

        return cls(model=compiled, run=run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """How many kernels run in a call.

    Attributes:
        casts: How many only change a float type, as casts of the model or as reorders.
        kinds: How many there are of each kind, without reorders that change no float type.
    """

    casts: int
    kinds: Mapping[str, int]


def kernels_of(compiled: openvino.CompiledModel) -> Kernels:
    """The kernels of the runtime graph, without those that run once, when it is loaded."""
    fixed, types = set[str](), dict[str, str]()
    kinds: dict[str, int] = {}
    casts = 0
    for op in compiled.get_runtime_model().get_ordered_ops():
        info, name = op.get_rt_info(), op.get_friendly_name()
        kind = _text(info, "layerType")
        types[name] = _text(info, "outputPrecisions").partition(",")[0]
        sources = [v.get_node().get_friendly_name() for v in op.input_values()]
        if kind == _FIXED or (sources and fixed.issuperset(sources)):
            fixed.add(name)
            continue
        if kind in _NOTHING:
            continue
        cast = kind in _CASTS and _FLOATS.issuperset({types[sources[0]], types[name]})
        cast = cast and types[sources[0]] != types[name]
        casts += cast
        if cast or kind != _REORDER:
            kinds[kind] = kinds.get(kind, 0) + 1
    return Kernels(casts=casts, kinds=kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowOnly:
    """Ops that one model computes low and the other does not, by name.

    Attributes:
        computed: The other computes them in fp32.
        given: Both compute them low, and the other gives the unrounded result.
    """

    computed: tuple[str, ...]
    given: tuple[str, ...]


def low_only(
    ours: Iterable[KernelFormats], theirs: Iterable[KernelFormats], names: Collection[str]
) -> LowOnly:
    """The ops of ``names`` that only ``ours`` has low; ops must have a kernel in both."""
    mine, other = _by_op(ours), _by_op(theirs)
    both = [name for name in names if name in mine and name in other]
    low = [name for name in both if mine[name].computed == _LOW]
    return LowOnly(
        computed=tuple(n for n in low if other[n].computed != _LOW),
        given=tuple(
            n
            for n in low
            if other[n].computed == _LOW != other[n].stored and mine[n].stored == _LOW
        ),
    )


def _by_op(kernels: Iterable[KernelFormats]) -> dict[str, KernelFormats]:
    return {name: kernel for kernel in kernels for name in kernel.ops}


def _text(info: Any, key: str) -> str:
    return str(info[key].astype(str)) if key in info else ""

"""Which kernels an engine has, if it can say."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Final, Protocol, runtime_checkable

from finecast.devices.targets import Target
from finecast.engines.base import Engine
from finecast.engines.emulator import EmulatorEngine
from finecast.engines.ports import ONNX_NAMES
from finecast.graph import PHI, Node
from finecast.numbers.formats import Format
from finecast.ops import lookup

_CPU: Final = "CPUExecutionProvider"
# ONNX Runtime's CPU provider runs an fp16 op that it has no kernel for in fp32, between casts
# of its own; of bf16 it knows only conversions.
_EMULATED: Final = frozenset({(_CPU, Format.FP16)})


@runtime_checkable
class ListingEngine(Protocol):
    """An engine that can list its kernels."""

    def has_kernel(self, native: str, fmt: Format) -> bool:
        """Whether an op, by its native name, has a kernel in a format."""
        ...


def kernel_query(engine: Engine) -> Callable[[Node, Format], bool | None]:
    """A function that says if ``engine`` has a kernel for a node in a format; None: unknown.

    An emulated device has kernels in the formats of the part of it that runs the op. Of
    formats for operands alone it has only those that it does not run in a wider one, because
    the others gain nothing (``int8_weights`` gains by reading less); tf32 it has only for
    products.
    """
    if isinstance(engine, EmulatorEngine):
        device = engine.emulation.target
        return lambda node, fmt: _on_device(device, node.native, fmt)
    known = _known(engine)
    return lambda node, fmt: False if fmt is Format.TF32 else known(node, fmt)


def _on_device(device: Target, native: str, fmt: Format) -> bool | None:
    info = lookup(native)
    real = device.engine_for(info.kind).computes_in(fmt)
    if fmt is Format.TF32:
        return info.matmul_engine and real is fmt
    if real is None:
        return False
    gains = not fmt.encodes_values or fmt.encodes_results
    return None if gains or real.bits <= fmt.bits else False


def _known(engine: Engine) -> Callable[[Node, Format], bool | None]:
    if isinstance(engine, ListingEngine):  # a phi runs nothing and needs no kernel
        return lambda node, fmt: node.op == PHI or engine.has_kernel(node.native, fmt)
    if engine.name != "onnxruntime":
        return lambda _node, _fmt: None
    provider = f"{engine.device}ExecutionProvider"
    return lambda node, fmt: _onnxruntime(provider, node, fmt)


def _onnxruntime(provider: str, node: Node, fmt: Format) -> bool | None:
    kernels = _onnxruntime_kernels()
    domain, _, op = node.native.rpartition("::")
    key = (provider, "" if domain == "onnx" else domain, op)
    if key not in kernels or (provider, fmt) in _EMULATED or fmt.has_scales:
        return None  # ops on codes become kernels by fusion, which only a run tells
    return f"tensor({ONNX_NAMES.get(fmt.label)})" in kernels[key]


@lru_cache(maxsize=1)
def _onnxruntime_kernels() -> dict[tuple[str, str, str], frozenset[str]]:
    """Tensor types of all kernels by provider, domain and op; empty if there is no list."""
    state = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    listing = getattr(state, "get_all_opkernel_def", None)
    found: dict[tuple[str, str, str], set[str]] = {}
    for kernel in listing() if listing is not None else ():
        types = {t for allowed in kernel.type_constraints.values() for t in allowed}
        domain = "" if kernel.domain == "ai.onnx" else kernel.domain
        found.setdefault((kernel.provider, domain, kernel.op_name), set()).update(types)
    return {key: frozenset(types) for key, types in found.items()}

"""fp16's overflows repaired: nets like T5 and Gemma, before and after, in all libraries.

"Before" casts all ops that may be fp16, as a user does by hand; "after" has values scaled by
powers of two. ONNX Runtime and OpenVINO compute fp16 in fp32 on CPUs without it, and then
nothing overflows: so each model is also run by arithmetic that rounds every value that is
stored. Figures are relative errors of the logits; 1 is that of zeros, which norms give where
their squares are Inf.

    python -m benchmarks.bench_repair
    .venv-zoo/bin/python -m benchmarks.bench_repair    # and those of transformers
    .venv-tf/bin/python -m benchmarks.bench_repair     # Keras models
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino
from numpy.typing import NDArray

from benchmarks.common import report
from finecast import api
from finecast.devices.emulation import explicit_casts
from finecast.engines import get_engine
from finecast.engines.base import Feeds, Session
from finecast.engines.emulator import EmulatorEngine
from finecast.graph import Graph
from finecast.native.model import ReadOptions
from finecast.native.opening import opened
from finecast.native.source import NativeSource, Source
from finecast.numbers.formats import Format
from finecast.ops.flops import flops
from finecast.planning.plan import Plan
from finecast.rules.policy import Policy
from finecast.tuning.result import Result

if TYPE_CHECKING:
    from tests.overflowing_nets import OverflowingNet

POLICY = "all:fp16"
DEVICE = "sm70"
BAR = 0.9
# A relative error that rounding to fp16, with an epsilon of .001, explains in such nets.
ERROR = 0.01
PRODUCTS = frozenset({"matmul", "linear", "gemm", "addmm", "einsum", "attention"})


def main() -> None:
    """Measure every net that can be made here."""
    if find_spec("torch") is None:
        measure_keras()
        return
    for name, net in nets().items():
        with tempfile.TemporaryDirectory() as folder:
            measure(name, net, Path(folder))
        measure_module(f"{name} in PyTorch", net)


def nets() -> Mapping[str, OverflowingNet]:
    """The nets of the tests, and those of transformers where it is installed."""
    from tests.overflowing_nets import NETS

    if find_spec("transformers") is None:
        return NETS
    from zoo import overflowing

    return {**NETS, **overflowing.NETS}


def measure(name: str, net: OverflowingNet, folder: Path) -> None:
    """A net as ONNX and as OpenVINO's IR, in the engines and on an emulated device."""
    path, data = net.export(folder / "net.onnx"), net.data()
    low, plain = folder / "low.onnx", folder / "plain.onnx"
    before, after = _both(name, path, data, (plain, low))
    ran = get_engine("onnxruntime")
    exact = _run(ran.load(path), data)
    device = EmulatorEngine(emulation=explicit_casts(DEVICE))
    for what, engine in (("ONNX Runtime", ran), (f"emulated {DEVICE}", device)):
        got = (partial(_run, engine.load(one), data) for one in (plain, low))
        _show(f"{name}: {what}", exact, *got)
    got = (partial(_run, _rounded(path, one), data) for one in (before, after))
    _show(f"{name}: ONNX, every value rounded", exact, *got)
    ir, low, plain = (folder / f"{n}.xml" for n in ("net", "low", "plain"))
    openvino.save_model(openvino.convert_model(path), ir, compress_to_fp16=False)
    before, after = _both(f"{name} in OpenVINO", ir, data, (plain, low))
    got = (partial(_run, get_engine("openvino").load(one), data) for one in (plain, low))
    _show(f"{name}: OpenVINO", exact, *got)
    got = (partial(_run, _rounded(ir, one), data) for one in (before, after))
    _show(f"{name}: OpenVINO's IR, every value rounded", exact, *got)


def measure_module(name: str, net: OverflowingNet) -> None:
    """A net as a PyTorch module, in PyTorch's own fp16 kernels and on an emulated device."""
    import torch

    model, example = net.module(), net.example()
    source = _opened(model, ReadOptions(example_inputs=example))
    data = dict(zip(source.input_shapes, net.data().values(), strict=True))
    done = [
        api.convert(model, policy=policy, data=data, example_inputs=example, verify=False)
        for policy in (_UNSCALED, Policy(POLICY))
    ]
    plain = api.convert(model, policy=POLICY, example_inputs=example, verify=False)
    _report_share(name, source, data, *map(_plan_of, done))

    def run(module: Any) -> NDArray[np.float64]:
        with torch.no_grad():
            found: NDArray[np.float64] = module(*example).double().numpy()
        return found

    exact, device = run(model), explicit_casts(DEVICE)
    _show(f"{name}: eager", exact, *(partial(run, one.model) for one in (plain, done[1])))
    program = source.program(device)
    sessions = (program.plan_session(_plan_of(one), device) for one in (plain, done[1]))
    got = (partial(_run, session, data) for session in sessions)
    _show(f"{name}: emulated {DEVICE}", exact, *got)


def measure_keras() -> None:
    """Keras models, in TensorFlow."""
    from plugins.tensorflow.tests.overflowing_keras import MODELS, data, keras

    for name, make in MODELS.items():
        keras.utils.set_random_seed(0)
        model, feeds = make(), data()
        done = [
            api.convert(model, policy=policy, data=feeds, verify=False)
            for policy in (_UNSCALED, Policy(POLICY))
        ]
        plain = api.convert(model, policy=POLICY, verify=False)
        source = _opened(model, ReadOptions())
        _report_share(f"{name} in Keras", source, feeds, *map(_plan_of, done))

        def run(made: Any, ids: Any = feeds["ids"]) -> NDArray[np.float64]:
            return np.asarray(made(ids), np.float64)

        got = (partial(run, one.model) for one in (plain, done[1]))
        _show(f"{name} in Keras: TensorFlow", run(model), *got)


_UNSCALED = Policy(POLICY, adjust="none")


def _both(name: str, path: Path, data: Feeds, out: tuple[Path, Path]) -> tuple[Plan, Plan]:
    """The plans before and after, whose models are written to ``out``."""
    plain, low = out
    kept = api.convert(path, policy=_UNSCALED, data=data, verify=False)
    before = api.convert(path, plain, policy=POLICY, verify=False)
    after = api.convert(path, low, policy=POLICY, data=data, verify=False)
    source = _opened(path, ReadOptions())
    _report_share(name, source, data, _plan_of(kept), _plan_of(after))
    return _plan_of(before), _plan_of(after)


def _plan_of(done: Result) -> Plan:
    assert done.plan is not None
    return done.plan


def _opened(model: Any, how: ReadOptions) -> Source:
    found = opened(model, how)
    assert isinstance(found, NativeSource)
    return found


def _rounded(path: Path, plan: Plan) -> Session:
    return _opened(path, ReadOptions()).rounded_session(plan)


def _run(session: Session, data: Feeds) -> NDArray[np.float64]:
    return next(iter(session.run(data).values())).astype(np.float64)


def _report_share(name: str, source: Source, data: Feeds, kept: Plan, after: Plan) -> None:
    """Print the share of operations in fp16, without and with scaling."""
    prepared = source.prepare(Policy(POLICY))
    graph: Graph = prepared.graph
    shapes = {v.id: v.fixed_shape for v in graph.values if v.fixed_shape is not None}
    known = prepared.static_shapes({n: np.shape(a) for n, a in data.items()})
    shapes |= {i: known[n] for n, i in prepared.observable().items() if n in known}
    nodes = {n.name: n for n in graph.nodes}
    values = [graph.read(nodes[a.node], a.port) for a in after.adjustments if not a.attribute]
    report(
        "repair",
        f"{name}: operations of products in fp16",
        round(100 * share(graph, shapes, after), 1),
        "%",
        bar=100 * BAR,
        at_least=True,
        unscaled=round(100 * share(graph, shapes, kept), 1),
        operands=len(after.adjustments),
        inserted=sum(v is not None and v.constant is None for v in values),
    )


def share(graph: Graph, shapes: Mapping[int, tuple[int, ...]], plan: Plan) -> float:
    """The share of the operations of matrix products that are in fp16."""
    counts = {n.name: flops(graph, n, shapes) or 0 for n in graph.nodes if n.op in PRODUCTS}
    low = sum(c for n, c in counts.items() if plan.formats[n] is Format.FP16)
    return low / sum(counts.values())


def _show(
    what: str,
    exact: NDArray[np.float64],
    before: Callable[[], NDArray[np.float64]],
    after: Callable[[], NDArray[np.float64]],
) -> None:
    """Print the relative error after the repair, beside that before."""

    def error(got: NDArray[np.float64]) -> float:
        off = float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
        return off if np.isfinite(got).all() else np.inf

    found = float(f"{error(after()):.3g}")
    report("repair", what, found, "", bar=ERROR, before=f"{error(before()):.3g}")


if __name__ == "__main__":
    main()

"""fp16's overflows repaired: nets like T5 and Gemma, before and after, in three ways to run.

"Before" casts all ops that may be fp16, as a user does by hand; "after" has values scaled by
powers of two. ONNX Runtime and OpenVINO compute fp16 in fp32 on CPUs without it, and then
nothing overflows: so each model is also run by arithmetic that rounds every value that is
stored. Figures are relative errors of the logits; 1 is that of zeros, which norms give where
their squares are Inf.

    python -m benchmarks.bench_repair
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import openvino

from benchmarks.common import report
from finecast import api
from finecast.devices.emulation import explicit_casts
from finecast.engines import get_engine
from finecast.engines.base import Feeds, Session
from finecast.engines.emulator import EmulatorEngine
from finecast.frontends import onnx as onnx_frontend
from finecast.graph import Graph
from finecast.native.model import ReadOptions
from finecast.native.opening import opened
from finecast.native.source import NativeSource
from finecast.numbers.formats import Format
from finecast.ops.flops import flops
from finecast.planning.plan import Plan
from finecast.rules.policy import Policy
from tests.overflowing_nets import NETS, OverflowingNet

POLICY = "all:fp16"
DEVICE = "sm70"
BAR = 0.9
# A relative error that rounding to fp16, with an epsilon of .001, explains in such nets.
ERROR = 0.01


def main() -> None:
    """Measure every net."""
    for name, net in NETS.items():
        with tempfile.TemporaryDirectory() as folder:
            measure(name, net, Path(folder))


def measure(name: str, net: OverflowingNet, folder: Path) -> None:
    """Print the share of operations in fp16, then a line for each way to run."""
    path, low = net.export(folder / "net.onnx"), folder / "low.onnx"
    data = net.data()
    kept = _plan(path, None, Policy(POLICY, adjust="none"), data)
    after = _plan(path, low, Policy(POLICY), data)
    graph = onnx_frontend.prepare(onnx_frontend.load(path), Policy(POLICY)).graph
    nodes = {n.name: n for n in graph.nodes}
    operands = [graph.read(nodes[a.node], a.port) for a in after.adjustments]
    report(
        "repair",
        f"{name}: operations of products in fp16",
        round(100 * share(graph, after), 1),
        "%",
        bar=100 * BAR,
        at_least=True,
        unscaled=round(100 * share(graph, kept), 1),
        operands=len(operands),
        inserted=sum(v is not None and v.constant is None for v in operands),
    )
    plain = folder / "plain.onnx"
    before = _plan(path, plain, Policy(POLICY), None)
    exact = get_engine("onnxruntime").load(path)
    device = EmulatorEngine(emulation=explicit_casts(DEVICE))
    ran = get_engine("onnxruntime")
    _show(f"{name}: ONNX Runtime", exact, data, ran.load(plain), ran.load(low))
    sessions = (_rounded(path, one) for one in (before, after))
    _show(f"{name}: ONNX, every value rounded", exact, data, *sessions)
    _show(f"{name}: emulated {DEVICE}", exact, data, device.load(plain), device.load(low))
    ir, low_ir, plain_ir = (folder / f"{n}.xml" for n in ("net", "low", "plain"))
    openvino.save_model(openvino.convert_model(path), ir, compress_to_fp16=False)
    before, after = (
        _plan(ir, out, Policy(POLICY), given)
        for out, given in ((plain_ir, None), (low_ir, data))
    )
    ran = get_engine("openvino")
    _show(f"{name}: OpenVINO", exact, data, ran.load(plain_ir), ran.load(low_ir))
    sessions = (_rounded(ir, one) for one in (before, after))
    _show(f"{name}: OpenVINO's IR, every value rounded", exact, data, *sessions)


def _plan(path: Path, out: Path | None, policy: Policy, data: Feeds | None) -> Plan:
    plan = api.convert(path, out, policy=policy, data=data, verify=False).plan
    assert plan is not None
    return plan


def _rounded(path: Path, plan: Plan) -> Session:
    model = opened(path, ReadOptions())
    assert isinstance(model, NativeSource)
    return model.rounded_session(plan)


def share(graph: Graph, plan: Plan) -> float:
    """The share of the operations of matrix products that are in fp16."""
    shapes = {v.id: v.fixed_shape for v in graph.values if v.fixed_shape is not None}
    counts = {n.name: flops(graph, n, shapes) or 0 for n in graph.nodes if n.op == "matmul"}
    low = sum(c for n, c in counts.items() if plan.formats[n] is Format.FP16)
    return low / sum(counts.values())


def _show(what: str, exact: Session, data: Feeds, before: Session, after: Session) -> None:
    wanted = next(iter(exact.run(data).values())).astype(np.float64)

    def error(session: Session) -> float:
        got = next(iter(session.run(data).values())).astype(np.float64)
        off = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
        return off if np.isfinite(got).all() else np.inf

    found = error(after)
    report("repair", what, float(f"{found:.3g}"), "", bar=ERROR, before=f"{error(before):.3g}")


if __name__ == "__main__":
    main()

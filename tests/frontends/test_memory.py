"""Large constants stay on disk: converting holds a few of them at a time, never all."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

STATUS = Path("/proc/self/status")
WIDTH, WEIGHTS = 1024, 48
WEIGHTS_MB = 4e-6 * WEIGHTS * WIDTH**2
# Quantizing a matrix takes a dozen arrays of its size; all of them in codes are a quarter, and
# in fp32 all, of ``WEIGHTS_MB``.
MOST_MB = WEIGHTS_MB / 5


@pytest.mark.skipif(not STATUS.exists(), reason="anonymous memory is told by Linux")
def test_weights_are_quantized_as_they_are_written(tmp_path: Path) -> None:
    write(tmp_path)
    command = [sys.executable, "-m", __name__, str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    grown: dict[str, float] = json.loads(done.stdout)
    assert grown.keys() == {"openvino", "onnxruntime", "probes"}
    assert max(grown.values()) < MOST_MB, grown


def write(folder: Path) -> None:
    """Write a chain of products with external data."""
    piece = np.random.default_rng(0).standard_normal((WIDTH, WIDTH), np.float32)
    weights: list[onnx.TensorProto] = []
    with (folder / "model.data").open("wb") as data:
        for n in range(WEIGHTS):
            tensor = TensorProto(name=f"w{n}", data_type=TensorProto.FLOAT, dims=piece.shape)
            tensor.data_location = TensorProto.EXTERNAL
            place = {"location": "model.data", "offset": data.tell(), "length": piece.nbytes}
            for key, value in place.items():
                tensor.external_data.add(key=key, value=str(value))
            data.write(np.roll(piece, n).data)
            weights.append(tensor)
    nodes = [
        helper.make_node("MatMul", [f"x{n}", f"w{n}"], [f"x{n + 1}"], name=f"product{n}")
        for n in range(WEIGHTS)
    ]
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", WIDTH])
        for name in ("x0", f"x{WEIGHTS}")
    ]
    graph = helper.make_graph(nodes, "chain", ports[:1], ports[1:], weights)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def anonymous_mb() -> float:
    """The memory of this process that no file stands for."""
    lines = STATUS.read_text(encoding="ascii").splitlines()
    return next(1e-3 * int(one.split()[1]) for one in lines if one.startswith("RssAnon"))


def growth_mb(work: Callable[[], object]) -> float:
    """How much anonymous memory grows while ``work`` runs.

    It is looked at every few milliseconds: what is held is seen.
    """
    before, seen, over = anonymous_mb(), [0.0], threading.Event()

    def watch() -> None:
        while not over.is_set():
            seen.append(anonymous_mb())
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        over.set()
        watcher.join()
    return max(seen) - before


def main(folder: Path) -> None:
    """Print the growth of each way to make a model of the one in ``folder``."""
    from finecast.frontends import onnx as frontend
    from finecast.frontends.native_model import with_switches
    from finecast.numbers.formats import Format
    from finecast.planning.planner import Planner
    from finecast.planning.points import Switch
    from finecast.rules import Context, permit
    from finecast.rules.policy import Policy

    def made(fmt: Format, engine: str) -> None:
        policy = Policy.parse(f"all:{fmt.label}")
        file = frontend.load(folder / "model.onnx")
        prepared = frontend.prepare(file, policy)
        around = frozenset({fmt})
        context = Context(graph=prepared.graph, policy=policy, casts_around=around)
        planner = Planner(
            graph=prepared.graph,
            policy=policy,
            permissions=permit(context),
            opset=prepared.minimal_opset,
            engine=engine,
        )
        plan = planner.lowest()
        assert plan.counts == {fmt.label: WEIGHTS}
        if engine:
            low = frontend.apply(file, plan, prepared).model
        else:
            ids = {node.name: node.id for node in prepared.graph.nodes}
            encodings = {ids[n]: e.constants[1] for n, e in plan.encodings.items()}
            switches = [Switch(ports={(i, 1): e}, outputs={}) for i, e in encodings.items()]
            low = with_switches(prepared.roundable(), switches)
        frontend.save(low, folder / f"{engine or 'probes'}.onnx")

    made(Format.INT4_WEIGHTS, "openvino")  # what is imported and kept is no growth
    ways = {
        "openvino": (Format.INT4_WEIGHTS, "openvino"),
        "onnxruntime": (Format.INT8_DYNAMIC, "onnxruntime"),
        "probes": (Format.INT8_WEIGHTS, ""),
    }
    grown: dict[str, float] = {}
    for name, (fmt, engine) in ways.items():
        (folder / f"{engine or 'probes'}.onnx").unlink(missing_ok=True)
        (folder / f"{engine or 'probes'}.onnx.data").unlink(missing_ok=True)
        grown[name] = round(growth_mb(lambda f=fmt, e=engine: made(f, e)), 1)
    sys.stdout.write(json.dumps(grown))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

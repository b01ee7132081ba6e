"""Emulated bf16 against real bf16 kernels: OpenVINO and PyTorch on this CPU.

    python scripts/fidelity.py MODELS_FOLDER [--limit 512]

MODELS_FOLDER holds ``cases.py`` with the models and data. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import openvino as ov

from finecast.devices.emulation import Emulation, Setting
from finecast.devices.targets import load_target
from finecast.engines.emulator import EmulatorEngine, prepare, setting_of
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import Prepared
from finecast.native.planning import make_planner
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounding
from finecast.ops.patterns import affine_kernels, merged
from finecast.rules.policy import Policy, Scope

Feeds = Mapping[str, np.ndarray]
Run = Callable[[Feeds], np.ndarray]


def relative(got: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> float:
    """||got - exact|| / ||exact|| over all samples."""
    a = np.concatenate([x.ravel() for x in got]).astype(np.float64)
    b = np.concatenate([x.ravel() for x in exact]).astype(np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def openvino_run(model: Any, hint: str) -> tuple[Run, Any]:
    """A function that runs ``model`` with this precision hint, and the compiled model."""
    compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": hint})
    request = compiled.create_infer_request()
    return (lambda feeds: np.array(request.infer(dict(feeds))[0])), compiled


def kernels_of(compiled: Any, prepared: Prepared) -> list[frozenset[int]]:
    """The nodes that each of OpenVINO's kernels runs, for kernels that run several."""
    ids = {n.name: n.id for n in prepared.graph.nodes}
    found: list[frozenset[int]] = []
    for op in compiled.get_runtime_model().get_ordered_ops():
        names = op.get_rt_info()["originalLayersNames"].astype(str).split(",")
        inside = frozenset(ids[n] for n in names if n in ids)
        if len(inside) > 1:
            found.append(inside)
    return merged(found + affine_kernels(prepared.graph))


def low_kernels(compiled: Any, prepared: Prepared) -> tuple[frozenset[int], frozenset[int]]:
    """Nodes in kernels that compute in bf16, and nodes in kernels that also store bf16."""
    ids = {n.name: n.id for n in prepared.graph.nodes}
    low: set[int] = set()
    stored: set[int] = set()
    for op in compiled.get_runtime_model().get_ordered_ops():
        info = op.get_rt_info()
        inside = {
            ids[n] for n in info["originalLayersNames"].astype(str).split(",") if n in ids
        }
        if info["runtimePrecision"].astype(str) == "bf16":
            low |= inside
            if info["outputPrecisions"].astype(str).startswith("bf16"):
                stored |= inside
    return frozenset(low), frozenset(stored)


def explicit(path: str) -> bytes:
    """The all-bf16 model with explicit casts that finecast writes."""
    file = frontend.load(Path(path))
    policy = Policy(scope=Scope.ALL, formats=(Format.BF16,))
    engine = EmulatorEngine(emulation=Emulation(target=load_target("amx")))
    planner = make_planner(frontend.prepare(file, policy), policy, engine)
    return frontend.to_bytes(frontend.apply(file, planner.lowest()).model)


def emulate(path: str, compiled: Any, *, whole: bool) -> Run:
    """The emulator with OpenVINO's kernels.

    With ``whole`` all ops are cast, else those that OpenVINO runs in bf16.
    """
    emulation = Emulation(
        target=load_target("amx"),
        scope=Scope.ALL,
        rounds_normalized=whole,
        standalone=Rounding.UP_FROM_ODD if whole else None,
    )
    prepared = prepare(frontend.load(Path(path)), emulation)
    setting = setting_of(prepared.graph, emulation)
    if not whole:
        low, stored = low_kernels(compiled, prepared)
        setting = Setting(reads=low, parameters=low, writes=stored)
    session = EmulatorEngine(emulation=emulation).session(
        prepared, kernels=kernels_of(compiled, prepared), fixed=setting
    )
    return lambda feeds: next(iter(session.run(feeds).values()))


def emulate_eager(path: str, *, disturbed: bool = False) -> Run:
    """The emulator with every op a kernel of its own, as eager PyTorch runs them.

    Args:
        path: The model.
        disturbed: Shift every weight by about one unit in the last place of fp32. The change
            of the outputs is a lower bound: an emulator that sums in another order than the
            device cannot come closer to it.
    """
    emulation = Emulation(target=load_target("amx"), scope=Scope.ALL)
    file = frontend.load(Path(path))
    if disturbed:
        disturb(file.model)
    prepared = prepare(file, emulation)
    setting = setting_of(prepared.graph, emulation)
    session = EmulatorEngine(emulation=emulation).session(prepared, kernels=[], fixed=setting)
    return lambda feeds: np.asarray(next(iter(session.run(feeds).values())), np.float32)


def disturb(model: ir.Model) -> None:
    """Multiply every fp32 weight by 1 + e, e uniform within 2^-23 either way."""
    rng = np.random.default_rng(7)
    for value in model.graph.initializers.values():
        if value.const_value is None or value.const_value.dtype != ir.DataType.FLOAT:
            continue
        exact = value.const_value.numpy()
        noise = rng.uniform(-(2.0**-23), 2.0**-23, exact.shape)
        value.const_value = ir.tensor((exact * (1 + noise)).astype(np.float32))


def by_random_probes(outputs: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> np.ndarray:
    """Decisions of 256 random linear probes, each with its threshold at the fp32 median.

    A single probe's decisions differ in a few samples only, by chance; many probes tell
    engines apart.
    """
    low, high = np.concatenate(outputs), np.concatenate(exact)
    probes = np.random.default_rng(11).standard_normal((high.shape[1], 256))
    return low @ probes > np.median(high @ probes, axis=0)


def measure(
    path: str, feeds: Sequence[Feeds], decide: Callable[[np.ndarray], np.ndarray]
) -> dict[str, Any]:
    """Errors against fp32, and how often decisions agree."""
    exact_run, _ = openvino_run(path, "f32")
    exact = [exact_run(f) for f in feeds]
    outputs: dict[str, list[np.ndarray]] = {}
    hinted, compiled = openvino_run(path, "bf16")
    outputs["openvino bf16 hint"] = [hinted(f) for f in feeds]
    run = emulate(path, compiled, whole=False)
    outputs["emulated bf16 hint"] = [run(f) for f in feeds]
    with tempfile.TemporaryDirectory() as folder:
        low = Path(folder) / "low.onnx"
        low.write_bytes(explicit(path))
        stated, compiled = openvino_run(str(low), "f32")
        outputs["openvino all bf16"] = [stated(f) for f in feeds]
    run = emulate(path, compiled, whole=True)
    outputs["emulated all bf16"] = [run(f) for f in feeds]
    try:
        import torch
        from onnx_in_torch import TorchModel

        model = TorchModel(path, torch.bfloat16)
        outputs["pytorch all bf16"] = [model.run(f)[0] for f in feeds]
        run = emulate_eager(path)
        outputs["emulated eager bf16"] = [run(f) for f in feeds]
        run = emulate_eager(path, disturbed=True)
        outputs["emulated eager bf16, disturbed"] = [run(f) for f in feeds]
    except ImportError:
        pass
    decisions = {n: np.concatenate([decide(o) for o in out]) for n, out in outputs.items()}
    decisions["fp32"] = np.concatenate([decide(o) for o in exact])
    pairs = {
        f"{a} / {b}": float(np.mean(decisions[a] == decisions[b]))
        for i, a in enumerate(decisions)
        for b in list(decisions)[i + 1 :]
    }
    probed = {n: by_random_probes(out, exact) for n, out in outputs.items()}
    compared = (
        ("emulated bf16 hint", "openvino bf16 hint"),
        ("emulated all bf16", "openvino all bf16"),
        ("emulated eager bf16", "pytorch all bf16"),
        ("pytorch all bf16", "openvino all bf16"),
        ("emulated eager bf16", "emulated eager bf16, disturbed"),
    )
    return {
        "samples": len(decisions["fp32"]),
        "error": {n: relative(out, exact) for n, out in outputs.items()},
        "distance": {
            f"{a} / {b}": relative(outputs[a], outputs[b]) for a, b in compared if a in outputs
        },
        "differing decisions of random probes": {
            f"{a} / {b}": float(np.mean(probed[a] != probed[b]))
            for a, b in compared
            if a in outputs
        },
        "agreement": pairs,
    }


def main() -> None:
    """Measure both models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path)
    parser.add_argument("--limit", type=int, default=512)
    options = parser.parse_args()
    sys.path[:0] = [str(options.models), str(Path(__file__).parent)]
    cases = importlib.import_module("cases").CASES
    image, text = cases["cifar10_resnet20"], cases["sst2_minilm_l6"]
    seen: list[Feeds] = []

    def record(shape: tuple[int, ...]) -> Callable[[Feeds], list[np.ndarray]]:
        def run(feeds: Feeds) -> list[np.ndarray]:
            seen.append(feeds)
            rows = len(next(iter(feeds.values())))
            return [np.zeros((rows, *shape), np.float32)]

        return run

    report: dict[str, Any] = {}
    image.metric(record((10,)), limit=options.limit)
    report["resnet20"] = measure(image.model(), seen, lambda o: o.argmax(1))
    seen = []
    text.metric(record((384,)), limit=options.limit)
    data = np.load(Path(options.models) / text.dir / "data.npz")
    weight, bias = data["sst2_w"], data["sst2_b"]
    report["minilm"] = measure(text.model(), seen, lambda o: (o @ weight + bias > 0).ravel())
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

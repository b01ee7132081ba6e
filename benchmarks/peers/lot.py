"""Networks of the zoo that lots are drawn from, exported in its environment.

    PYTHON -m benchmarks.peers.lot NAME FOLDER

Writes ``model.onnx`` and ``inputs.npz``. A call has eight samples where the export leaves the
batch open. The mean of the first output over the data is subtracted from it, as in ``zoo.py``.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import helper, numpy_helper

from benchmarks.peers.zoo import BATCH, CALLS
from zoo.libraries import prepare
from zoo.network import Inputs, Network
from zoo.networks import NETWORKS

PREFIX: Final = "zoo_"


def by_lot(count: int, seed: int) -> list[str]:
    """So many networks, by lot; all of them, where there are no more."""
    names = random.Random(seed).sample(sorted(NETWORKS), min(count, len(NETWORKS)))
    return [PREFIX + name for name in names]


def inputs(network: Network) -> Inputs:
    """One call: several draws of the network's inputs, where its batch is open."""
    own = network.inputs()
    if any(network.dynamic.get(name, {}).get(0) != "batch" for name in own):
        return own
    draws = [own]
    while sum(len(next(iter(draw.values()))) for draw in draws) < BATCH:
        draws.append(network.inputs())
    return {name: torch.cat([draw[name] for draw in draws])[:BATCH] for name in own}


def centre(path: Path, calls: list[dict[str, Any]]) -> None:
    """Subtract the mean over all axes but the last from the first output."""
    session = onnxruntime.InferenceSession(path)
    total, count = np.zeros(1), 0
    for call in calls[:32]:
        output = np.asarray(session.run(None, call)[0], np.float64)
        rows = output.reshape(-1, output.shape[-1])
        total, count = total + rows.sum(axis=0), count + len(rows)
    model = onnx.load(path)
    graph = model.graph
    output = graph.output[0]
    for node in graph.node:
        node.output[:] = ["_centred" if o == output.name else o for o in node.output]
        node.input[:] = ["_centred" if i == output.name else i for i in node.input]
    mean = (total / count).astype(np.float32)
    graph.initializer.append(numpy_helper.from_array(mean, "_mean"))
    graph.node.append(helper.make_node("Sub", ["_centred", "_mean"], [output.name]))
    onnx.save(model, path)


def main() -> None:
    """Build, export and centre one network."""
    from zoo.onnx_files import write

    prepare()
    network, folder = NETWORKS[sys.argv[1].removeprefix(PREFIX)], Path(sys.argv[2])
    net, example = network.make()
    path = folder / "model.onnx"
    job: Any = SimpleNamespace(network=network, net=net, inputs=example)
    try:
        write(job, path, "legacy")
    except torch.onnx.errors.OnnxExporterError:
        write(job, path, "dynamo")
    calls = [
        {name: array.numpy() for name, array in inputs(network).items()} for _ in range(CALLS)
    ]
    known = {one.name for one in onnxruntime.InferenceSession(path).get_inputs()}
    calls = [{name: a for name, a in call.items() if name in known} for call in calls]
    centre(path, calls)
    stacked = {name: np.stack([call[name] for call in calls]) for name in calls[0]}
    np.savez(folder / "inputs.npz", **stacked)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()

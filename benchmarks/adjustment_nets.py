"""The zoo's networks that ``bench_adjustments`` tunes, exported in the zoo's environment.

    PYTHON -m benchmarks.adjustment_nets NAME FOLDER

Writes ``model.onnx`` and ``inputs.npz``, whose arrays have the calls along their first axis.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import numpy as np

_CALLS: Final = 24


def main() -> None:
    """Build and export one, with calls that are drawn anew."""
    from zoo import libraries, onnx_files
    from zoo.job import Job
    from zoo.networks import NETWORKS

    name, folder = sys.argv[1], Path(sys.argv[2])
    libraries.prepare()
    network = NETWORKS[name]
    net, inputs = network.make()
    onnx_files.write(
        Job(network=network, net=net, inputs=inputs, folder=folder),
        folder / "model.onnx",
        "torchscript",
    )
    calls = [network.inputs() for _ in range(_CALLS)]
    arrays = {port: np.stack([call[port].numpy() for call in calls]) for port in inputs}
    np.savez(folder / "inputs.npz", **arrays)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()

"""Olive's automatic optimisation of an ONNX model in 8 bits for a CPU, without a network.

Its data sets come from a hub, so that it quantizes without data here.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from olive.cli.launcher import main as olive  # pyright: ignore

from benchmarks.peers.drivers import Job, main


def produce(job: Job) -> Path:
    """Optimise, and write what Olive chose as one file."""
    folder = job.output.with_suffix(".olive")
    asked = {
        "model_name_or_path": job.task.model,
        "output_path": folder,
        "precision": "int8",
        "device": "cpu",
        "provider": "CPUExecutionProvider",
    }
    options = (text for name, value in asked.items() for text in (f"--{name}", str(value)))
    olive(["auto-opt", *options, "--use_qdq_encoding", "--disable_telemetry"])
    found = sorted(folder.rglob("*.onnx"))
    if not found:
        raise FileNotFoundError("it wrote no model")
    output = job.output.with_suffix(".onnx")
    onnx.save(onnx.load(found[0]), output)
    return output


if __name__ == "__main__":
    main(produce)

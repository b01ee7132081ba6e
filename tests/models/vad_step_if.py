"""Silero VAD, one frame a call, with 12 nested If around its LSTM: fp32 against fp16.

    python -m tests.models.vad_step_if [--clips N]

Converts the model with ``all:fp16`` and prints its metric in ONNX Runtime before and after, on
all clips unless told otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx

from finecast import api
from finecast.engines import get_engine
from tests.models.shared import cases

NAME = "vad_silero_step_if"
METRIC = "frame_auc"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the conversion did with float ops in bodies, and the metric before and after."""

    clips: int | None
    frames: int
    body_ops: int
    body_ops_low: int
    body_types: tuple[str, ...]
    fp32: float
    fp16: float


def compare(folder: Path, clips: int | None) -> Found:
    """Convert the model into ``folder`` and take the metric of both on ``clips`` clips."""
    case = cases()[NAME]
    source, output = Path(case.model()), folder / "low.onnx"
    done = api.convert(source, output, "all:fp16", verify=False)
    formats = {d.node: d.format.label for d in done.plan.decisions}
    inside = [n for n in _in_bodies(onnx.load(output).graph) if n.name in formats]
    found = [_metric(path, clips) for path in (source, output)]
    return Found(
        clips=clips,
        frames=int(found[0]["n_frames"]),
        body_ops=len(inside),
        body_ops_low=sum(formats[n.name] == "fp16" for n in inside),
        body_types=tuple(sorted({n.op_type for n in inside})),
        fp32=found[0][METRIC],
        fp16=found[1][METRIC],
    )


def _in_bodies(graph: onnx.GraphProto, depth: int = 0) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        if depth:
            yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _in_bodies(attribute.g, depth + 1)


def _metric(path: Path, clips: int | None) -> dict[str, float]:
    session = get_engine("onnxruntime").load(path)
    case = cases()[NAME]
    found: dict[str, float] = case.metric(
        lambda feeds: list(session.run(feeds).values()), limit=clips
    )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clips", type=int, help="all unless given")
    with tempfile.TemporaryDirectory(prefix="finecast-") as name:
        result = compare(Path(name), parser.parse_args().clips)
    sys.stdout.write(json.dumps(asdict(result)) + "\n")

"""The stages in ONNX: exports, ``finecast convert`` from another folder, two engines."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
import openvino
import torch
from torch import nn

from finecast.cli import main
from finecast.measure.racing import Effort, Race
from finecast.numbers.formats import Format
from zoo.in_torch import Peer, autocast_peer
from zoo.job import Found, Job
from zoo.network import relative_error
from zoo.outcome import StageError, Status, during

Tensors = list[torch.Tensor]
_HINTS: Final = {"bf16": openvino.Type.bf16, "fp16": openvino.Type.f16}
_NO_KERNEL: Final = "NOT_IMPLEMENTED"


def export(job: Job, *, exporter: str) -> Found:
    """``torch.onnx.export`` by its defaults, the result in both engines in fp32."""
    folder = job.folder / exporter
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    with during(Status.EXPORT, f"torch.onnx.export ({exporter})"):
        write(job, path, exporter)
        onnx.checker.check_model(path, full_check=True)
    want = job.reference()
    figures: dict[str, float] = {}
    notes: list[str] = []
    for name, run in ENGINES.items():
        try:
            with during(Status.ENGINE, f"{name} in fp32"):
                figures[name] = relative_error(run(path, job, ""), want)
        except StageError as error:
            notes.append(error.cause)
    if not figures:
        raise StageError(Status.ENGINE, "; ".join(notes))
    return Found(figures=figures, notes=tuple(notes))


def write(job: Job, path: Path, exporter: str) -> None:
    """Export the network, with its dynamic axes open."""
    names = list(job.inputs)
    quiet = contextlib.redirect_stdout(io.StringIO())
    with warnings.catch_warnings(), quiet, torch.no_grad():
        warnings.simplefilter("ignore")
        if exporter == "dynamo":
            shapes = _dynamic_shapes(job)
            torch.onnx.export(
                job.net, (), path, kwargs=job.inputs, input_names=names,
                dynamic_shapes=shapes, dynamo=True, verbose=False,
            )  # fmt: skip
        else:
            axes = {name: dict(found) for name, found in job.network.dynamic.items()}
            net, args = Positional(job.net, names).eval(), tuple(job.inputs.values())
            torch.onnx.export(
                net, args, path, input_names=names, dynamic_axes=axes, dynamo=False
            )


class Positional(nn.Module):
    """Takes its inputs in order: of keywords left out the legacy export makes inputs."""

    def __init__(self, net: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.net, self.names = net, names

    def forward(self, *inputs: torch.Tensor) -> Any:
        """What the network returns."""
        return self.net(**dict(zip(self.names, inputs, strict=True)))


def _dynamic_shapes(job: Job) -> dict[str, Any] | None:
    if not job.network.dynamic:
        return None
    axis = torch.export.Dim.AUTO
    found = job.network.dynamic
    return {name: dict.fromkeys(found.get(name, {}), axis) for name in job.inputs}


def convert(job: Job, *, exporter: str, low: str) -> Found:
    """``finecast convert`` of the export, and what both engines make of it."""
    source = job.folder / exporter / "model.onnx"
    figures: dict[str, float] = {}
    notes: list[str] = []
    for name, run in ENGINES.items():
        try:
            with during(Status.ENGINE, f"{name} in fp32"):
                want = run(source, job, "")
        except StageError:
            continue  # the export's stage tells
        output = source.with_name(f"{low}-{name}.onnx")
        with during(Status.FINECAST, f"finecast convert for {name}"):
            _convert(job, source, output, low, name)
            onnx.checker.check_model(output, full_check=True)
        with during(Status.FINECAST, f"{name} after finecast convert"):
            try:
                figures[name] = relative_error(run(output, job, ""), want)
            except Exception as error:
                if low != "bf16" or _NO_KERNEL not in str(error):
                    raise
                notes.append(f"{name} has no kernel: {str(error).splitlines()[0][:120]}")
                continue
        _compare(job, name, low, source, want, figures)
        if job.speed and name == "openvino":
            figures["speed"] = _speed(job, source, output, low)
    return Found(figures=figures, notes=tuple(notes))


def _compare(
    job: Job, name: str, low: str, source: Path, want: Tensors, figures: dict[str, float]
) -> None:
    """Hold the error against OpenVINO's own in that format; without one, autocast's.

    A network may amplify each rounding, random deep ones above all, and its peer shows that.
    """
    peer: Peer | None = None
    if name == "openvino":
        with contextlib.suppress(StageError), during(Status.ENGINE, "openvino's hint"):
            figures["hint"] = relative_error(run_openvino(source, job, low), want)
            # On CPUs without bf16 kernels the hint computes in fp32, and is no peer.
            if figures["hint"]:
                peer = Peer(error=figures["hint"], name="the hint's")
    peer = peer or autocast_peer(job, Format.parse(low))
    peer.check(figures[name], f"{low} in {name}")


def _convert(job: Job, source: Path, output: Path, low: str, engine: str) -> None:
    """The command line, from a folder that has nothing of the model."""
    elsewhere = job.folder / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    given = ["convert", os.path.relpath(source, elsewhere), "-o"]
    given += [os.path.relpath(output, elsewhere), "--force", "--json", "--engine", engine]
    given += ["--auto-cast", "all", "--auto-cast-type", low]
    printed, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(elsewhere),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(errors),
    ):
        code = main(given)
    if code:
        last = errors.getvalue().strip().splitlines()[-1:]
        raise RuntimeError(f"exit code {code}: {' '.join(last)}")


def _speed(job: Job, source: Path, output: Path, low: str) -> float:
    """OpenVINO's time with its hint over finecast's, by turns."""
    hint, ours = openvino_call(source, job, low), openvino_call(output, job, "")
    race = Race.of(hint, {"ours": ours}, Effort(min_time_s=2.0, rounds=15))
    return race.speed("ours").median


def openvino_call(path: Path, job: Job, hint: str) -> Callable[[], Any]:
    """A call of the model in OpenVINO; ``hint`` is its precision, fp32 if empty."""
    settings = {"INFERENCE_PRECISION_HINT": _HINTS.get(hint, openvino.Type.f32)}
    compiled = openvino.compile_model(path, "CPU", settings)
    # A port has the names of what an op only passes on, too.
    feeds = _feeds(job, [n for n in job.inputs if any(n in p.names for p in compiled.inputs)])
    return lambda: compiled(feeds)


def run_openvino(path: Path, job: Job, hint: str) -> Tensors:
    """The float outputs in OpenVINO."""
    result = openvino_call(path, job, hint)()
    return _floats([result[i] for i in range(len(result))])


def run_onnxruntime(path: Path, job: Job, hint: str) -> Tensors:
    """The float outputs in ONNX Runtime, which has no hint."""
    del hint
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return _floats(session.run(None, _feeds(job, [i.name for i in session.get_inputs()])))


def _feeds(job: Job, names: list[str]) -> dict[str, Any]:
    return {name: job.inputs[name].numpy() for name in names}


def _floats(outputs: Sequence[Any]) -> Tensors:
    arrays = [np.asarray(x) for x in outputs]
    return [torch.from_numpy(x.copy()) for x in arrays if x.dtype.kind == "f"]


ENGINES: Final[dict[str, Callable[[Path, Job, str], Tensors]]] = {
    "openvino": run_openvino,
    "onnxruntime": run_onnxruntime,
}

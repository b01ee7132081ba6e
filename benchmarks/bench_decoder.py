"""The example's decoders by weights in codes, beside NNCF and the engines' own ways.

    python examples/decoder/make_decoder.py
    python -m benchmarks.bench_decoder [FOLDER] --nncf PYTHON [--tune TOLERANCE]

For ``decoder.onnx`` and ``planted.onnx`` of FOLDER, and each way to make them smaller: the
divergence of the next token's chances from fp32's, the share of tokens that it would choose
alike, bytes, and tokens a second. Errors are of teacher-forced texts that nothing was chosen
by. A step reads one token and a cache of 128; steps of all ways are timed in turns, in an
order that is drawn anew, in one process with one thread, by processor time. ``--tune`` also
searches a plan for each engine that mixes the formats by that divergence, which takes minutes.
PYTHON has NNCF, in an environment of its own. ``--files`` keeps the files that are made, and
measures those that are there from a run before.

What is to be read from it: of ways of equal size finecast's diverges least, of those of equal
divergence it gives most tokens a second, and on the planted decoder it chooses tokens as level
0 of ONNX Runtime does, at nine tenths of the speed of level 4.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
import openvino
from numpy.typing import NDArray

from benchmarks.common import report
from finecast import api
from finecast.engines.base import Array
from finecast.engines.numerics import ONNXRUNTIME_CHANGED, openvino_settings
from finecast.numbers.formats import Format

_ROOT: Final = Path(__file__).resolve().parents[1]
_OUT: Final = _ROOT / "examples" / "decoder" / "out"
# Texts that codes and plans are chosen by, and those that are judged; tokens of each.
_CALIBRATED, _JUDGED, _LENGTH = 16, 24, 128
_TUNED: Final = 4
_ONE_THREAD: Final = {"INFERENCE_NUM_THREADS": 1}
_POLICIES: Final = {
    "openvino": (
        *("all:int8_weights", "all:int8_dynamic", "all:int4_dynamic"),
        *("all:int4_weights@gptq", "all:int4_dynamic@gptq"),
    ),
    "onnxruntime": (
        *("all:int8_dynamic", "all:int4_dynamic", "all:int4_dynamic_128"),
        *("all:int4_weights@gptq", "all:int4_dynamic@gptq", "all:int4_dynamic_128@gptq"),
    ),
}
_MIXED: Final = {
    "openvino": "auto:int4_dynamic,int4_weights,int8_dynamic@gptq",
    "onnxruntime": "auto:int4_dynamic_128,int4_dynamic,int4_weights,int8_dynamic@gptq",
}

Feeds = Mapping[str, Array]
Run = Callable[[Feeds], Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to run the decoder: ``run`` gives its logits."""

    engine: str
    name: str
    size_bytes: int
    run: Run


def main() -> None:
    """Measure both decoders."""
    logging.disable(logging.INFO)  # ONNX Runtime's tool has a line for each node
    asked = _parsed()
    names = [asked.only] if asked.only else ["decoder", "planted"]
    for name in names:
        model = asked.folder / f"{name}.onnx"
        texts = np.load(asked.folder / "texts.npz")["input_ids"][:, :_LENGTH]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) if asked.files is None else asked.files / name
            folder.mkdir(parents=True, exist_ok=True)
            made = _Files(model=model, texts=texts, folder=folder)
            _measured(name, [*_ways(made, asked)], made, asked.turns)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Decoders by weights in codes, and peers.")
    parser.add_argument("folder", type=Path, nargs="?", default=_OUT)
    parser.add_argument("--nncf", type=Path, help="a Python that has NNCF")
    parser.add_argument("--turns", type=int, default=300, help="steps that are timed")
    parser.add_argument("--tune", type=float, help="also search plans of this divergence")
    parser.add_argument("--files", type=Path, help="keep what is made here, and use it again")
    parser.add_argument("--only", help="decoder or planted")
    return parser.parse_args()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """A decoder, the texts, and a folder for what is made of it."""

    model: Path
    texts: NDArray[np.int64]
    folder: Path

    def feeds(self, texts: NDArray[np.int64]) -> dict[str, Array]:
        """A call on whole texts, with an empty cache."""
        found: dict[str, Array] = {"input_ids": texts}
        for one in onnx.load(self.model, load_external_data=False).graph.input:
            if one.name != "input_ids":
                _, heads, _, size = (d.dim_value for d in one.type.tensor_type.shape.dim)
                found[one.name] = np.zeros((len(texts), heads, 0, size), np.float32)
        return found

    @property
    def calibrated(self) -> Path:
        """A file of the texts that codes are chosen by."""
        path = self.folder / "calibrated.npz"
        if not path.exists():
            feeds: dict[str, Any] = self.feeds(self.texts[:_CALIBRATED])
            np.savez(path, **feeds)
        return path

    @property
    def judged(self) -> NDArray[np.int64]:
        """Texts that nothing is chosen by."""
        return self.texts[_CALIBRATED : _CALIBRATED + _JUDGED]


def _ways(made: _Files, asked: argparse.Namespace) -> Iterator[Way]:
    """fp32 in each engine first, then what is made of it."""
    stated = openvino_settings("f32")
    yield _openvino(made.model, "fp32", stated)
    yield _openvino(made.model, "bf16 by OpenVINO's hint", openvino_settings("bf16"))
    yield _onnxruntime(made.model, "fp32")
    for engine, policies in _POLICIES.items():
        for policy in policies:
            stem = policy.partition(":")[2].replace("@", "-")
            out = made.folder / f"{engine}-{stem}.onnx"
            if not out.exists():
                data = made.calibrated if "@" in policy else None
                api.convert(
                    made.model, out, policy, engine=engine, verify=False, progress=False,
                    data=data,
                )  # fmt: skip
            yield _ours(out, engine, policy.partition(":")[2])
        if asked.tune is not None:
            yield from _tuned(made, engine, asked.tune)
    yield from _by_onnxruntime(made)
    if asked.nncf is not None:
        yield from _by_nncf(made, asked.nncf)


def _ours(path: Path, engine: str, name: str) -> Way:
    """A file of finecast's, with the settings that it prints for one of these formats."""
    what = f"finecast, {name}"
    if engine == "onnxruntime":
        return _onnxruntime(path, what)
    labels = [f.label for f in Format if f.label in name]
    return _openvino(path, what, openvino_settings("f32", labels))


def _tuned(made: _Files, engine: str, tolerance: float) -> Iterator[Way]:
    """The plan of a search by the divergence of decoded tokens, if one is better than fp32."""
    out, start = made.folder / f"{engine}-tuned.onnx", time.process_time()
    found = api.tune(
        made.model, out, policy=_MIXED[engine], engine=engine, metric="kld",
        tolerance=tolerance, data={"input_ids": made.texts[:_TUNED]}, decode_steps=4,
        batch=_TUNED, progress=False, objective="tokens_per_second",
    )  # fmt: skip
    took = round(time.process_time() - start)
    report(made.model.stem, f"search in {engine}", took, "s", verdict=found.verdict.value)
    if out.exists():
        counts = ", ".join(f"{n} {label}" for label, n in found.plan.counts.items())
        yield _ours(out, engine, f"tuned: {counts}")


def _by_onnxruntime(made: _Files) -> Iterator[Way]:
    """All products by ONNX Runtime's own tool, whose levels are its default and exact."""
    from onnxruntime.quantization import matmul_nbits_quantizer as nbits  # pyright: ignore

    for level in (4, 0):
        out = made.folder / f"level{level}.onnx"
        tool: Any = nbits.MatMulNBitsQuantizer(onnx.load(made.model), accuracy_level=level)
        tool.process()
        tool.model.save_model_to_file(str(out))
        yield _onnxruntime(out, f"ONNX Runtime, int4, level {level}", {})


def _by_nncf(made: _Files, python: Path) -> Iterator[Way]:
    """NNCF's files under OpenVINO's defaults, which round values, and with exact values."""
    command = [python, "-m", "benchmarks.peer_nncf_weights", made.model, made.calibrated]
    if not (made.folder / "nncf-int4.xml").exists():
        command = [*command, made.folder]
        done = subprocess.run(command, cwd=_ROOT, check=True, capture_output=True)
        took: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        for name, seconds in took.items():
            report(made.model.stem, f"NNCF's compression, {name}", seconds, "s")
    ways = {"default": "int8", "awq": "int4 .8, AWQ", "int4": "int4 .8, AWQ, scale estimation"}
    for name, what in ways.items():
        path = made.folder / f"nncf-{name}.xml"
        yield _openvino(path, f"NNCF, {what}, OpenVINO's defaults", {})
        exact = openvino_settings("f32")
        yield _openvino(path, f"NNCF, {what}, exact values", exact)


def _openvino(path: Path, name: str, settings: Mapping[str, Any]) -> Way:
    compiled = openvino.Core().compile_model(path, "CPU", {**settings, **_ONE_THREAD})
    request = compiled.create_infer_request()
    codes = path.with_suffix(".bin")
    size = path.stat().st_size + (codes.stat().st_size if path.suffix == ".xml" else 0)

    def run(feeds: Feeds) -> Array:
        request.infer(dict(feeds))
        return request.get_tensor("logits").data

    return Way(engine="openvino", name=name, size_bytes=size, run=run)


def _onnxruntime(
    path: Path, name: str, entries: Mapping[str, str] = ONNXRUNTIME_CHANGED
) -> Way:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    for entry, value in entries.items():
        options.add_session_config_entry(entry, value)
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(feeds: Feeds) -> Array:
        outputs: Any = session.run(None, dict(feeds))
        return outputs[0]

    size = path.stat().st_size
    return Way(engine="onnxruntime", name=name, size_bytes=size, run=run)


def _measured(model: str, ways: list[Way], made: _Files, turns: int) -> None:
    """Print a line for each way; its figures are beside fp32 in OpenVINO."""
    exact = _chances(ways[0], made)
    times = _step_times(ways, _step(made), turns)
    for way, seen in zip(ways, times, strict=True):
        found = _chances(way, made)
        kld = float((np.exp(exact) * (exact - found)).sum(axis=-1).mean())
        alike = float((exact.argmax(axis=-1) == found.argmax(axis=-1)).mean())
        report(
            model, f"{way.name} ({way.engine})", round(1 / median(seen), 1), "tokens a second",
            kld=float(f"{max(kld, 0.0):.3g}"), same_top1=round(alike, 4),
            mb=round(1e-6 * way.size_bytes, 2),
        )  # fmt: skip


def _chances(way: Way, made: _Files) -> NDArray[np.float64]:
    """The logarithm of the chances of each next token, [text, token, vocabulary]."""
    parts = [way.run(made.feeds(one)).astype(np.float64) for one in np.split(made.judged, 3)]
    logits = np.concatenate(parts)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def _step(made: _Files) -> Feeds:
    """The feeds of a step after a whole text, whose cache the fp32 model made."""
    session = onnxruntime.InferenceSession(made.model, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_outputs()]
    outputs: dict[str, Any] = dict(
        zip(names, session.run(None, made.feeds(made.judged[:1])), strict=True)
    )
    cache = {
        n: outputs[n.replace("past", "present")]
        for n in made.feeds(made.judged[:1])
        if n != "input_ids"
    }
    return {"input_ids": made.judged[1:2, :1], **cache}


def _step_times(ways: list[Way], feeds: Feeds, turns: int) -> list[list[float]]:
    """Seconds of a step of each way, in turns of a drawn order."""
    times: list[list[float]] = [[] for _ in ways]
    draw = np.random.default_rng(0)
    for way in ways:
        way.run(feeds)
    for _ in range(turns):
        for at in draw.permutation(len(ways)):
            start = time.process_time()
            ways[at].run(feeds)
            times[at].append(time.process_time() - start)
    return times


if __name__ == "__main__":
    sys.exit(main())

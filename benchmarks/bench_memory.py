"""Memory and time of decoders whose fp32 weights are as large as the machine's memory.

    python -m benchmarks.bench_memory --size 0.1B|1B|7B [--verb tune] [OPTIONS OF THE VERB]

A decoder of LLaMA's form is written as ONNX with external data and a key-value cache: random
weights, tensor by tensor, so that no more than one of them is in memory. finecast then makes
it low in a process of its own. Resident memory is read from ``/proc`` several times a second,
in two parts. Anonymous memory is what processes need: that of all of them, and finecast's
own, without the engine's in the process of dry runs. Memory of files is mapped weights, which
the kernel drops and reads again when it needs the space. ``ru_maxrss`` counts both.

What was written is then run in a process of its own, by ``benchmarks.decoder_run``: one call
on 8 tokens and 8 steps, held against fp32 logits that are computed layer by layer.

1B takes 4.3 GB of disk and 7B 27 GB, and the result up to a third of that.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.common import report
from benchmarks.decoder_run import compare

_POSITIONS: Final = 512
_SAMPLE_S: Final = 0.05
_PARTS: Final = ("RssAnon", "RssFile", "RssShmem")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a decoder; a head has ``width / heads`` channels."""

    width: int
    hidden: int
    layers: int
    heads: int
    vocabulary: int = 32_000

    @property
    def parameters(self) -> int:
        """The weights of all matrices."""
        layer = 4 * self.width**2 + 3 * self.width * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.width


SIZES: Final = {
    "0.1B": Sizes(width=768, hidden=2048, layers=12, heads=12),
    "1B": Sizes(width=2048, hidden=5632, layers=18, heads=32),
    "7B": Sizes(width=4096, hidden=11008, layers=32, heads=32),
}


# The model.


@dataclass(slots=True, kw_only=True)
class _Writer:
    """Collects nodes; weights go to the data file when they are named."""

    data: BinaryIO
    draw: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list[onnx.NodeProto])
    constants: list[onnx.TensorProto] = field(default_factory=list[onnx.TensorProto])

    def op(self, kind: str, name: str, *inputs: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> str:
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def weight(self, name: str, rows: int, columns: int) -> str:
        """A matrix of random numbers in external data."""
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[rows, columns])
        tensor.data_location = TensorProto.EXTERNAL
        place = {"location": Path(self.data.name).name, "offset": self.data.tell()}
        for key, value in (place | {"length": 4 * rows * columns}).items():
            tensor.external_data.add(key=key, value=str(value))
        for start in range(0, rows, 1024):
            piece = self.draw.standard_normal((min(1024, rows - start), columns), np.float32)
            piece /= np.float32(np.sqrt(rows))
            self.data.write(piece.data)
        self.constants.append(tensor)
        return name

    def norm(self, name: str, x: str, width: int) -> str:
        square = self.op("Mul", f"{name}.square", x, x)
        mean = self.op("ReduceMean", f"{name}.mean", square, axes=[-1])
        least = self.constant(f"{name}.epsilon", np.array(1e-5, np.float32))
        root = self.op("Sqrt", f"{name}.root", self.op("Add", f"{name}.added", mean, least))
        scaled = self.op("Div", f"{name}.scaled", x, root)
        return self.op("Mul", name, scaled, self.constant(f"{name}.w", np.ones(width, "f4")))

    def rotated(self, name: str, x: str) -> str:
        first, last = f"{name}.first", f"{name}.last"
        self.nodes.append(helper.make_node("Split", [x], [first, last], f"{name}/s", axis=-1))
        minus = self.op("Neg", f"{name}.minus", last)
        turned = self.op("Concat", f"{name}.turned", minus, first, axis=-1)
        own = self.op("Mul", f"{name}.own", x, "cosines")
        return self.op("Add", name, own, self.op("Mul", f"{name}.other", turned, "sines"))

    def layer(self, n: int, x: str, sizes: Sizes) -> str:
        width, hidden, at = sizes.width, sizes.hidden, f"layers.{n}"
        normed, heads = self.norm(f"{at}.norm", x, width), dict[str, str]()
        for kind in ("query", "key", "value"):
            weight = self.weight(f"{at}.{kind}.w", width, width)
            flat = self.op("MatMul", f"{at}.{kind}", normed, weight)
            parts = self.op("Reshape", f"{at}.{kind}.parts", flat, "split")
            heads[kind] = self.op("Transpose", f"{at}.{kind}.h", parts, perm=[0, 2, 1, 3])
        for kind in ("query", "key"):
            heads[kind] = self.rotated(f"{at}.{kind}.rotated", heads[kind])
        for kind in ("key", "value"):
            past = f"past_key_values.{n}.{kind}"
            heads[kind] = self.op("Concat", f"present.{n}.{kind}", past, heads[kind], axis=2)
        keys = self.op("Transpose", f"{at}.keys", heads["key"], perm=[0, 1, 3, 2])
        scores = self.op("MatMul", f"{at}.scores", heads["query"], keys)
        scaled = self.op("Mul", f"{at}.scaled", scores, "scale")
        scores = self.op("Add", f"{at}.masked", scaled, "mask")
        chances = self.op("Softmax", f"{at}.softmax", scores, axis=-1)
        mixed = self.op("MatMul", f"{at}.mixed", chances, heads["value"])
        rows = self.op("Transpose", f"{at}.rows", mixed, perm=[0, 2, 1, 3])
        flat = self.op("Reshape", f"{at}.flat", rows, "joined")
        out = self.op("MatMul", f"{at}.out", flat, self.weight(f"{at}.out.w", width, width))
        x = self.op("Add", f"{at}.attended", x, out)
        normed = self.norm(f"{at}.mlp_norm", x, width)

        def product(kind: str, read: str, rows: int, columns: int) -> str:
            weight = self.weight(f"{at}.{kind}.w", rows, columns)
            return self.op("MatMul", f"{at}.{kind}", read, weight)

        gate = product("gate", normed, width, hidden)
        gate = self.op("Mul", f"{at}.swish", gate, self.op("Sigmoid", f"{at}.sigmoid", gate))
        both = self.op("Mul", f"{at}.both", gate, product("up", normed, width, hidden))
        return self.op("Add", f"{at}.result", x, product("down", both, hidden, width))

    def positions(self, sizes: Sizes) -> None:
        """What all layers read: rotations of the positions, and a causal mask."""
        size = sizes.width // sizes.heads
        steps = np.arange(size // 2) / (size // 2)
        angles = np.arange(_POSITIONS)[:, None] / 10_000**steps
        whole = np.concatenate([angles, angles], 1)
        for name, table in (("cosines", np.cos(whole)), ("sines", np.sin(whole))):
            self.constant(f"{name}.table", table.astype(np.float32))
        for name, numbers in (
            ("split", [0, 0, sizes.heads, size]),
            ("joined", [0, 0, sizes.width]),
            ("zero", 0), ("one", 1), ("rows_first", [1]),
        ):  # fmt: skip
            self.constant(name, np.array(numbers, np.int64))
        self.constant("scale", np.array(size**-0.5, np.float32))
        self.constant("open", np.array(0, np.float32))
        self.constant("hidden", np.array(-1e9, np.float32))
        past = self.op("Shape", "past_shape", "past_key_values.0.key", start=2, end=3)
        new = self.op("Shape", "new_shape", "input_ids", start=1, end=2)
        before = self.op("Squeeze", "before", past)
        after = self.op("Add", "after", before, self.op("Squeeze", "new", new))
        places = self.op("Range", "places", before, after, "one")
        for name in ("cosines", "sines"):
            self.op("Gather", name, f"{name}.table", places)
        every = self.op("Range", "every", "zero", after, "one")
        later = self.op(
            "Greater", "later", every, self.op("Unsqueeze", "own", places, "rows_first")
        )
        self.op("Where", "mask", later, "hidden", "open")


def write(folder: Path, sizes: Sizes) -> Path:
    """Write a decoder to ``decoder.onnx`` and ``decoder.data``; never whole in memory."""
    path = folder / "decoder.onnx"
    with (folder / "decoder.data").open("wb") as data:
        writer = _Writer(data=data, draw=np.random.default_rng(0))
        writer.positions(sizes)
        table = writer.weight("embedding.w", sizes.vocabulary, sizes.width)
        x = writer.op("Gather", "embedding", table, "input_ids")
        for n in range(sizes.layers):
            x = writer.layer(n, x, sizes)
        x = writer.norm("norm", x, sizes.width)
        head = writer.weight("head.w", sizes.width, sizes.vocabulary)
        writer.op("MatMul", "logits", x, head)
    caches = [f"{n}.{kind}" for n in range(sizes.layers) for kind in ("key", "value")]

    def port(name: str, kind: int, *shape: int | str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    def cached(prefix: str, length: str) -> list[onnx.ValueInfoProto]:
        shape = ("batch", sizes.heads, length, sizes.width // sizes.heads)
        return [port(f"{prefix}.{name}", TensorProto.FLOAT, *shape) for name in caches]

    ids = port("input_ids", TensorProto.INT64, "batch", "length")
    logits = port("logits", TensorProto.FLOAT, "batch", "length", sizes.vocabulary)
    graph = helper.make_graph(
        writer.nodes, "decoder",
        [ids, *cached("past_key_values", "past")],
        [logits, *cached("present", "all")],
        writer.constants,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


def write_texts(
    path: Path, sizes: Sizes, samples: int = 8, length: int = 16, *, caches: bool = True
) -> Path:
    """Write token ids, the next token of each, and ``caches`` that are empty yet."""
    draw = np.random.default_rng(1)
    ids = draw.integers(0, sizes.vocabulary, (samples, length + 1))
    empty = np.zeros((samples, sizes.heads, 0, sizes.width // sizes.heads), np.float32)
    given = {
        f"past_key_values.{n}.{kind}": empty
        for n in range(sizes.layers if caches else 0)
        for kind in ("key", "value")
    }
    arrays = {"input_ids": ids[:, :-1], "label": ids[:, 1:], **given}
    np.savez(path, allow_pickle=False, **arrays)
    return path


# Memory.


@dataclass(slots=True, kw_only=True)
class Peak:
    """The most memory that processes held together at one time, in bytes."""

    anonymous: int = 0
    mapped: int = 0
    resident: int = 0

    def see(self, pids: Sequence[int]) -> None:
        """Take the memory of now into account."""
        found = [_resident(pid) for pid in pids]
        anonymous, mapped, shared = (sum(one[i] for one in found) for i in range(3))
        self.anonymous = max(self.anonymous, anonymous + shared)
        self.mapped = max(self.mapped, mapped)
        self.resident = max(self.resident, anonymous + shared + mapped)


def _resident(pid: int) -> tuple[int, int, int]:
    """Anonymous, mapped and shared bytes of a process; zeros once it ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0, 0
    fields = dict(line.split(":", 1) for line in lines)
    anonymous, mapped, shared = (
        1024 * int(fields[part].split()[0]) if part in fields else 0 for part in _PARTS
    )
    return anonymous, mapped, shared


def _started_by(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = path.read_text(encoding="ascii").split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in map(int, children):
            yield child
            yield from _started_by(child)


def measured(command: Sequence[str], limit_s: float, trace: bool) -> dict[str, Any]:
    """Run ``command``; its peaks, times and result.

    A trace shows what it prints with the second, by which phases are told apart, and the
    memory of each process every second.
    """
    peak, own, start = Peak(), Peak(), time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines: list[str] = []

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            text = line.decode(errors="replace").rstrip()
            lines.append(text)
            if trace:
                sys.stderr.write(f"{time.perf_counter() - start:7.1f} s  {text}\n")

    listener = threading.Thread(target=listen)
    listener.start()
    shown = 0.0
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        peak.see([process.pid, *_started_by(process.pid)])
        own.see([process.pid])
        passed = time.perf_counter() - start
        if trace and passed > shown + 1:
            pids = (process.pid, *_started_by(process.pid))
            texts = (
                f"{(anonymous + shared) / 1e6:.0f} MB own, {mapped / 1e6:.0f} MB of files"
                for anonymous, mapped, shared in map(_resident, pids)
            )
            sys.stderr.write(f"{passed:7.1f} s  {'; '.join(texts)}\n")
            shown = passed
        if passed > limit_s:
            process.kill()
        time.sleep(_SAMPLE_S)
    process.returncode = os.waitstatus_to_exitcode(status)
    listener.join()
    return {
        "exit_code": process.returncode,
        "wall_s": round(time.perf_counter() - start, 1),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "anonymous_mb": round(peak.anonymous / 1e6),
        "own_anonymous_mb": round(own.anonymous / 1e6),
        "mapped_mb": round(peak.mapped / 1e6),
        "maxrss_mb": round(usage.ru_maxrss * 1024 / 1e6),
        "read_mb": round(usage.ru_inblock * 512 / 1e6),
        "said": lines[-40:],
    }


def main() -> None:
    """Write a decoder, have finecast make it low, and report what that took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="0.1B")
    parser.add_argument("--folder", type=Path, help="where models are written and kept")
    parser.add_argument("--verb", choices=("convert", "tune"), default="convert")
    parser.add_argument("--formats", nargs="+", default=["int8_weights", "int4_weights"])
    parser.add_argument("--engine", choices=("openvino", "onnxruntime"), default="openvino")
    parser.add_argument("--ir", action="store_true", help="as OpenVINO's IR")
    parser.add_argument("--trace", action="store_true", help="memory of each second")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for each run")
    options, more = parser.parse_known_args()
    made = None if options.folder else tempfile.TemporaryDirectory(prefix="finecast-")
    folder = options.folder or Path(made.name if made else "")
    try:
        _run(options, folder, more)
    finally:
        if made is not None:
            made.cleanup()


def _run(options: argparse.Namespace, folder: Path, more: Sequence[str]) -> None:
    sizes, path = SIZES[options.size], folder / "decoder.onnx"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        start = time.perf_counter()
        write(folder, sizes)
        report("memory", f"{options.size} written", round(time.perf_counter() - start), "s")
    if options.ir:
        path = _as_ir(path)
    texts = write_texts(folder / "texts.npz", sizes)
    if "--decode-steps" in more:  # the caches are those of the call before
        texts = write_texts(folder / "decoded.npz", sizes, caches=False)
    whole = [",".join(options.formats)] if options.verb == "tune" else options.formats
    for formats in whole:
        out = folder / "out"
        low = out / f"low{path.suffix}"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        command = [sys.executable, "-m", "finecast", options.verb, str(path)]
        command += ["-o", str(low), "--auto-cast-type", formats, "--engine", options.engine]
        if options.verb == "tune":
            command += ["--data", str(texts), "--metric", "kld"]
        else:
            command += ["--auto-cast", "all"]
        found = measured([*command, *more], options.limit, options.trace)
        written = sum(f.stat().st_size for f in out.iterdir())
        report(
            "memory", f"{options.verb} {options.size} {path.suffix[1:]}, {formats}",
            found["anonymous_mb"], "MB", parameters=sizes.parameters,
            written_mb=round(written / 1e6), **found,
        )  # fmt: skip
        if low.exists():
            _run_low(options, low, formats)
        shutil.rmtree(out)


def _run_low(options: argparse.Namespace, low: Path, formats: str) -> None:
    """Report what running ``low`` takes, and how far it is from fp32."""
    folder = low.parents[1]
    found, exact = low.with_suffix(".npz"), folder / "exact.npz"
    module = [sys.executable, "-m", "benchmarks.decoder_run"]
    if not exact.exists():
        command = [*module, "exact", str(folder / "decoder.onnx"), str(exact)]
        taken = measured(command, options.limit, options.trace)
        report("memory", "fp32, layer by layer", taken["anonymous_mb"], "MB", **taken)
    command = [*module, "low", str(low), str(found), *formats.split(",")]
    taken = measured([*command, "--engine", options.engine], options.limit, options.trace)
    if found.exists() and exact.exists():
        taken |= compare(found, exact)
    report("memory", f"{low.name} run, {formats}", taken["anonymous_mb"], "MB", **taken)


def _as_ir(path: Path) -> Path:
    import openvino

    out = path.with_suffix(".xml")
    if not out.exists():
        model = openvino.Core().read_model(path)
        openvino.serialize(model, out)
    return out


if __name__ == "__main__":
    main()

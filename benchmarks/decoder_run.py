"""A large decoder run as its low file says, and held against fp32 layer by layer.

    python -m benchmarks.decoder_run low LOW OUT.npz [FORMAT ...] [--engine ENGINE]
    python -m benchmarks.decoder_run exact decoder.onnx OUT.npz

Both read the same tokens. ``low`` is what a user of the file does: it is loaded with the
settings that finecast prints, half of the tokens is one call, and each of the others is a step
with the cache of the calls before. ``exact`` computes fp32 logits and caches of a model that
is larger than the memory: one layer after the other, each a model of its own, whose weights
are mapped from the file of all and dropped with its session.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
import openvino
from numpy.typing import NDArray
from onnx import TensorProto, helper

from finecast.engines.numerics import ONNXRUNTIME_CHANGED, openvino_settings

_PAST, _PRESENT = "past_key_values.", "present."
_PREFILL: Final = 8
Arrays = dict[str, NDArray[Any]]


def compare(low: Path, exact: Path) -> dict[str, Any]:
    """How far the logits and caches of a low model are from fp32's.

    Random weights have no favourite token, so they are a hard case: the logits of one position
    are 32,000 normal numbers, whose largest two are close.
    """
    with np.load(low) as ours, np.load(exact) as theirs:
        chances = [_log_chances(one["logits"]) for one in (theirs, ours)]
        divergence = (np.exp(chances[0]) * (chances[0] - chances[1])).sum(axis=-1)
        same = chances[0].argmax(axis=-1) == chances[1].argmax(axis=-1)
        values = [name for name in theirs.files if name.endswith(".value")]
        return {
            "finite": all(bool(np.isfinite(ours[name]).all()) for name in ours.files),
            "kld": _rounded(divergence.mean()),
            "same_top1": _rounded(same.mean()),
            "logits_error": _distance(ours["logits"], theirs["logits"]),
            "steps_beside_one_call": _distance(ours["logits"], ours["whole_logits"]),
            "values_error_by_layer": [_distance(ours[n], theirs[n]) for n in values],
        }


def _log_chances(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def _distance(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """The norm of the difference, relative to ``theirs``."""
    return _rounded(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def _rounded(number: Any) -> float:
    return float(f"{float(number):.3g}")


class _Low:
    """A low file in its engine, by the lines that finecast prints for it."""

    def __init__(self, path: Path, engine: str, formats: Iterable[str]) -> None:
        self._session, self._request = None, None
        if engine == "openvino":
            settings = openvino_settings("f32", formats)
            compiled = openvino.Core().compile_model(path, "CPU", settings)
            self._request = compiled.create_infer_request()
        else:
            self._session = _session(path, ONNXRUNTIME_CHANGED)

    def __call__(self, feeds: Arrays) -> Arrays:
        if self._request is None:
            return _ran(self._session, feeds)
        found = self._request.infer(feeds)
        return {port.get_any_name(): np.array(array) for port, array in found.items()}


def _session(path: Path, entries: Mapping[str, str]) -> Any:
    options = onnxruntime.SessionOptions()
    for entry, value in entries.items():
        options.add_session_config_entry(entry, value)
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _ran(session: Any, feeds: Arrays) -> Arrays:
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def run_low(path: Path, out: Path, engine: str, formats: Sequence[str]) -> None:
    """Write the logits and the cache of all tokens; print seconds of processor time."""
    feeds, times = _feeds(path.parent), list[float]()
    ids = feeds.pop("input_ids")
    clock = time.process_time()

    def passed() -> float:
        nonlocal clock
        before, clock = clock, time.process_time()
        return round(clock - before, 2)

    model = _Low(path, engine, formats)
    loaded_s, cache, logits = passed(), feeds, list[NDArray[Any]]()
    for start, end in [(0, _PREFILL), *((n, n + 1) for n in range(_PREFILL, ids.shape[1]))]:
        found = model({"input_ids": ids[:, start:end], **cache})
        times.append(passed())
        logits.append(found.pop("logits"))
        cache = {name.replace(_PRESENT, _PAST): array for name, array in found.items()}
    whole = model({"input_ids": ids, **feeds})["logits"]
    arrays = {name.replace(_PAST, _PRESENT): array for name, array in cache.items()}
    joined = np.concatenate(logits, axis=1)
    np.savez(out, allow_pickle=False, logits=joined, whole_logits=whole, **arrays)
    said = {"load_cpu_s": loaded_s, "prefill_cpu_s": times[0], "step_cpu_s": times[1:]}
    sys.stdout.write(json.dumps(said) + "\n")


def _feeds(folder: Path) -> Arrays:
    """The first text that the models were made by, with an empty cache."""
    at = next(f for f in (folder, *folder.parents) if (f / "texts.npz").exists())
    with np.load(at / "texts.npz") as texts:
        return {name: texts[name][:1] for name in texts.files if name != "label"}


def run_exact(path: Path, out: Path) -> None:
    """Write fp32 logits and caches of all tokens; never more than a layer in memory."""
    model, feeds = onnx.load(path, load_external_data=False), _feeds(path.parent)
    results = [n.name for n in model.graph.node if n.name.endswith(".result")]
    values, found, given = dict(feeds), Arrays(), [*feeds]
    for number, result in enumerate([*results, "logits"]):
        last = result == "logits"
        wanted = [] if last else [f"{_PRESENT}{number}.{kind}" for kind in ("key", "value")]
        made = _run_part(model, path.parent, values, given, [result, *wanted])
        given = [*feeds, result]
        values = {**feeds, result: made[result]}
        found |= {name: array for name, array in made.items() if last or name != result}
    np.savez(out, allow_pickle=False, **found)


def _run_part(
    model: onnx.ModelProto, folder: Path, values: Arrays, given: Sequence[str], out: list[str]
) -> Arrays:
    """The values ``out`` of a model, from those ``given``."""
    makers = {name: node for node in model.graph.node for name in node.output}
    needed, names, todo = set[str](), set[str](), [*out]
    while todo:
        name = todo.pop()
        if name in names:
            continue
        names.add(name)
        if name not in given and name in makers:
            needed.add(makers[name].name)
            todo += makers[name].input
    free = {n: helper.np_dtype_to_tensor_dtype(values[n].dtype) for n in given if n in names}
    graph = helper.make_graph(
        [node for node in model.graph.node if node.name in needed], "part",
        [helper.make_tensor_value_info(n, of, values[n].shape) for n, of in free.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in out],
        [one for one in model.graph.initializer if one.name in names],
    )  # fmt: skip
    path = folder / "part.onnx"  # weights are found beside it
    path.write_bytes(
        helper.make_model(
            graph, opset_imports=model.opset_import, ir_version=model.ir_version
        ).SerializeToString()
    )
    mapped = {"session.disable_prepacking": "1"}  # packed weights would be a second copy
    try:
        return _ran(_session(path, mapped), {name: values[name] for name in free})
    finally:
        path.unlink()


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("low", "exact"))
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("formats", nargs="*")
    parser.add_argument("--engine", default="openvino")
    asked = parser.parse_args()
    if asked.what == "low":
        run_low(asked.model, asked.out, asked.engine, asked.formats)
    else:
        run_exact(asked.model, asked.out)


if __name__ == "__main__":
    main()

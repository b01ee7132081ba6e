"""Loads and runs models in an engine's library, for a process that does not want to crash.

``dry_run`` has this done in a ``worker_process``; the library's name is its argument. This
file imports nothing of finecast, so that the process starts as fast as the library does.

A request to ``load`` has a ``key``, the ``settings`` of the library and a ``path``, or the
model's bytes as payload. One to ``run`` has the key of a model that was loaded and its
``feeds``: for each input its name, numpy's type, its shape and its type in the library. What
the library raises is no matter here: it is raised in the other process, too.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

_MOST_HELD_BYTES: Final = 256 << 20
"""Models of more are let go as soon as they are loaded, and never run."""

_Feeds: TypeAlias = Sequence[tuple[str, Any, Any]]
"""Names, arrays, and their types in the library."""
_Run: TypeAlias = Callable[[_Feeds], object]
_Load: TypeAlias = Callable[[Mapping[str, Any], "str | bytes"], "_Run | None"]
_Stage: TypeAlias = Callable[[str], None]


def _openvino(tell_stage: _Stage) -> _Load:
    import openvino

    core = openvino.Core()

    def load(settings: Mapping[str, Any], model: str | bytes) -> _Run | None:
        tell_stage("read")
        described = settings.get("described")
        if isinstance(model, bytes) and described is not None:
            read = core.read_model(model[:described], model[described:])
        else:
            read = core.read_model(model)
        if "compile" not in settings:
            return None
        tell_stage("compiled")
        compiled = core.compile_model(read, settings["device"], settings["compile"])
        del read
        request = compiled.create_infer_request()

        def run(feeds: _Feeds) -> None:
            for index, (_, array, _) in enumerate(feeds):
                kind = compiled.inputs[index].get_element_type()
                request.set_input_tensor(
                    index, openvino.Tensor(array, list(array.shape), kind)
                )
            request.infer()

        return run

    return load


def _onnxruntime(tell_stage: _Stage) -> _Load:
    import onnxruntime
    from onnxruntime import OrtValue

    def load(settings: Mapping[str, Any], model: str | bytes) -> _Run:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = settings["threads"]
        if not settings["optimizing"]:
            level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.graph_optimization_level = level
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        for name, value in settings["entries"].items():
            options.add_session_config_entry(name, value)
        tell_stage("compiled")
        session = onnxruntime.InferenceSession(model, options, providers=settings["providers"])

        def run(feeds: _Feeds) -> None:
            given = {
                name: OrtValue.ortvalue_from_numpy(array)
                if kind is None
                else OrtValue.ortvalue_from_numpy_with_onnx_type(array, kind)
                for name, array, kind in feeds
            }
            session.run_with_ort_values([o.name for o in session.get_outputs()], given)

        return run

    return load


def _tensorflow(tell_stage: _Stage) -> _Load:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import importlib

    tf: Any = importlib.import_module("tensorflow")

    def load(settings: Mapping[str, Any], model: str | bytes) -> _Run:
        tell_stage("read")
        graph = tf.Graph()
        with graph.as_default():
            tf.import_graph_def(tf.compat.v1.GraphDef.FromString(model), name="")
        config = tf.compat.v1.ConfigProto.FromString(bytes.fromhex(settings["config"]))
        session = tf.compat.v1.Session(graph=graph, config=config)

        def run(feeds: _Feeds) -> None:
            given = {name: array for name, array, _ in feeds}
            session.run(settings["outputs"], given)

        return run

    return load


_LIBRARIES: Final[Mapping[str, Callable[[_Stage], _Load]]] = {
    "openvino": _openvino,
    "onnxruntime": _onnxruntime,
    "tensorflow": _tensorflow,
}


class _Served:
    """The library, and the models that it has loaded lately, of a bounded size together."""

    def __init__(self, library: str) -> None:
        self.stages: list[_Stage] = []
        self.load_model = _LIBRARIES[library](lambda stage: self.stages[-1](stage))
        self.held: OrderedDict[str, tuple[_Run, int]] = OrderedDict()

    def answer(
        self, request: Mapping[str, Any], payload: bytes, tell_stage: _Stage
    ) -> tuple[dict[str, str], bytes]:
        """Load or run a model. Never raises."""
        self.stages[:] = [tell_stage]
        try:
            known = (self.load if request["call"] == "load" else self.run)(request, payload)
        except Exception as error:  # whatever a library raises
            return {"status": "raised", "text": f"{type(error).__name__}: {error}"}, b""
        return {"status": "done" if known else "absent"}, b""

    def load(self, request: Mapping[str, Any], payload: bytes) -> bool:
        """Load a model and hold it, if it is not too large. Always true."""
        path = request.get("path")
        run = self.load_model(request["settings"], payload if path is None else path)
        size = request["bytes"]
        if run is None or size > _MOST_HELD_BYTES:
            return True
        self.held[request["key"]] = run, size
        while sum(size for _, size in self.held.values()) > _MOST_HELD_BYTES:
            self.held.popitem(last=False)
        return True

    def run(self, request: Mapping[str, Any], payload: bytes) -> bool:
        """Run a model; false if it is not held."""
        if request["key"] not in self.held:
            return False
        run, _ = self.held[request["key"]]
        feeds: list[tuple[str, Any, Any]] = []
        start = 0
        for name, dtype, shape, kind in request["feeds"]:
            count = int(np.prod(shape, dtype=np.int64))
            array = np.frombuffer(payload, dtype=dtype, count=count, offset=start)
            start += array.nbytes
            feeds.append((name, array.reshape(shape).copy(), kind))
        self.stages[-1]("run")
        run(feeds)
        return True


if __name__ == "finecast_served":
    answer = _Served(sys.argv[1]).answer

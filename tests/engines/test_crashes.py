"""Models that end the process of an engine which loads or runs them: one error here."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

import finecast
from finecast.cli import main
from finecast.engines import crashes, first_that_loads, get_engine, installed, loading
from finecast.engines.loading import exact_engine, load_model
from finecast.engines.openvino import OpenVinoEngine
from finecast.errors import EngineError, ExitCode
from finecast.files.staging import staging
from finecast.frontends import dry_run, dry_run_worker
from finecast.frontends import onnx as frontend
from finecast.frontends.dry_run import CrashedError, DryRun, Kept, _Library
from finecast.frontends.openvino import model as openvino_model
from finecast.processes.worker import Worker
from tests.engines import crashing_worker

NET = parser.parse_model(
    """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 4] x) => (float[n, 4] y) <float[4] b = {1.0, 2.0, 3.0, 4.0}>
{ y = Add (x, b) }"""
)
FEEDS = {"x": np.ones((2, 4), np.float32)}
ENGINES = [name for name in ("openvino", "onnxruntime") if installed(name)]


@contextmanager
def crashing(stage: str, *names: str) -> Generator[None]:
    """Libraries that crash at ``stage``, whatever the model; all of them if none is named."""
    made = {name: _Library(name, old.title) for name, old in dry_run._workers.items()}
    for name in names or made:
        made[name].worker = Worker(crashing_worker.__file__, stage, instead=dry_run._untried)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dry_run, "_workers", made)
            yield
    finally:
        for one in made.values():
            one.worker.end()


@pytest.fixture
def hostile(request: pytest.FixtureRequest) -> Iterator[None]:
    with crashing(request.param):
        yield


def neural_ode(path: Path) -> Path:
    """Two Euler steps of a small net: OpenVINO 2026.4 crashes as it compiles them in fp32."""
    draw = np.random.default_rng(0)
    shapes = {"v": (16, 8), "c": (16,), "w": (8, 16), "d": (8,)}
    made = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18]>
ode (float[4, 8] x) => (float[4, 8] y) <float step = {0.1}> {
  a = Gemm <transB = 1> (x, v, c) b = Relu (a) f = Gemm <transB = 1> (b, w, d)
  g = Mul (f, step) z = Add (x, g)
  h = Gemm <transB = 1> (z, v, c) i = Relu (h) j = Gemm <transB = 1> (i, w, d)
  k = Mul (j, step) y = Add (z, k)
}"""
    )
    for name, shape in shapes.items():
        array = draw.uniform(-0.3, 0.3, shape).astype(np.float32)
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(made, path)
    return path


def bare_convolution(path: Path) -> Path:
    """A convolution without weights, which is invalid."""
    ports = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 3, 8, 8]) for n in ("x", "y")
    ]
    node = helper.make_node("Conv", ["x"], ["y"])
    graph = helper.make_graph([node], "bare", ports[:1], ports[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)
    return path


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("hostile", ["read", "compiled"], indirect=True)
def test_a_crash_as_it_is_loaded(name: str, hostile: None, tmp_path: Path) -> None:
    """By path and by bytes, the first time and again."""
    onnx.save(NET, tmp_path / "net.onnx")
    engine = get_engine(name)
    for model in (tmp_path / "net.onnx", NET.SerializeToString()):
        for _ in range(2):
            with pytest.raises(CrashedError, match=r"crashed \(SIGSEGV\) as it \w+ the model"):
                engine.load(model)


@pytest.mark.parametrize("name", ENGINES)
def test_a_name_as_long_as_the_file_system_allows(name: str, tmp_path: Path) -> None:
    """No file can stand beside the model whose name is the model's with an ending."""
    path = tmp_path / ("a" * 250 + ".onnx")
    onnx.save(NET, path)
    assert get_engine(name).load(path).run(FEEDS)["y"].shape == (2, 4)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("hostile", ["run"], indirect=True)
def test_a_crash_as_it_is_run(name: str, hostile: None) -> None:
    session = get_engine(name).load(NET.SerializeToString())
    for _ in range(2):
        with pytest.raises(EngineError, match=r"crashed \(SIGFPE\) as it ran the model"):
            session.run(FEEDS)


@pytest.mark.skipif(not installed("openvino"), reason="needs OpenVINO")
def test_a_model_that_is_kept_there_gives_outputs_and_may_crash() -> None:
    """Its runs are all in the other process, which may crash in any of them."""
    engine = OpenVinoEngine()
    session = engine.load_tried(NET.SerializeToString())
    wanted = FEEDS["x"] + np.array([1, 2, 3, 4], np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(session.run(FEEDS)["y"], wanted)
    library = dry_run._workers["openvino"]
    child = library.worker.child
    assert child is not None
    child.process.kill()
    child.process.wait()  # as if another model had ended it: the model is loaded again
    np.testing.assert_array_equal(session.run(FEEDS)["y"], wanted)
    with crashing("run", "openvino"):
        crashed = engine.load_tried(NET.SerializeToString())
        with pytest.raises(CrashedError, match="SIGFPE"):
            crashed.run(FEEDS)
    assert not library.dropped
    del session
    assert len(library.dropped) == 1


def test_a_file_is_the_model_whose_bytes_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was raced in memory is not compiled there again as it is written."""
    sent: list[str] = []
    send = DryRun._send_model

    def sends(self: DryRun, call: str) -> object:
        sent.append(call)
        return send(self, call)

    monkeypatch.setattr(DryRun, "_send_model", sends)
    content, path = NET.SerializeToString(), tmp_path / "net.onnx"
    engine = OpenVinoEngine()
    engine.load(content)
    before = len(sent)
    path.write_bytes(content)
    engine.load(path)
    assert len(sent) == before
    path.write_bytes(NET.SerializeToString().replace(b"net", b"nut"))
    engine.load(path)
    assert len(sent) == before + 1


@pytest.mark.parametrize("hostile", ["nothing"], indirect=True)
@pytest.mark.parametrize("name", ENGINES)
def test_each_model_is_tried_once(
    name: str, hostile: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    call = Worker.call

    def count(self: Worker, request: dict[str, str], *rest: Any) -> dry_run.Answer:
        if request.get("call"):
            asked.append(request["call"])
        return call(self, request, *rest)

    monkeypatch.setattr(Worker, "call", count)
    sessions = [get_engine(name).load(NET.SerializeToString()) for _ in range(2)]
    for session in sessions * 2:
        assert list(session.run(FEEDS)) == ["y"]
    assert asked == ["load", "run"]
    for rows in (3, 3, 2):
        sessions[0].run({"x": np.ones((rows, 4), np.float32)})
    assert asked == ["load", "run", "run"]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("hostile", ["rows"], indirect=True)
def test_a_crash_on_inputs_of_a_later_shape(name: str, hostile: None) -> None:
    """Engines make kernels anew for each shape; a profile runs the model, too."""
    session = get_engine(name).load(NET.SerializeToString(), profiling=True)
    assert session.run(FEEDS)["y"].shape == (2, 4)
    longer = {"x": np.ones((3, 4), np.float32)}
    for run in (session.run, session.profile):
        with pytest.raises(CrashedError, match=r"crashed \(SIGFPE\) as it ran the model"):
            run(longer)
    assert session.run(FEEDS)["y"].shape == (2, 4)


@pytest.mark.parametrize("hostile", ["run"], indirect=True)
def test_a_crash_of_a_model_that_is_run_for_exact_numbers(hostile: None) -> None:
    session = exact_engine().load(NET.SerializeToString())
    with pytest.raises(CrashedError, match="ONNX Runtime crashed"):
        session.run(FEEDS)


@pytest.mark.parametrize("executable", ["", "/nowhere/python", "/bin/true"])
def test_where_no_process_can_be_started(
    executable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    made = {name: _Library(name, name) for name in dry_run._workers}
    monkeypatch.setattr(dry_run, "_workers", made)
    session = get_engine(ENGINES[0]).load(NET.SerializeToString())
    assert session.run(FEEDS)["y"].shape == (2, 4)


@pytest.mark.parametrize("name", ENGINES)
def test_the_real_libraries_load_and_run_there(name: str) -> None:
    """What the other process is asked to do, it does: nothing is raised and ignored."""
    library = dry_run._workers[name]
    statuses: list[str] = []
    call = library.worker.call

    def listen(request: dict[str, str], *rest: Any) -> dry_run.Answer:
        header, result = call(request, *rest)
        statuses.append(header["status"])
        return header, result

    made = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 4] x, int64[n] i, bool[n, 1] c) => (float[n, 4] y)
{ z = Gather (x, i) y = Where (c, x, z) }"""
    )
    made.doc_string = name  # not tried before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library.worker, "call", listen)
        session = get_engine(name).load(made.SerializeToString())
        feeds = {"i": np.zeros(2, np.int64), "c": np.ones((2, 1), bool)}
        session.run(FEEDS | feeds)
    assert statuses == ["done", "done"]


def test_held_models_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run_worker, "_MOST_HELD_BYTES", 10)
    monkeypatch.setattr(dry_run_worker, "_LARGEST_HELD_BYTES", 20)
    monkeypatch.setitem(
        dry_run_worker._LIBRARIES, "openvino", lambda stage: lambda settings, model: print
    )
    served = dry_run_worker._Served("openvino")
    held: list[list[str]] = []
    for key, size in (("a", 6), ("b", 4), ("c", 1), ("d", 21), ("e", 11), ("f", 2)):
        served.load({"settings": {}, "key": key, "bytes": size}, b"")
        held.append(list(served.held))
    assert held == [
        ["a"],
        ["a", "b"],
        ["b", "c"],
        [],
        ["e"],
        ["f"],
    ]


def test_a_small_file_that_states_large_constants_counts_as_what_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two such models of .4 GB were in memory at once, with what an engine makes of them."""
    taken = iter([0, 1 << 29, 1 << 29, (1 << 29) + 1000, (1 << 29) + 1000, 1 << 30])
    monkeypatch.setattr(dry_run_worker, "resident_bytes", lambda: next(taken))
    monkeypatch.setitem(
        dry_run_worker._LIBRARIES, "openvino", lambda stage: lambda settings, model: print
    )
    served = dry_run_worker._Served("openvino")
    held: list[list[str]] = []
    for key in ("large", "small", "large too"):
        served.load({"settings": {}, "key": key, "bytes": 100}, b"")
        held.append(list(served.held))
    assert held == [["large"], ["small"], ["large too"]]


def test_one_model_is_held_where_the_process_has_many_mappings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        dry_run_worker._LIBRARIES, "openvino", lambda stage: lambda settings, model: print
    )
    served = dry_run_worker._Served("openvino")

    def held_after(key: str) -> list[str]:
        served.load({"settings": {}, "key": key, "bytes": 1}, b"")
        return [*served.held]

    assert held_after("a") == ["a"]
    assert held_after("b") == ["a", "b"]
    monkeypatch.setattr(dry_run_worker, "has_many_mappings", lambda: True)
    assert held_after("c") == ["c"]


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("most", [3, 256 << 20])
def test_a_large_model_in_memory_is_tried_from_a_file(
    name: str, external: bool, most: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its temporary file is gone when the model runs: the other process holds what it read."""
    path = tmp_path / "net.onnx"
    onnx.save(NET, path, save_as_external_data=external, size_threshold=0, location="w")
    monkeypatch.setattr(loading, "MOST_BYTES", most)
    model = frontend.load(path).model
    for engine in (get_engine(name), exact_engine()):
        session = load_model(engine, model)
        assert session.run(FEEDS)["y"].shape == (2, 4)
        # As if another model had ended the process: there is no file to read it from again.
        dry_run._workers[engine.name].worker.end()
        assert session.run({"x": np.ones((3, 4), np.float32)})["y"].shape == (3, 4)
    with crashing("compiled"), pytest.raises(CrashedError, match="SIGSEGV"):
        load_model(get_engine(name), model)


@pytest.mark.skipif(not installed("openvino"), reason="needs OpenVINO")
def test_a_large_model_of_openvinos_own_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    onnx.save(NET, tmp_path / "net.onnx")
    model = OpenVinoEngine()._core.read_model(tmp_path / "net.onnx")
    monkeypatch.setattr(openvino_model, "MOST_BYTES", 3)
    session = OpenVinoEngine().load(model)
    assert session.run(FEEDS)["y"].shape == (2, 4)
    with crashing("compiled"), pytest.raises(CrashedError, match="SIGSEGV"):
        OpenVinoEngine().load(model)
    with crashing("run"):
        session = OpenVinoEngine().load(model)
        with pytest.raises(CrashedError, match="SIGFPE"):
            session.run(FEEDS)


@pytest.mark.skipif(len(ENGINES) < 2, reason="needs two engines")
def test_the_next_engine_is_tried(tmp_path: Path) -> None:
    onnx.save(NET, tmp_path / "net.onnx")
    notes: list[str] = []
    crash = "OpenVINO crashed (SIGSEGV) as it compiled the model"
    with crashing("compiled", "openvino"):
        engines = [get_engine(name) for name in ENGINES]
        engine, _ = first_that_loads(engines, tmp_path / "net.onnx", notes)
        assert engine.name == "onnxruntime"
        assert notes == [f"{crash}: ONNX Runtime takes its place"]
        out = tmp_path / "low.onnx"
        done = finecast.convert(tmp_path / "net.onnx", out, "all:fp16")
    assert done.verified.engine == "onnxruntime"
    assert crash in f"{done.verified.note} {done.warnings}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["low.onnx", "net.onnx"]
    assert crashes({"a": CrashedError("it"), "b": EngineError("no")}) == ["it"]


@pytest.mark.skipif(not installed("openvino"), reason="needs OpenVINO")
@pytest.mark.parametrize("suffix", ["onnx", "xml"])
@pytest.mark.parametrize("make", [neural_ode, bare_convolution])
def test_what_crashes_openvino_is_one_line(
    make: Callable[[Path], Path], suffix: str, tmp_path: Path
) -> None:
    """In a process of its own, for it may crash. Later versions may take the ODE."""
    model = make(tmp_path / "m.onnx")
    command = [sys.executable, "-m", "finecast", "convert", str(model), "-o"]
    command += [str(tmp_path / f"low.{suffix}"), "--auto-cast", "all"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stderr
    if done.returncode:
        *progress, error = done.stderr.splitlines()  # a busy machine takes 10 s and more
        assert error.startswith("error: ")
        assert all(re.fullmatch(r"converting: .*, after \d+ s", line) for line in progress)
        assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    else:
        assert make is neural_ode


@pytest.mark.parametrize("name", ENGINES)
def test_a_run_that_never_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of 2^62 steps, which no engine would come back from."""
    endless = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
net (float[2, 4] x) => (float[2, 4] y) <int64 n = {4611686018427387904}, bool t = {1}>
{ y = Loop (n, t, x) <body = step (int64 i, bool c, float[2, 4] v) => (bool d, float[2, 4] w)
    { d = Identity (c) w = Sub (x, v) }> }"""
    )
    session = get_engine(name).load(endless.SerializeToString())
    monkeypatch.setattr(dry_run, "_MOST_SECONDS", 1.0)
    with pytest.raises(CrashedError, match="did not end in 1 s as it ran the model"):
        session.run(FEEDS)


@pytest.mark.skipif(not installed("openvino"), reason="needs OpenVINO")
@pytest.mark.parametrize("engine", [[], ["--engine", "openvino"]])
@pytest.mark.parametrize("verb", ["tune", "profile"])
def test_an_invalid_model_is_named_as_such_where_no_engine_runs_it(
    verb: str, engine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not by the words of engines, one of which crashes at it."""
    model = bare_convolution(tmp_path / "m.onnx")
    data = tmp_path / "x.npz"
    np.savez(data, x=np.zeros((2, 3, 8, 8), np.float32))
    tuning = ["-o", str(tmp_path / "t.onnx"), "--metric", "cosine"]
    options = ["--data", str(data), *(tuning if verb == "tune" else [])]
    assert main([verb, str(model), *options, *engine]) == ExitCode.FAILED
    assert "error: Conv has 1 inputs and 1 outputs" in capsys.readouterr().err


@pytest.mark.skipif(len(ENGINES) < 2, reason="needs two engines")
def test_tune_goes_on_in_the_next_engine(tmp_path: Path) -> None:
    model = neural_ode(tmp_path / "m.onnx")
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    command = [sys.executable, "-m", "finecast", "tune", str(model), "-o"]
    command += [
        str(tmp_path / "t.onnx"),
        "--data",
        str(tmp_path / "x.npz"),
        "--max-trials",
        "1",
    ]
    command += ["--metric", "snr_db", "--tolerance", "60"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert "Fatal" not in done.stderr


def test_a_model_is_another_one_with_other_weights_beside_it(tmp_path: Path) -> None:
    model, weights = tmp_path / "net.pdmodel", tmp_path / "net.pdiparams"
    model.write_bytes(b"ops")
    weights.write_bytes(b"1")
    run = DryRun(library="openvino", settings={}, model=model, data=[weights.name])
    first = run._identity(model)
    assert run._size(model) == 4
    weights.write_bytes(b"1.0")
    assert run._identity(model) != first


def test_a_kept_model_stays_when_another_one_like_it_goes() -> None:
    """Threads that convert one model have such sessions: one of them had no outputs."""
    one, other = _adders()
    assert other.run([("x", np.ones(1, np.float32), None)], fresh=True)[0] == 1
    del one
    assert other.run([("x", np.ones(1, np.float32), None)], fresh=True)[0] == 1


def test_kept_models_have_each_its_own_state() -> None:
    one, other = _adders()
    feeds = [("x", np.ones(1, np.float32), None)]
    sums = [kept.run(feeds, fresh=fresh)[0] for kept, fresh in (
        (one, True), (other, True), (one, False), (one, False), (other, False)
    )]  # fmt: skip
    assert sums == [1, 1, 2, 3, 2]


def _adders() -> list[Kept]:
    """A model of which the other process keeps two: it adds up what it is given."""
    import openvino
    from openvino import opset13 as op
    from openvino.op.util import Variable, VariableInfo

    make: Any = openvino.Model
    facts = VariableInfo()
    facts.data_shape, facts.data_type = openvino.PartialShape([1]), openvino.Type.f32
    facts.variable_id = "sum"
    variable, x = Variable(facts), op.parameter([1], np.float32, name="x")
    total = op.add(op.read_value(op.constant(np.zeros(1, np.float32)), variable), x)
    model = make([op.result(total)], [op.assign(total, variable)], [x])
    with staging() as folder:
        openvino.save_model(model, folder / "adder.xml", compress_to_fp16=False)
        settings = {"compile": {"INFERENCE_PRECISION_HINT": "f32"}, "device": "CPU"}
        runs = [
            DryRun(library="openvino", settings=settings, model=folder / "adder.xml").keep()
            for _ in range(2)
        ]
    return [kept for kept in runs if kept is not None]

"""Branches and loops that no sample of the data enters are found, and keep fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnx.reference
import pytest
from onnx import numpy_helper

import finecast
from finecast.engines.loading import exact_session
from finecast.frontends.native_model import runs_of, with_runs
from finecast.frontends.prepared import PreparedModel
from finecast.native.observing import unseen
from finecast.native.opening import opened
from finecast.numbers.formats import Format
from finecast.ops.bodies import body_owners
from finecast.rules.policy import Policy
from tests.frontends.tools import parse

RNG = np.random.default_rng(3)
WEIGHTS: Final = (RNG.normal(size=(16, 16)) / 4).astype(np.float32)
X: Final = RNG.normal(size=(8, 16)).astype(np.float32)
LARGE: Final = np.vstack([np.full((1, 16), 1500, np.float32), X[1:]])
BATCHES: Final = {"small": [{"x": X}], "both": [{"x": X}, {"x": LARGE}]}

# A square in fp16 overflows at 256. The names of the branches' values are the same.
BRANCHES: Final = """<
    then_branch = p () => (float[N, 16] r) {
      [mm] a = MatMul (h, w)
      [square] b = Mul (a, a)
      [root] r = Sqrt (b)
    },
    else_branch = q () => (float[N, 16] r) {
      [other] a = MatMul (h, w)
      [end] r = Neg (a)
    }>"""
LARGEST: Final = "largest = ReduceMax <keepdims = 0> (x) \n large = Greater (largest, limit)"
MODELS: Final = {
    "if": f"""g (float[N, 16] x) => (float[N, 16] y) {{
      {LARGEST}
      [before] h = MatMul (x, w)
      [branch] s = If (large) {BRANCHES}
      [after] y = MatMul (s, w)
    }}""",
    "loop": f"""g (float[N, 16] x) => (float[N, 16] y) {{
      {LARGEST}
      steps = Cast <to = 7> (large)
      [before] h = MatMul (x, w)
      [branch] s = Loop (steps, , h) <
        body = p (int64 i, bool c, float[N, 16] t) => (bool d, float[N, 16] r) {{
          d = Identity (c)
          [mm] a = MatMul (t, w)
          [square] b = Mul (a, a)
          [root] r = Sqrt (b)
        }}>
      [after] y = MatMul (s, w)
    }}""",
    "nested": f"""g (float[N, 16] x) => (float[N, 16] y) {{
      {LARGEST}
      [before] g = MatMul (x, w)
      [outer] s = Loop (three, , g) <
        body = b (int64 i, bool c, float[N, 16] t) => (bool d, float[N, 16] u) {{
          d = Identity (c)
          [inside] h = MatMul (t, w)
          [branch] u = If (large) {BRANCHES}
        }}>
      [after] y = MatMul (s, w)
    }}""",
    "scan": f"""g (float[N, 16] x) => (float[N, 16] y) {{
      {LARGEST}
      flag = Cast <to = 1> (large)
      rows = Unsqueeze (x, one)
      state, s = Scan <num_scan_inputs = 1, scan_output_axes = [0],
        body = b (float f, float[1, 16] t) => (float g, float[1, 16] u) {{
          g = Identity (f)
          [inside] h = MatMul (t, w)
          c = Cast <to = 9> (f)
          [branch] u = If (c) {BRANCHES}
        }}> (flag, rows)
      flat = Squeeze (s, one)
      [after] y = MatMul (flat, w)
    }}""",
}
ALL: Final = pytest.mark.parametrize("name", MODELS)


def saved(name: str, suffix: str, folder: Path) -> Path:
    path = folder / "net.onnx"
    model = parse(MODELS[name], opset=17)
    constants: dict[str, Any] = {"w": WEIGHTS, "limit": np.float32(20), "three": np.int64(3)}
    constants["one"] = np.array([1], np.int64)
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()
    )
    onnx.save(model, path)
    if suffix == ".xml":
        openvino: Any = pytest.importorskip("openvino")
        openvino.save_model(
            openvino.Core().read_model(path), folder / "net.xml", compress_to_fp16=False
        )
    return path.with_suffix(suffix)


@pytest.fixture(params=[".onnx", ".xml"])
def suffix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def prepared(path: Path) -> PreparedModel:
    model: Any = opened(path)
    return model.prepare(Policy.parse("none"))


def formats(plan: Any) -> dict[str, str]:
    """Formats of the products, by name, and those of the square."""
    return {d.node: d.format.label for d in plan.decisions if d.op in ("matmul", "mul")}


@ALL
def test_runs_of_bodies_are_counted(name: str, suffix: str, tmp_path: Path) -> None:
    model = prepared(saved(name, suffix, tmp_path))
    regions = {n.name: n.region for n in model.graph.nodes if n.region}
    session = exact_session(with_runs(model.roundable(), sorted({*regions.values()})))
    counts = {
        "if": {"mm": (0, 1), "other": (1, 0)},
        "loop": {"mm": (0, 1)},
        "nested": {"inside": (3, 3), "mm": (0, 3), "other": (3, 0)},
        "scan": {"inside": (8, 8), "mm": (0, 8), "other": (8, 0)},
    }
    for feeds, call in zip(({"x": X}, {"x": LARGE}), (0, 1), strict=True):
        runs = session.run(feeds)
        assert {n: runs[runs_of(regions[n])].item() for n in counts[name]} == {
            n: count[call] for n, count in counts[name].items()
        }


@ALL
def test_what_no_batch_runs_is_unseen(name: str, suffix: str, tmp_path: Path) -> None:
    model = prepared(saved(name, suffix, tmp_path))
    graph = model.graph
    facts = unseen(model, lambda: BATCHES["small"])
    names = {graph.nodes[graph.values[i].producer or 0].name for i in facts}
    assert {"mm", "square"} <= names
    assert not names & {"before", "inside", "other", "after"}
    assert {f.count for f in facts.values()} == {0}
    owners = {body_owners(graph)[n.region].name for n in graph.nodes if n.name in names}
    assert len(owners) == 1
    assert unseen(model, lambda: BATCHES["both"]) == {}


@pytest.mark.parametrize(
    ("name", "low"), [("if", "fp16"), ("if", "bf16"), ("loop", "fp16"), ("nested", "fp16")]
)
def test_a_conversion_on_data_keeps_it_in_fp32(
    name: str, low: str, suffix: str, tmp_path: Path
) -> None:
    path, data = saved(name, suffix, tmp_path), tmp_path / "data.npz"
    np.savez(data, x=X)
    done = finecast.convert(path, policy=f"all:{low}", data=data, verify=False)
    found = formats(done.plan)
    assert {found.pop("mm"), found.pop("square")} == {"fp32"}
    # What the branch gives may be beyond fp16, and what reads it would cast it.
    readers = {"after", "y"} | ({"inside"} if name == "nested" else set[str]())
    beside = {node: found.pop(node) for node in readers & found.keys()}
    assert set(beside.values()) == {"bf16" if low == "bf16" else "fp32"}
    assert set(found.values()) == {low}
    (said,) = (text for text in done.warnings if "no sample" in text)
    assert said.startswith("'mm', 'square', ")
    assert said.endswith(" keep fp32: no sample of the data runs them")
    np.savez(data, x=np.vstack([X, LARGE]))
    done = finecast.convert(path, policy=f"all:{low}", data=data, verify=False)
    assert formats(done.plan)["mm"] == low
    assert not any("'mm'" in text for text in done.warnings)


def test_without_data_the_policy_stands(tmp_path: Path) -> None:
    done = finecast.convert(saved("if", ".onnx", tmp_path), policy="all:bf16", verify=False)
    assert formats(done.plan)["square"] == "bf16"


def test_the_numbers_of_other_data_are_finite(tmp_path: Path) -> None:
    path, data = saved("if", ".onnx", tmp_path), tmp_path / "data.npz"
    np.savez(data, x=X)
    low = tmp_path / "low.onnx"
    finecast.convert(path, low, "all:fp16", data=data, engine="onnxruntime")
    runs: list[Any] = [onnx.reference.ReferenceEvaluator(onnx.load(p)) for p in (path, low)]
    exact, got = (run.run(None, {"x": LARGE})[0] for run in runs)
    assert np.abs(got - exact).max() < 0.01 * np.abs(exact).max()


def test_what_the_user_forces_is_named(tmp_path: Path) -> None:
    path, data = saved("if", ".onnx", tmp_path), tmp_path / "data.npz"
    np.savez(data, x=X)
    policy = Policy("all:fp16", op_formats={"Mul": Format.FP16})
    done = finecast.convert(path, policy=policy, data=data, verify=False)
    assert formats(done.plan)["square"] == "fp16"
    assert (
        "'square' is in fp16, as was asked, and no sample of the data runs it: the error on"
        " data that do is not known"
    ) in done.warnings


def test_weights_in_eight_bits_stay(tmp_path: Path) -> None:
    path, data = saved("if", ".xml", tmp_path), tmp_path / "data.npz"
    np.savez(data, x=X)
    done = finecast.convert(
        path, policy="all:int8_weights", data=data, verify=False, engine="openvino"
    )
    assert formats(done.plan)["mm"] == "int8_weights"
    assert not any("no sample" in text for text in done.warnings)


def test_a_search_and_an_explanation_keep_it_in_fp32(tmp_path: Path) -> None:
    path, data = saved("nested", ".onnx", tmp_path), tmp_path / "data.npz"
    np.savez(data, x=X)
    told = finecast.explain(path, "square", policy="all:fp16", data=data)
    assert told.why == "no sample of the data runs it"
    assert ("unseen", "fp32", told.why, "body of branch") in told.verdicts
    result = finecast.tune(path, tmp_path / "low.onnx", data=data, target="trn1")
    assert any("'mm'" in text and "no sample" in text for text in result.warnings)


@pytest.mark.parametrize("name", ["if", "loop", "nested"])
def test_blame_names_the_low_ops_within_a_body(name: str, tmp_path: Path) -> None:
    """An If or Loop computes in no format: what is low is in the body that the data runs."""
    path, low = saved(name, ".onnx", tmp_path), tmp_path / "low.onnx"
    outside = "before|after|branch/phi.*|outer/phi.*|other|end|inside"
    policy = Policy("all:fp16", exclude=(outside,))
    finecast.convert(path, low, policy=policy, verify=False)
    told = finecast.blame(path, low, data={"x": LARGE})
    (culprit,) = told.culprits
    assert culprit.node == {"nested": "outer"}.get(name, "branch")
    assert culprit.format == "fp16"
    assert culprit.within == ("mm", "square", "root")
    assert culprit.reasons[0] == "ops in reduced precision in its bodies: mm, square, root"
    assert told.first is not None
    assert told.first.node == culprit.node
    assert "mm|square|root" in told.keep
    assert told.largest_shares == {culprit.node: 1.0}


def test_blame_reads_ir_with_bodies_in_reduced_precision(tmp_path: Path) -> None:
    path, low = saved("if", ".xml", tmp_path), tmp_path / "low.xml"
    finecast.convert(path, low, "all:fp16", verify=False)
    told = finecast.blame(path, low, data={"x": X})
    assert told.passed
    assert not any("without a partner" in text for text in told.warnings)

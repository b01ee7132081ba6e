"""int8 in OpenVINO: from data to a model whose kernels run on integers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from finecast import api
from finecast.data.function_workload import FunctionWorkload
from finecast.engines.base import Feeds, KernelFormats, KernelTime
from finecast.engines.integers import not_as_planned
from finecast.engines.openvino import OpenVinoEngine
from finecast.errors import EngineError, UsageError
from finecast.frontends import onnx as frontend
from finecast.native import engine_subject, integers
from finecast.native.integers import (
    check_on_integers,
    drop_unfit,
    quantized_mismatch,
    unfused,
)
from finecast.native.observing import observe
from finecast.native.onnx import OnnxModel
from finecast.numbers.encodings import Scaled
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.progress import silent
from finecast.rules import Context, permit
from finecast.rules.policy import Policy
from finecast.rules.ranges import Calibration
from tests.graph.text import from_text
from tests.kernels import skip_without_int8
from tests.native.drawn import write_drawn

INT8 = Format.INT8
# A convolution, a residual block, a pool that only moves, and a classifier with its softmax.
NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 3, 16, 16] x) => (float[n, 10] y)
<int64[2] flat = {-1, 1024}> {
  [stem] a = Conv <pads = [1, 1, 1, 1]> (x, w0, b0)
  [act] r = Relu (a)
  [one] c = Conv <pads = [1, 1, 1, 1]> (r, w1, b1)
  [act1] d = Relu (c)
  [two] e = Conv <pads = [1, 1, 1, 1]> (d, w2, b2)
  [join] f = Add (e, r)
  [act2] g = Relu (f)
  [pool] h = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (g)
  [flatten] i = Reshape (h, flat)
  [head] k = MatMul (i, w3)
  [bias] l = Add (k, b3)
  [soft] y = Softmax (l)
}"""
SHAPES = {
    "w0": (16, 3, 3, 3),
    "b0": (16,),
    "w1": (16, 16, 3, 3),
    "b1": (16,),
    "w2": (16, 16, 3, 3),
    "b2": (16,),
    "w3": (1024, 10),
    "b3": (10,),
}
X = np.random.default_rng(0).standard_normal((24, 3, 16, 16)).astype(np.float32)
DATA = {"x": X}
CODED = ["head", "join", "one", "stem", "two"]


@pytest.fixture(scope="module")
def openvino() -> OpenVinoEngine:
    skip_without_int8()
    return OpenVinoEngine()


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return write_drawn(tmp_path / "net.onnx", NET, SHAPES)


def coded(plan: object) -> list[str]:
    formats: dict[str, Format] = getattr(plan, "formats")  # noqa: B009
    return sorted(name for name, fmt in formats.items() if fmt is INT8)


def kinds(path: Path) -> list[str]:
    return sorted(n.op_type for n in onnx.load(path).graph.node)


def run(path: Path) -> NDArray[np.float32]:
    return OpenVinoEngine().load(path).run(DATA)["y"].astype(np.float32)


def test_all_that_runs_on_integers_is_put_there(net: Path, openvino: OpenVinoEngine) -> None:
    out = net.with_name("low.onnx")
    done = api.convert(net, out, "all:int8", data=DATA, engine="openvino")
    assert coded(done.plan) == CODED
    applied = frontend.apply(frontend.load(net), done.plan)
    assert unfused(openvino, done.plan, applied, DATA) == {}
    assert 0 < np.linalg.norm(run(out) - run(net)) / np.linalg.norm(run(net)) < 0.1
    made = kinds(out)
    # x, r (for `one` and `join`), d, e (inside the block) and g (before the pool): once each.
    assert made.count("QuantizeLinear") == 5
    assert made.count("DequantizeLinear") == 5 + 4
    weights = {t.name: numpy_helper.to_array(t) for t in onnx.load(out).graph.initializer}
    assert weights["w1_int8"].dtype == np.int8
    assert np.abs(weights["w1_int8"].astype(int)).max() == 127
    assert weights["b1"].dtype == np.float32


def test_what_the_pool_moves_is_coded_before_it(net: Path, openvino: OpenVinoEngine) -> None:
    out = net.with_name("low.onnx")
    api.convert(net, out, "all:int8", data=DATA, engine="openvino")
    nodes = {n.name: n for n in onnx.load(out).graph.node}
    assert nodes["pool"].input[0] == "g_int8_fp32"
    assert nodes["head"].input[0] == "i"


def test_the_matmult_scope_leaves_the_addition(net: Path, openvino: OpenVinoEngine) -> None:
    done = api.convert(net, None, "matmult:int8", data=DATA, engine="openvino")
    assert coded(done.plan) == [name for name in CODED if name != "join"]


def test_ops_of_a_second_format_take_it(net: Path, openvino: OpenVinoEngine) -> None:
    done = api.convert(net, None, "all:int8,bf16", data=DATA, engine="openvino")
    assert coded(done.plan) == CODED
    assert done.plan.formats["soft"] is Format.BF16


def test_the_user_s_word_counts(net: Path, openvino: OpenVinoEngine) -> None:
    import re

    base = Policy.parse("all:int8")
    kept = replace(base, exclude=(re.compile("head"),))
    done = api.convert(net, None, kept, data=DATA, engine="openvino")
    assert coded(done.plan) == [name for name in CODED if name != "head"]
    forced = replace(base, op_formats={"Conv": Format.FP32})
    done = api.convert(net, None, forced, data=DATA, engine="openvino")
    assert not {"stem", "one", "two"} & {*coded(done.plan)}


def test_every_op_that_is_not_coded_says_why(net: Path, openvino: OpenVinoEngine) -> None:
    plan = api.explain(net, policy="all:int8", data=DATA, engine="openvino").plan
    said = {d.node: "; ".join(r.text for r in d.reasons) for d in plan.decisions}
    assert "no engine here runs softmax on integers" in said["soft"]
    assert "it adds a constant" in said["bias"]
    plan = api.explain(net, policy="all:int8", engine="openvino").plan
    reasons = "; ".join(r.text for r in plan.reasons)
    assert "x has no int8 scale: nothing was observed of it" in reasons


def test_data_that_shows_no_range_is_said(net: Path, openvino: OpenVinoEngine) -> None:
    """By the verbs themselves: fp32 is kept where a user asked for int8."""
    spoilt = X.copy()
    spoilt[3, 0, 0, 0] = np.inf
    done = api.convert(
        net, net.with_name("low.onnx"), "all:int8", data={"x": spoilt}, engine="openvino",
        verify=False,
    )  # fmt: skip
    (said,) = (w for w in done.warnings if w.startswith("x has no int8 scale, "))
    assert "NaN or Inf was observed" in said
    assert said.endswith("ops that read it keep fp32; and 4 more of the kind")


def test_data_of_good_numbers_is_not_remarked_on(net: Path, openvino: OpenVinoEngine) -> None:
    done = api.convert(
        net, net.with_name("low.onnx"), "all:int8", data=DATA, engine="openvino"
    )
    assert not [w for w in done.warnings if "scale" in w]


def test_what_came_quantized_is_said_to_be(net: Path, openvino: OpenVinoEngine) -> None:
    """A model of another tool has no marks of finecast's."""
    low, other = net.with_name("low.onnx"), net.with_name("other.onnx")
    api.convert(net, low, "all:int8", data=DATA, engine="openvino")
    moved = 2  # by the pool and the reshape behind it, which move codes
    assert types(low) == {"int8": len(CODED) + moved, "fp32": 5}
    made = onnx.load(low)
    for entry in (made, *made.graph.node):
        del entry.metadata_props[:]
    onnx.save(made, other)
    assert types(other)["quantized"] >= len(CODED)
    for policy in ("all:bf16", "none:bf16"):
        done = api.convert(other, net.with_name("again.onnx"), policy, data=DATA, force=True)
        assert [w for w in done.warnings if "ops came quantized by another tool" in w]
        assert kinds(net.with_name("again.onnx")).count("QuantizeLinear") == 5
    assert not [w for w in api.convert(net, None, "all:bf16").warnings if "quantized" in w]


def types(path: Path) -> dict[str, int]:
    """Of the ops that stand for the net's own, by what ``inspect`` says they compute in."""
    counts = Counter[str]()
    for row in api.inspect(path).classes:
        if row.kind != "quantize":
            counts.update(row.types)
    return dict(counts)


def test_a_plan_is_replayed(net: Path, openvino: OpenVinoEngine) -> None:
    out, again = (net.with_name(f"{n}.onnx") for n in ("low", "again"))
    done = api.convert(net, out, "all:int8", data=DATA, engine="openvino")
    api.apply(type(done.plan).from_json(done.plan.to_json()), net, again, engine="openvino")
    assert np.array_equal(run(again), run(out))
    assert kinds(again) == kinds(out)


def test_random_inputs_of_a_replayed_plan_are_within_its_scales(net: Path) -> None:
    """Standard normal ones saturated: "96.7%, no digit of it is right" of a good plan."""
    skip_without_int8()
    x = np.random.default_rng(1).uniform(0, 0.1, (8, 3, 16, 16)).astype(np.float32)
    out, again = (net.with_name(f"{n}.onnx") for n in ("small", "small_again"))
    done = api.convert(net, out, "all:int8", data={"x": x}, engine="openvino")
    applied = api.apply(done.plan, net, again, engine="openvino")
    assert applied.verified.random
    assert applied.verified.relative_error is not None
    assert applied.verified.relative_error < 0.01


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "int8 needs the ranges of the model's values, and there is no data"),
        ({"target": "sm80"}, "int8 needs the ranges of the model's values"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], says: str, net: Path) -> None:
    if not options:
        skip_without_int8()  # on such a CPU int8 itself is refused first
    with pytest.raises(UsageError, match=says):
        api.convert(net, None, "all:int8", **options)  # pyright: ignore[reportArgumentType]


def test_the_tuner_predicts_what_int8_does(net: Path, openvino: OpenVinoEngine) -> None:
    found = api.tune(
        net,
        None,
        data=DATA,
        metric="cosine",
        policy="auto:int8",
        engine="openvino",
        objective="size",
        tolerance=0.5,
    )
    assert found.improved
    assert coded(found.plan)
    # Of one sample that was probed, and of those that were timed.
    assert 0.25 < found.predicted_error / found.measured_error < 4
    # Squared errors of weights alone and of activations alone about add up.
    parts = found.predicted_parts
    assert {*parts} == {"weights", "activations"}
    assert all(0 < one <= found.predicted_error for one in parts.values())
    assert math.hypot(*parts.values()) == pytest.approx(found.predicted_error, rel=0.3)

    # The types are told as the kernels ran them, too.
    rows = {row.node: row for row in found.ops}
    in_codes = [rows[name] for name in coded(found.plan)]
    assert {row.ran for row in in_codes} <= {"int8", "uint8"}
    assert all(row.ms for row in in_codes)
    told = found.to_dict()["ran"]
    assert told == {name: row.ran for name, row in rows.items() if row.ran is not None}


# ------------------------------------------------------- plans against kernels that ran


def kernel(format: str, *ops: str) -> KernelTime:  # noqa: A002
    return KernelTime(kernel="k", kind="Convolution", ops=ops, format=format, time_s=1.0)


def test_an_op_ran_on_integers_if_one_of_its_kernels_did() -> None:
    kernels = [kernel("uint8", "a", "b"), kernel("fp32", "b", "c"), kernel("bf16", "c")]
    planned = dict.fromkeys("abcd", INT8)
    assert not_as_planned(kernels, planned) == {"c": "bf16 and fp32"}


@dataclass
class FusesSome:
    """An engine that runs only the ops ``fused`` on integers, and ``two`` beside ``one``."""

    fused: set[str]
    name: str = "openvino"
    title: str = "OpenVINO"
    device: str = "CPU"
    lowers_by_hint: bool = False
    inputs: Sequence[object] = ()

    def load(self, model: Path | bytes, *, profiling: bool = False) -> FusesSome:
        assert profiling
        assert isinstance(model, bytes)
        read = {v for n in onnx.load_from_string(model).graph.node for v in n.input}
        self.codes_for_one = any(v.startswith("r_int8") for v in read)
        return self

    def profile(self, feeds: Feeds, *, repeats: int = 5) -> list[KernelTime]:
        fused = self.fused - (set[str]() if self.codes_for_one else {"two"})
        return [kernel("uint8" if name in fused else "fp32", name) for name in CODED]

    def kernel_formats(self) -> Sequence[KernelFormats]:
        return ()


def planner(net: Path) -> Planner:
    policy = Policy.parse("all:int8")
    prepared = frontend.prepare(frontend.load(net), policy)
    context = Context(
        graph=prepared.graph,
        policy=policy,
        facts=observe(prepared, lambda: [DATA]),
        casts_around=frozenset({INT8}),
    )
    return Planner(
        graph=prepared.graph, policy=policy, permissions=permit(context), engine="openvino"
    )


def test_ops_that_the_engine_does_not_fuse_keep_fp32_and_say_so(net: Path) -> None:
    # Without `one` and `join` nothing reads codes of r, and then `two` is not fused either.
    engine = FusesSome(fused={"stem", "two", "head"})
    asked = replace(planner(net), opset=lambda _: 17)
    found = drop_unfit(OnnxModel(file=frontend.load(net)), asked, engine, DATA)  # pyright: ignore[reportArgumentType]
    plan = found.lowest(INT8)
    assert coded(plan) == ["head", "stem"]
    (reason,) = (
        r for d in plan.decisions if d.node == "one" for r in d.reasons if r.rule == "kernel"
    )
    assert reason.text == "planned in int8, OpenVINO runs it in fp32 all the same"
    before = asked.lowest(INT8)
    applied = frontend.apply(frontend.load(net), before)
    with pytest.raises(EngineError, match="is planned in int8 and OpenVINO runs it in fp32"):
        check_on_integers(engine, before, applied, DATA)  # pyright: ignore[reportArgumentType]
    assert integers.unfused(engine, found.highest(), applied, DATA) == {}  # pyright: ignore[reportArgumentType]


def test_a_port_is_not_int8(net: Path, openvino: OpenVinoEngine) -> None:
    policy = replace(Policy.parse("all:int8"), io={"x": INT8})
    with pytest.raises(UsageError, match="ONNX has no type int8 that 'x'"):
        api.convert(net, None, policy, data=DATA, engine="openvino")


def test_of_what_the_rules_permit_and_time_leaves_that_is_said(
    net: Path, openvino: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slower(planner: Planner, _analysis: object) -> Plan:
        return planner.highest()

    monkeypatch.setattr("finecast.native.conversion.fastest_plan", slower)
    done = api.convert(net, None, "auto:int8", data=DATA, engine="openvino")
    assert any("of the ops that the rules permit none gains" in w for w in done.warnings)
    nothing = replace(Policy.parse("auto:int8"), exclude=(re.compile(""),))
    done = api.convert(net, None, nothing, data=DATA, engine="openvino")
    assert any("the rules leave every op in its type" in w for w in done.warnings)


def test_a_calibration_narrows_ranges_and_the_model_has_them(
    net: Path, openvino: OpenVinoEngine
) -> None:
    """A pixel far beyond all others: by its share it is left out."""
    data = X.copy()
    data[0, 0, 0, 0] = 1000.0
    scales: dict[Calibration, float] = {}
    for calibration in set(Calibration) - {Calibration.GPTQ}:  # that is for groups
        policy = replace(Policy.parse("all:int8"), calibration=calibration)
        done = api.convert(
            net, None, policy, data={"x": data}, engine="openvino", verify=False
        )
        encodings = done.plan.encodings["stem"].operands[0]
        assert isinstance(encodings, Scaled)
        scales[calibration] = encodings.scale[0]
    assert scales[Calibration.MINMAX] == pytest.approx(1000 / 255, rel=0.02)
    assert scales[Calibration.PERCENTILE] < 0.05
    assert scales[Calibration.MSE] <= scales[Calibration.MINMAX]


def test_one_output_that_is_computed_otherwise_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others may be right: those of a part that no kernel on integers runs."""
    monkeypatch.setattr(integers, "quantized_notes", lambda _: ("q",))
    exact = {name: np.ones(4, np.float32) for name in ("right", "wrong")}
    got = exact | {"wrong": np.full(4, 1.5, np.float32)}
    graph = from_text("")
    assert quantized_mismatch(graph, "openvino", exact, lambda: exact) == ""
    told = quantized_mismatch(graph, "openvino", got, lambda: exact)
    assert "OpenVINO computes the quantized model otherwise" in told
    assert "relative error 0.5" in told


@pytest.mark.parametrize(
    ("lost", "minor", "alone"),
    [
        (0.1, 0.0, False),  # all together lose little
        (0.9, 0.9, False),  # they keep what may be lost, and err less than int8 does
        (0.9, 0.0, True),
        (1.1, 0.9, True),
        (None, 0.9, True),
    ],
)
def test_ops_of_a_minor_format_are_not_probed_one_by_one(
    net: Path,
    openvino: OpenVinoEngine,
    lost: float | None,
    minor: float,
    alone: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    del openvino  # skips where int8 is not fast
    monkeypatch.setattr(engine_subject, "_MINOR", minor)
    subject = api.load(str(net)).subject("openvino", None)
    workload = FunctionWorkload(
        function=lambda run: 0.0, name="", calibrate=lambda: [DATA], remembered=[DATA]
    )
    examined = subject.examine(Policy.parse("auto:int8,bf16"), (), workload, silent)
    shares = {} if lost is None else {Format.BF16: lost}
    found = examined.analysis(of_time=False, lost=shares).rounded
    assert (len({*found[Format.BF16].errors}) > 1) is alone
    assert len({*found[INT8].errors}) > 1
    assert any("not measured one by one" in note for note in subject.told) is not alone

"""What differs, by op: types, reasons, times, weights; what is new, gone or restated."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

import finecast
from finecast.diagnosis.difference import Change, Difference, Side, difference
from finecast.errors import UsageError
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.rules.base import DECIDED_BY, DECISION, Reason
from tests.kernels import state_kernels
from tests.planning.nets import drawn, prepared
from tests.planning.test_placing import AGAIN, LOW, NET, graph_of


def between(a: Plan, b: Plan) -> Difference:
    return difference(Side.of_plan(a, "a"), Side.of_plan(b, "b"))


def with_reason(plan: Plan, node: str, *reasons: Reason, fmt: Format | None = None) -> Plan:
    return replace(
        plan,
        decisions=tuple(
            replace(d, reasons=reasons, format=fmt or d.format) if d.node == node else d
            for d in plan.decisions
        ),
    )


def chosen(us: float, **evidence: float | str) -> Reason:
    return Reason(
        rule=DECISION,
        text="it is fast",
        permits=("bf16",),
        evidence={"bf16 us": us, **evidence},
    )


def by_casts() -> Reason:
    """The same choice in other words, as casts decided it in another run."""
    reason = chosen(1.0, **{DECIDED_BY: "casts"})
    return replace(reason, text="low like the ops around it")


KERNEL = Reason(rule="kernel", text="no kernel", permits=("fp32",))


def test_equal_plans_do_not_differ() -> None:
    found = between(LOW, LOW)
    assert not found.changed
    assert found.matched_share == 1.0
    assert "nothing differs" in repr(found)


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ((KERNEL, Format.FP32), (chosen(1.0), Format.BF16), {Change.TYPE, Change.LOST}),
        ((KERNEL, Format.FP32), (replace(KERNEL, rule="names"), Format.FP32), {Change.LOST}),
        ((chosen(1.0), Format.BF16), (chosen(1.2), Format.BF16), set()),
        ((chosen(1.0), Format.BF16), (by_casts(), Format.BF16), set()),
        ((chosen(1.0), Format.BF16), (chosen(2.0), Format.BF16), {Change.TIME}),
        (
            (chosen(1.0, **{"error if bf16": 1e-3}), Format.BF16),
            (chosen(1.0, **{"error if bf16": 1e-2}), Format.BF16),
            {Change.ERROR},
        ),
    ],
)
def test_what_changed_of_an_op(
    before: tuple[Reason, Format], after: tuple[Reason, Format], change: set[Change]
) -> None:
    plans = (with_reason(LOW, "first", one, fmt=fmt) for one, fmt in (before, after))
    found = between(*plans)
    assert {c for one in found.changed for c in one.changes} == change


def test_models_of_other_names_and_weights() -> None:
    sides = (Side.of_graph(graph_of(*of), "m") for of in ((NET, 0), (AGAIN, 1)))
    found = difference(*sides)
    assert found.renamed == 4
    assert {one.shown.node for one in found.ops if Change.NEW in one.changes} == {"n2", "n4"}
    assert found.count(Change.WEIGHTS) == 2
    assert found.count(Change.GONE) == 0
    assert found.matched_share == pytest.approx(4 / 6)


def test_what_is_computed_at_load_does_not_count() -> None:
    """One exporter folds a table, the other computes it of constants."""
    computed = NET.replace(
        "[between] b = Relu(a)", "[t] t = Exp(r)\n  [between] b = Mul(a, t)"
    )
    folded = NET.replace("[between] b = Relu(a)", "[between] b = Mul(a, r)")
    weights, table = drawn(0, v=(4, 5), w=(5, 3)), drawn(1, r=())
    graphs = (
        prepared(computed, weights | table).graph,
        prepared(folded, weights | {"r": np.exp(table["r"])}).graph,
    )
    found = difference(*(Side.of_graph(g, "m") for g in graphs))
    assert not [one.shown.node for one in found.ops if Change.GONE in one.changes]
    assert found.matched_share == 1.0


def test_an_op_that_is_written_as_others() -> None:
    gelu = NET.replace("[between] b = Relu(a)", "[between] b = Gelu(a)").replace(
        ": 17", ": 20"
    )
    steps = """[s1] q = Div(a, r)
  [s2] e = Erf(q)
  [s3] f = Add(e, one)
  [s4] b = Mul(a, f)"""
    restated = NET.replace("[between] b = Relu(a)", steps)
    constants = {**drawn(0, v=(4, 5), w=(5, 3)), **drawn(1, r=(), one=())}
    graphs = (prepared(text, constants, opset=20).graph for text in (gelu, restated))
    found = difference(*(Side.of_graph(g, "m") for g in graphs))
    changed = {one.shown.node: one.changes for one in found.changed}
    assert changed == dict.fromkeys(("s1", "s2", "s3", "s4"), (Change.RESTATED,))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    """The digits, and the same with other names of its nodes."""
    source = Path("examples/digits/digits.onnx")
    model = onnx.load(source)
    for number, node in enumerate(model.graph.node):
        node.name = f"op_{number}"
    onnx.save(model, tmp_path / "again.onnx")
    return source, tmp_path / "again.onnx"


def test_a_plan_and_a_new_version_of_its_model(
    saved: tuple[Path, Path], tmp_path: Path
) -> None:
    source, again = saved
    low = tmp_path / "low.onnx"
    made = finecast.convert(source, low, policy="all:bf16", verify=False, progress=False)
    path = tmp_path / "low.plan"  # by its content it is no model
    path.write_text(made.plan.to_json())
    found = finecast.diff(path, again)
    assert found.placement is not None
    assert found.placement.share == 1.0
    assert found.renamed == len(found.ops)
    assert not found.changed
    applied = finecast.apply(path, again, tmp_path / "again_low.onnx", verify=False)
    assert applied.counts == made.counts
    assert "of this model, read from elsewhere" in applied.warnings[0]
    types = finecast.diff(source, low)
    assert types.count(Change.TYPE) == made.counts["bf16"]
    assert types.count(Change.NEW) == made.casts  # they are ops of the low model
    content = json.loads(json.dumps(types.to_dict(), allow_nan=False))
    assert content["counts"]["type"] == made.counts["bf16"]


def test_ops_between_codes_have_their_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model on int8 states float ops between nodes that quantize: no type tells."""
    state_kernels(monkeypatch, "openvino", {Format.INT8: True})  # it is not run
    source, low = Path("examples/digits/digits.onnx"), tmp_path / "low.onnx"
    with np.load("examples/digits/digits_calib.npz") as data:
        given = {"image": data["image"][:8]}
    made = finecast.convert(source, low, policy="all:int8", data=given, verify=False)
    found = finecast.diff(source, low)
    planned = {n for n, fmt in made.plan.formats.items() if fmt is Format.INT8}
    types = {one.shown.node: one.types for one in found.changed}
    assert len(planned) > 9
    assert {types.get(node) for node in planned} == {"fp32 -> int8"}


def test_what_is_neither_plan_nor_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text("{}")
    with pytest.raises(UsageError, match="not a finecast plan"):
        finecast.diff(tmp_path / "data.json", "examples/digits/digits.onnx")


WEIGHT = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
LARGE = np.abs(WEIGHT) > np.quantile(np.abs(WEIGHT), 0.8)
OTHER_WEIGHTS = {
    "pruned": (np.where(LARGE, WEIGHT, 0), False),
    "negated": (-WEIGHT, False),
    "shuffled": (np.random.default_rng(1).permutation(WEIGHT.ravel()).reshape(8, 8), True),
    "reversed": (np.ascontiguousarray(WEIGHT[::-1]), True),
    "transposed": (np.ascontiguousarray(WEIGHT.T), True),
}
# How a model states its weights: as they are, or behind an op.
STATED: dict[str, tuple[str, Callable[[NDArray[Any]], NDArray[Any]]]] = {
    "initializer": ("[m] y = MatMul(x, w)", lambda w: w),
    "of fp16": (
        "[c] v = Cast<to = 1>(w)\n[m] y = MatMul(x, v)",
        lambda w: w.astype(np.float16),
    ),
    "transposed": ("[t] v = Transpose(w)\n[m] y = MatMul(x, v)", lambda w: w),
    "in a table": ("[g] v = Gather(w, x0)\n[m] y = Add(x, v)", lambda w: w),
    "by an index": ("[g] v = Gather(x, w)\n[m] y = Add(x, v)", lambda w: np.argsort(w[0])),
    "of int8": (
        "[d] v = DequantizeLinear(w, s)\n[m] y = MatMul(x, v)",
        lambda w: np.rint(w * 40).astype(np.int8),
    ),
}


def net_of(weight: NDArray[Any], way: str, path: Path, *, external: bool = False) -> Path:
    text, store = STATED[way]
    constants = {
        "w": store(weight),
        "x0": np.arange(8),
        "s": np.array(0.025, np.float32),
    }
    ports = "net (float[8,8] x) => (float[8,8] y)"
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 20]> {ports} {{{text}}}'
    )
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(array, name)
        for name, array in constants.items()
        if any(name in node.input for node in model.graph.node)
    )
    onnx.save(model, path, save_as_external_data=external, size_threshold=0)
    return path


@pytest.mark.parametrize("external", [False, True], ids=["in the file", "in data"])
@pytest.mark.parametrize("way", STATED)
@pytest.mark.parametrize("name", OTHER_WEIGHTS)
def test_other_weights_are_seen(tmp_path: Path, name: str, way: str, external: bool) -> None:
    other, reordered = OTHER_WEIGHTS[name]
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
    before = net_of(WEIGHT, way, tmp_path / "before" / "m.onnx", external=external)
    after = net_of(other, way, tmp_path / "after" / "m.onnx", external=external)
    found = finecast.diff(before, after)
    (changed,) = found.changed
    assert changed.changes == (Change.WEIGHTS,)
    assert "weights differ by" in repr(found)
    assert (
        changed.weights
        == pytest.approx(np.linalg.norm(WEIGHT - other) / np.linalg.norm(WEIGHT), rel=0.05)
        or way == "by an index"
    )
    assert changed.reordered is (reordered or way == "by an index")
    assert found.to_dict()["ops"][0]["weights_relative_difference"] == changed.weights
    same = net_of(WEIGHT, way, tmp_path / "after" / "same.onnx", external=external)
    assert "nothing differs" in repr(finecast.diff(before, same))


@pytest.mark.parametrize("name", OTHER_WEIGHTS)
def test_a_plan_is_not_of_a_model_with_other_weights(tmp_path: Path, name: str) -> None:
    before = net_of(WEIGHT, "initializer", tmp_path / "before.onnx")
    after = net_of(OTHER_WEIGHTS[name][0], "initializer", tmp_path / "after.onnx")
    plan = finecast.convert(
        before, tmp_path / "low.onnx", policy="all:bf16", verify=False
    ).plan
    found = finecast.diff(plan, after)
    assert found.count(Change.WEIGHTS) == 1
    assert found.placement is not None
    assert "of another version of the model" in found.placement.note
    assert "with other weights, attributes or inputs: 1 (m)" in found.placement.note


def test_a_plan_is_not_of_a_model_with_another_op(tmp_path: Path) -> None:
    source = Path("examples/digits/digits.onnx")
    plan = finecast.convert(source, policy="all:bf16", verify=False).plan
    model = onnx.load(source)
    replaced = next(node for node in model.graph.node if node.op_type == "Relu")
    replaced.op_type = "Tanh"
    onnx.save(model, tmp_path / "other.onnx")
    applied = finecast.apply(plan, tmp_path / "other.onnx", verify=False)
    (told,) = applied.warnings
    assert "of another version of the model" in told
    assert f"written as other ops: 1 ({replaced.name})" in told


WIRED = """
<ir_version: 9, opset_import: ["" : 20, "own" : 1]>
net (float[4,8] x, float[4,8] z) => (float[4,8] y, float[4,8] other)
<float[8,8] w = {W}, float[8,8] v = {W}> {
  [first] a = MatMul(x, w)
  [act] b = Relu(a)
  [second] c = MatMul(b, v)
  [last] d = Sigmoid(c)
  [residual] e = Sub(d, b)
  [halves] f, g = Split<axis = 1, num_outputs = 2>(e)
  [gate] h = Sub(f, g)
  [both] y = Concat<axis = 1>(h, h)
  [own] other = own.Step(b, z)
}
<domain: "own", opset_import: ["" : 20]> Step (p, q) => (r) {
  [inner] s = Tanh(p)
  [difference] r = Sub(s, q)
}
"""


def wired(path: Path, old: str = "", new: str = "") -> Path:
    text = WIRED.replace("{W}", f"{{{', '.join(f'{x:.3f}' for x in WEIGHT.ravel())}}}")
    assert old in text
    onnx.save(onnx.parser.parse_model(text.replace(old, new)), path)
    return path


@pytest.mark.parametrize(
    ("old", "new", "op", "change"),
    [
        ("Sub(d, b)", "Sub(d, a)", "residual", Change.INPUTS),
        ("Sub(d, b)", "Sub(b, d)", "residual", Change.INPUTS),
        ("Sub(f, g)", "Sub(g, f)", "gate", Change.INPUTS),
        ("Step(b, z)", "Step(b, x)", "difference", Change.INPUTS),
        ("s = Tanh(p)", "s = Relu(p)", "inner", Change.RESTATED),
        ("Concat<axis = 1>", "Concat<axis = -1>", "both", Change.ATTRIBUTES),
    ],
)
def test_other_inputs_of_an_op_are_seen(
    tmp_path: Path, old: str, new: str, op: str, change: Change
) -> None:
    """Also those of ops in local functions, and in another order."""
    found = finecast.diff(
        wired(tmp_path / "before.onnx"), wired(tmp_path / "after.onnx", old, new)
    )
    (changed,) = found.changed
    assert changed.shown.node.removesuffix("__1") == op  # inlined nodes are numbered
    assert changed.changes == (change,)
    same = wired(tmp_path / "same.onnx", "MatMul(b, v)", "MatMul(b, v)")
    assert "nothing differs" in repr(finecast.diff(tmp_path / "before.onnx", same))


@pytest.mark.parametrize(
    ("old", "new", "op"),
    [
        ("Sub(d, b)", "Sub(d, a)", "residual"),
        ("Sub(d, b)", "Sub(b, d)", "residual"),
        ("Sub(f, g)", "Sub(g, f)", "gate"),
        ("Step(b, z)", "Step(b, x)", "difference"),
    ],
)
def test_a_plan_sees_other_inputs_of_an_op(
    tmp_path: Path, old: str, new: str, op: str
) -> None:
    """A plan knows its model by a structure alone."""
    before, after = wired(tmp_path / "1.onnx"), wired(tmp_path / "2.onnx", old, new)
    plan = finecast.convert(before, None, "all:bf16", verify=False).plan
    assert not finecast.diff(plan, before).changed
    found = finecast.diff(plan, after)
    (changed,) = found.changed
    name = changed.shown.node
    assert (name.removesuffix("__1"), changed.changes) == (op, (Change.INPUTS,))
    done = finecast.apply(plan, after, verify=False)
    assert any(f"attributes or inputs: 1 ({name})" in text for text in done.warnings)


def test_a_plan_of_an_earlier_version_knows_no_ports(tmp_path: Path) -> None:
    before = wired(tmp_path / "1.onnx")
    plan = finecast.convert(before, None, "all:bf16", verify=False).plan
    earlier = replace(
        plan, structure=tuple(replace(op, ports=(), results=()) for op in plan.structure)
    )
    exchanged = wired(tmp_path / "2.onnx", "Sub(f, g)", "Sub(g, f)")
    found = [finecast.diff(earlier, after) for after in (before, exchanged)]
    assert not any(one.changed for one in found)
    assert "nothing differs" in repr(found[0])
    (text,) = found[1].declared
    assert "earlier version of finecast" in text
    assert "nothing differs" not in repr(found[1])
    rewired = wired(tmp_path / "3.onnx", "Sub(d, b)", "Sub(d, a)")
    assert [one.shown.node for one in finecast.diff(earlier, rewired).changed] == ["residual"]


def test_an_output_of_another_op_is_seen(tmp_path: Path) -> None:
    ports = "net (float[8] x) => (float[8] y, float[8] z)"
    bodies = {
        "before": "[a] y = Relu(x)\n[b] z = Tanh(y)",
        "after": "[a] z = Relu(x)\n[b] y = Tanh(z)",
    }
    for name, body in bodies.items():
        model = onnx.parser.parse_model(
            f'<ir_version: 9, opset_import: ["" : 20]> {ports} {{{body}}}'
        )
        onnx.save(model, tmp_path / f"{name}.onnx")
    found = finecast.diff(tmp_path / "before.onnx", tmp_path / "after.onnx")
    exchanged = tuple(f"output {name!r} is the result of another op" for name in "yz")
    assert found.declared == exchanged
    assert "nothing differs" not in repr(found)
    plan = finecast.convert(tmp_path / "before.onnx", None, "all:bf16", verify=False).plan
    assert not finecast.diff(plan, tmp_path / "before.onnx").declared
    found = finecast.diff(plan, tmp_path / "after.onnx")
    assert found.declared == exchanged
    assert found.placement is not None
    assert not found.placement.same
    assert exchanged[0] in found.placement.note


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_another_order_of_inputs_or_outputs_is_seen(
    tmp_path: Path, kind: str, suffix: str
) -> None:
    """Callers by position get other numbers."""
    openvino = pytest.importorskip("openvino")
    given, results = ["float[8] a", "float[8] b"], ["float[8] y", "float[8] z"]
    turned = {"inputs": (given[::-1], results), "outputs": (given, results[::-1])}
    paths = [tmp_path / f"{name}{suffix}" for name in ("before", "after")]
    for path, (taken, made) in zip(paths, ((given, results), turned[kind]), strict=True):
        model = onnx.parser.parse_model(
            f'<ir_version: 9, opset_import: ["" : 20]> net ({", ".join(taken)}) =>'
            f" ({', '.join(made)}) {{ [s] y = Sub(a, b)\n [t] z = Tanh(y) }}"
        )
        onnx.save(model, path.with_suffix(".onnx"))
        if suffix == ".xml":
            openvino.save_model(openvino.convert_model(path.with_suffix(".onnx")), path)
    other = {"inputs": "b, a; it was a, b", "outputs": "z, y; it was y, z"}[kind]
    found = finecast.diff(*paths)
    assert found.declared == (f"{kind} come in another order: {other}",)
    assert not finecast.diff(paths[0], paths[0]).declared


@pytest.mark.parametrize("to", ["Or", "Xor"])
def test_attributes_of_ops_without_float_types_are_seen(tmp_path: Path, to: str) -> None:
    ports = "net (float[8] x, float[8] z) => (float[8] y)"
    body = """{
      [a] p = Greater(x, z)
      [b] q = Less(x, z)
      [c] r = And(p, q)
      [d] y = Where(r, x, z)
    }"""
    paths = []
    for name, text in (("before", body), ("after", body.replace("And", to))):
        model = onnx.parser.parse_model(
            f'<ir_version: 9, opset_import: ["" : 20]> {ports} {text}'
        )
        onnx.save(model, tmp_path / f"{name}.onnx")
        paths.append(tmp_path / f"{name}.onnx")
    (changed,) = finecast.diff(*paths).changed
    assert (changed.shown.node, changed.changes) == ("c", (Change.ATTRIBUTES,))

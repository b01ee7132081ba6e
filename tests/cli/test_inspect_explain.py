from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from finecast.cli.output import write_report
from finecast.diagnosis.explanation import Explanation, groups
from finecast.errors import ExitCode
from finecast.graph import Graph
from finecast.native import engine_model
from finecast.numbers.formats import Format
from finecast.planning.plan import Decision, Plan
from finecast.rules import RULES
from finecast.rules.base import DECISION, Reason
from tests.cli.conftest import Answer
from tests.frontends.tools import parse, tensor
from tests.kernels import skip_without_int8

Finecast = Callable[..., Answer]


def test_inspect_counts(finecast: Finecast, net: Path) -> None:
    report = finecast("inspect", net, "--batch", 2, "--json").json
    assert report["nodes"] == 3
    assert report["parameters"] == 68
    classes = {row["class"]: row for row in report["classes"]}
    assert classes["matmul"]["flops"] == 2 * 2 * 16 * 4
    assert classes["matmul"]["parameters"] == 64
    assert classes["softmax"]["types"] == {"fp32": 1}
    assert "matmul" in finecast("inspect", net).out


def test_inspect_reports_overflow(finecast: Finecast, net: Path, tmp_path: Path) -> None:
    path = tmp_path / "large.npz"
    np.savez(path, x=np.full((2, 16), 1e5, np.float32))
    args = ["inspect", net, "--data", path, "--json"]
    low = finecast(*args, "--auto-cast-type", "fp16").json
    assert {"x"} <= {w["value"] for w in low["warnings"]}
    assert not finecast(*args, "--auto-cast-type", "bf16").json["warnings"]


def test_explain_gives_every_rule(finecast: Finecast, net: Path) -> None:
    options = ["--auto-cast", "matmult", "--auto-cast-type", "fp16", "--json"]
    report = finecast("explain", net, "soft", *options).json
    assert report["format"] == "fp32"
    verdicts = {v["rule"]: v for v in report["verdicts"]}
    assert {r.name for r in RULES} <= verdicts.keys()
    assert "matmult" in verdicts["scope"]["text"]
    assert verdicts["kernel"]["text"] == "no objection"
    assert report["inputs"][0]["from"] == "bias"


def test_explain_prints_rules_without_objection_on_one_line(
    finecast: Finecast, net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    options = ["--auto-cast", "matmult", "--auto-cast-type", "bf16"]
    out = finecast("explain", net, "soft", *options).out
    assert out.startswith("soft (onnx::Softmax) is fp32: scope matmult: softmax does not run")
    assert out.count("objection") == 1
    table = out[: out.index("other rules without objection")]
    assert "scope" in table
    assert not any(line.split()[:1] == ["kernel"] for line in table.splitlines())


def test_an_op_without_weights_is_not_asked_for_their_format(
    finecast: Finecast, tmp_path: Path
) -> None:
    """An Add in bf16 was said not to be computed from weights in int8_weights."""
    model = "g (float[N,8] x) => (float[N,8] y) { [sum] y = Add (x, x) }"
    onnx.save(parse(model), tmp_path / "m.onnx")
    formats = ["--auto-cast", "all", "--auto-cast-type", "bf16,int8_weights"]
    line = ["explain", tmp_path / "m.onnx", "sum", *formats]
    out = " ".join(finecast(*line).out.split())
    assert out.startswith("sum (onnx::Add) is bf16")
    assert "from weights" not in out
    verdicts = finecast(*line, "--json").json["verdicts"]
    assert any("from weights" in verdict["text"] for verdict in verdicts)


def test_explain_without_a_node_groups_by_what_decided(finecast: Finecast, net: Path) -> None:
    options = ["--auto-cast", "matmult", "--auto-cast-type", "bf16"]
    report = finecast("explain", net, *options, "--json").json
    assert report["formats"] == {"fp32": 2, "bf16": 1}
    found = {(g["format"], g["decided_by"]): g["nodes"] for g in report["groups"]}
    assert found == {("fp32", "rule scope"): ["bias", "soft"], ("bf16", "policy"): ["product"]}
    out = finecast("explain", net, *options).out
    assert out.startswith("3 ops: 2 in fp32, 1 in bf16")
    assert re.search(r"bias +fp32 +rule scope", out)


def decided(node: str, text: str, us: float, by: str = "casts") -> Decision:
    evidence: dict[str, float | str] = {"decided by": by, "fp32 us": us}
    reason = Reason(rule=DECISION, text=text, permits=("fp32",), evidence=evidence)
    return Decision(node=node, op="mul", format=Format.FP32, reasons=(reason,))


def test_the_example_of_a_group_is_its_longest_kernel() -> None:
    decisions = (
        decided("a", "little", 2.0),
        decided("b", "much", 9.0),
        decided("c", "x", 1.0),
    )
    slow = decided("d", "error", 1.0, "error")
    plan = Plan(model="", policy="auto:bf16", opset=0, decisions=(*decisions, slow))
    first, second = groups(plan)
    assert (first.decided_by, first.nodes, first.example) == ("casts", ["a", "b", "c"], "b")
    assert first.why == "much"
    assert (second.decided_by, second.nodes) == ("error", ["d"])


NAME = "/encoder/layer.0/attention/MatMul"


def test_ops_are_a_table_the_slowest_first_with_whole_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(node: str, op: str, us: float) -> Decision:
        figures: dict[str, float | str] = {
            "ops in one kernel": 2.0 if us > 5 else 1.0,
            "fp32 us": 2 * us,
            "int8 us": us,
            "error if fp32": 0.006,
            "error if int8": 0.01,
        }
        reason = Reason(rule=DECISION, text="", permits=("int8",), evidence=figures)
        return Decision(node=node, op=op, format=Format.INT8, reasons=(reason,))

    decisions = (
        timed("a", "matmul", 1.0),
        timed("add", "add", 9.0),
        timed(NAME, "matmul", 9.0),
    )
    by_rule = Reason(rule="kernel", text="no kernel", permits=("fp32",))
    last = Decision(node="b", op="mul", format=Format.FP32, reasons=(by_rule,))
    plan = Plan(model="", policy="auto:int8", opset=0, decisions=(*decisions, last))
    explanation = Explanation(graph=Graph(nodes=(), values=()), plan=plan)
    table = explanation.by_op(2)
    assert [row[0] for row in table.rows] == [f"{NAME} +1", "a"]
    assert table.rows[0][1:] == ("int8", "policy", "9", "18", "64%")
    assert table.notes[0] == "and 1 more: --ops N shows more"
    assert [one["node"] for one in explanation.to_dict()["ops"]] == [NAME, "a", "b"]
    monkeypatch.setenv("COLUMNS", "80")
    write_report(explanation)
    out = capsys.readouterr().out
    assert f"  {NAME} " in out
    assert max(map(len, out.splitlines())) <= 80


def test_rules_that_decide_together_are_named_once() -> None:
    reasons = tuple(
        Reason(rule=rule, text="", permits=("fp32",), evidence={})
        for rule in ("kernel", "names")
    )
    one = Decision(node="a", op="mul", format=Format.FP32, reasons=reasons)
    (group,) = groups(Plan(model="", policy="auto:bf16", opset=0, decisions=(one,)))
    assert group.decided_by == "rules kernel, names"


def test_a_plan_that_states_no_figures_is_explained(
    finecast: Finecast, net: Path, tmp_path: Path
) -> None:
    """Plans of earlier versions have one text on all nodes, and no checksum."""
    text = "expansion moves, step 5 of the frontier"
    plan = tmp_path / "p.json"
    options = ["--auto-cast", "all", "--auto-cast-type", "fp16", "--engine", "onnxruntime"]
    made = finecast("convert", net, "-o", tmp_path / "l.onnx", *options, "--plan-out", plan)
    assert made.code == 0
    stated = json.loads(plan.read_text())
    del stated["checksum"]
    stated["version"] = 10
    for decision in stated["decisions"]:
        for reason in decision["reasons"]:
            if reason["rule"] == DECISION:
                reason |= {"text": text, "evidence": {}}
    plan.write_text(json.dumps(stated))
    assert text in " ".join(finecast("explain", net, "product", "--plan", plan).out.split())
    groups = finecast("explain", net, "--plan", plan, "--json").json["groups"]
    assert [(g["decided_by"], g["why"]) for g in groups] == [("policy", text)]


def test_explain_of_a_plan(finecast: Finecast, net: Path, tmp_path: Path) -> None:
    plan = tmp_path / "p.json"
    options = ["--auto-cast-type", "fp16", "--engine", "onnxruntime", "--plan-out", plan]
    assert finecast("convert", net, "-o", tmp_path / "l.onnx", *options).code == 0
    answer = finecast("explain", net, "product", "--plan", plan)
    assert answer.code == 0
    assert "onnx::MatMul" in answer.out


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--auto-cast", "all"], "--auto-cast"),
        (["--exclude", "soft", "--keep-ops"], "--exclude, --keep-ops"),
        (["--disable-mixed-precision-accumulation"], "--enable-mixed-precision-accumulation"),
        (["--target", "trn2"], "--target"),
        (["--batch", "2"], "--batch"),
        (["--from-type", "fp16"], "--from-type"),
    ],
)
def test_options_that_a_plan_settles_are_refused_beside_it(
    finecast: Finecast, net: Path, tmp_path: Path, given: list[str], named: str
) -> None:
    if "mixed" in named:
        pytest.importorskip("finecast_neuron")
    plan = tmp_path / "p.json"
    assert finecast("convert", net, "-o", tmp_path / "l.onnx", "--plan-out", plan).code == 0
    answer = finecast("explain", net, "product", "--plan", plan, *given)
    assert answer.code == 2
    assert named in answer.err
    assert "--plan" in answer.err


def test_explain_says_that_a_format_lacks_data(finecast: Finecast, net: Path) -> None:
    """``convert`` asks for them; here each op was shown in bf16 without a word."""
    options = ["--auto-cast", "all", "--auto-cast-type", "int8,bf16"]
    said = "int8 needs the ranges of the model's values, and there is no data"
    assert f"{said}: no op has it here" in finecast("explain", net, *options).err
    assert said in finecast("convert", net, "-o", net.with_name("l.onnx"), *options).err


def test_explain_says_that_an_engine_may_run_fewer_ops_on_integers(
    finecast: Finecast, net: Path, tmp_path: Path
) -> None:
    """``convert`` runs the model, and takes ops out of int8 that it does not run so."""
    skip_without_int8("onnxruntime")
    path = tmp_path / "x.npz"
    np.savez(path, x=np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16))
    options = ["--auto-cast", "matmult", "--engine", "onnxruntime", "--data", path]
    said = "1 op in int8 by what the rules permit: convert and tune also run the model in"
    answer = finecast("explain", net, *options, "--auto-cast-type", "int8")
    assert said in answer.err
    plan = tmp_path / "plan.json"
    low = ("-o", tmp_path / "low.onnx", "--plan-out", plan)
    assert finecast("convert", net, *low, *options, "--auto-cast-type", "int8").code == 0
    assert said not in finecast("explain", net, "--plan", plan).err
    assert said not in finecast("explain", net, *options, "--auto-cast-type", "bf16").err


@pytest.mark.parametrize("low", ["fp16", "int8"])
def test_explain_tells_as_what_an_op_reads(
    low: str, finecast: Finecast, net: Path, tmp_path: Path
) -> None:
    """What rests in fp32 is cast, or encoded, for it alone."""
    if low == "int8":
        skip_without_int8("onnxruntime")
    path = tmp_path / "x.npz"
    np.savez(path, x=np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16))
    options = ["--auto-cast", "matmult", "--auto-cast-type", low, "--engine", "onnxruntime"]
    given = ["explain", net, "product", *options, "--data", path]
    report = finecast(*given, "--json").json
    assert report["format"] == low
    assert {(i["format"], i["read_as"]) for i in report["inputs"]} == {("fp32", low)}
    assert "read as" in finecast(*given).out
    bias = finecast("explain", net, "bias", *options, "--data", path, "--json").json
    assert bias["inputs"][-1]["read_as"] == "fp32"


def test_explain_unknown_node(finecast: Finecast, net: Path) -> None:
    answer = finecast("explain", net, "produkt")
    assert answer.code == ExitCode.USAGE
    assert "did you mean product" in answer.err


def test_kernels_are_compared_of_low_nodes_alone(
    finecast: Finecast, net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each comparison compiles the model twice: for an fp32 node there is nothing to tell."""
    compiled: list[object] = []

    def load_with_kernels(*given: object) -> tuple[None, tuple[()]]:
        compiled.append(given)
        return None, ()

    monkeypatch.setattr(engine_model, "load_with_kernels", load_with_kernels)
    options = ["--auto-cast", "matmult", "--auto-cast-type", "bf16", "--json"]
    assert finecast("explain", net, "soft", *options).json["fallen_apart"] == []
    assert not compiled
    low = finecast("explain", net, "product", *options)
    assert low.json["format"] == "bf16"
    assert len(compiled) == 2


@pytest.mark.parametrize("limit", ["_MOST_NODES_COMPILED", "_MOST_BYTES_COMPILED"])
def test_what_takes_long_to_compile_is_explained_without_its_kernels(
    finecast: Finecast, net: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(engine_model, limit, 1)
    answer = finecast(
        "explain", net, "product", "--auto-cast", "all", "--auto-cast-type", "bf16"
    )
    assert answer.code == ExitCode.DONE
    assert "kernels were not compared" in answer.err
    assert "finecast convert" in answer.err
    assert "decision" in answer.out


def test_inspect_fits_a_terminal_of_80_columns(
    finecast: Finecast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of classes stay whole, and ops beside them take several lines."""
    monkeypatch.setenv("COLUMNS", "80")
    rng = np.random.default_rng(0)
    model = parse("""net (float[N,2000] x) => (float[N,2000] y, int64[2] t) {
      s = Shape(x)
      t = Identity(s)
      i = Identity(x)
      a = MatMul(i, w)
      b = Add(a, x)
      c = Mul(b, b)
      d = ReduceSumSquare(c)
      e = Div(c, d)
      y = Exp(e)
    }""")
    w = rng.normal(size=(2000, 2000)).astype(np.float32)
    model.graph.initializer.append(tensor("w", w))
    onnx.save(model, tmp_path / "net.onnx")
    lines = finecast("inspect", tmp_path / "net.onnx").out.splitlines()
    table = [line for line in lines if not line.startswith("/")]
    assert max(len(line) for line in table) <= 80
    assert any(line.startswith("  elementwise ") for line in table)
    assert any("matmul:1" in line for line in table)  # no break between name and number
    (outputs,) = (line for line in lines if line.startswith("outputs: "))
    assert outputs.index("y fp32") < outputs.index("t int64")  # as in the model


@pytest.mark.parametrize("suffix", ["onnx", "xml"])
def test_ops_that_give_sizes_have_no_type_and_are_not_counted(
    suffix: str, finecast: Callable[..., Answer], tmp_path: Path
) -> None:
    net = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 4] x, float[4, 4] w) => (float[n, 4] y, int64[2] z) {
          [product] h = MatMul (x, w) [sizes] s = Shape (h) [move] y = Reshape (h, s)
          [twice] z = Add (s, s)
        }"""
    )
    model = tmp_path / f"m.{suffix}"
    onnx.save(net, tmp_path / "m.onnx")
    if suffix == "xml":
        ov = pytest.importorskip("openvino")
        ov.save_model(ov.Core().read_model(tmp_path / "m.onnx"), model, compress_to_fp16=False)
    found = finecast("explain", model, "--json").json
    assert found["formats"] == {"bf16": 2}
    assert sum(len(one["nodes"]) for one in found["groups"]) == 2
    low = tmp_path / f"low.{suffix}"
    done = finecast("convert", model, "-o", low, "--auto-cast", "all", "--json").json
    assert done["ops"] == {"bf16": 2}
    classes = finecast("inspect", low, "--json").json["classes"]
    assert {one["class"]: one["types"] for one in classes}["shape"] == {"other": 1}
    assert "keeps its type" in finecast("explain", model, "sizes").out


@pytest.mark.parametrize(
    ("verb", "with_data"),
    [*((verb, True) for verb in ("inspect", "profile", "convert", "tune")),
     ("inspect", False), ("profile", False)],
)  # fmt: skip
def test_a_batch_that_the_model_does_not_take_is_refused(
    finecast: Finecast, tmp_path: Path, verb: str, with_data: bool
) -> None:
    """It was without effect, in silence."""
    net = tmp_path / "net.onnx"
    onnx.save(parse("net (float[4,16] x) => (float[4,16] y) { y = Tanh(x) }"), net)
    np.savez(tmp_path / "data.npz", x=np.ones((8, 16), np.float32))
    more = ["--data", tmp_path / "data.npz"] if with_data else []
    more += ["-o", tmp_path / "low.onnx"] if verb in ("convert", "tune") else []
    answer = finecast(verb, net, *more, "--batch", 2)
    assert answer.code == ExitCode.USAGE
    assert "the model's batch is fixed at 4, not 2 (--batch): leave it out" in answer.err
    if verb == "inspect":
        assert finecast(verb, net, *more, "--batch", 4).code == 0

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from finecast.engines import installed
from finecast.errors import ExitCode, UsageError
from finecast.files.saved import checksum
from finecast.frontends import onnx as frontend
from finecast.numbers.formats import Format
from finecast.planning.plan import Decision, Plan
from finecast.rules.policy import Policy
from tests.cli.conftest import Answer

Finecast = Callable[..., Answer]
needs_openvino = pytest.mark.skipif(not installed("openvino"), reason="needs OpenVINO")


def types(path: Path) -> dict[str, int]:
    """Element types of the model's initializers."""
    return {t.name: t.data_type for t in onnx.load(path).graph.initializer}


@needs_openvino
def test_all_bf16(finecast: Finecast, net: Path, tmp_path: Path) -> None:
    out, plan = tmp_path / "low.onnx", tmp_path / "low.plan.json"
    options = ["--auto-cast", "all", "--auto-cast-type", "bf16", "--plan-out", plan, "--json"]
    answer = finecast("convert", net, "-o", out, *options)
    assert answer.code == 0, answer.err
    report = answer.json
    assert report["ops"] == {"bf16": 3}
    assert report["casts"] == 0  # those on input and output are not counted
    assert report["size_bytes"]["after"] == out.stat().st_size
    assert report["verified"]["engine"] == "openvino"
    assert 0 < report["verified"]["relative_error"] < 0.02
    model = onnx.load(out)
    onnx.checker.check_model(model, full_check=True)
    # What the input is rounded by, before its cast, is no constant of the model's.
    own = {t for name, t in types(out).items() if not name.startswith("finecast_")}
    assert own == {onnx.TensorProto.BFLOAT16}
    for port in (*model.graph.input, *model.graph.output):
        assert port.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    assert Plan.load(plan).counts == {"bf16": 3}
    told = finecast("apply", plan, net, "-o", tmp_path / "again.onnx").out
    assert "casts between ops 0" in " ".join(told.split())
    assert sum(n.op_type == "Cast" for n in model.graph.node) >= 2


@pytest.mark.parametrize(
    ("options", "low"),
    [
        (["--auto-cast", "none"], set[str]()),
        (["--auto-cast", "matmul"], {"product"}),
        (["--auto-cast", "matmult"], {"product"}),
        (["--auto-cast", "all"], {"product", "bias", "soft"}),
        (["--auto-cast", "all", "--op", "Softmax=fp32"], {"product", "bias"}),
        (["--auto-cast", "all", "--exclude", "^b"], {"product", "soft"}),
        (["--auto-cast", "all", "--include", "soft|bias"], {"bias", "soft"}),
        (["--auto-cast", "none", "--op", "softmax=fp16"], {"soft"}),
    ],
)
def test_policies(
    finecast: Finecast, net: Path, tmp_path: Path, options: list[str], low: set[str]
) -> None:
    out, plan = tmp_path / "low.onnx", tmp_path / "p.json"
    always = ["--auto-cast-type", "fp16", "--plan-out", plan, "--engine", "onnxruntime"]
    answer = finecast("convert", net, "-o", out, *options, *always)
    assert answer.code == 0, answer.err
    formats = Plan.load(plan).formats
    assert {name for name, fmt in formats.items() if fmt.label == "fp16"} == low


def test_user_rules(finecast: Finecast, net: Path, tmp_path: Path) -> None:
    rules = tmp_path / "mine.py"
    rules.write_text(
        "def rule_keep_soft(node):\n    return 'fp32' if node.op == 'softmax' else None\n"
    )
    plan = tmp_path / "p.json"
    options = ["--auto-cast", "all", "--auto-cast-type", "fp16", "--engine", "onnxruntime"]
    more = ["--rules", rules, "--plan-out", plan]
    answer = finecast("convert", net, "-o", tmp_path / "l.onnx", *options, *more)
    assert answer.code == 0, answer.err
    decision = Plan.load(plan).decision("soft")
    assert decision is not None
    assert decision.format.label == "fp32"
    assert any("rule_keep_soft" in r.text for r in decision.reasons)


def test_io_changes_on_request(finecast: Finecast, net: Path, tmp_path: Path) -> None:
    out = tmp_path / "low.onnx"
    options = ["--auto-cast", "all", "--auto-cast-type", "fp16", "--engine", "onnxruntime"]
    answer = finecast("convert", net, "-o", out, *options, "--io", "x=fp16")
    assert answer.code == 0, answer.err
    graph = onnx.load(out).graph
    assert graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    assert graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT


def test_same_plan_gives_same_model(finecast: Finecast, net: Path, tmp_path: Path) -> None:
    one, two, plan = tmp_path / "1.onnx", tmp_path / "2.onnx", tmp_path / "p.json"
    options = ["--auto-cast", "all", "--auto-cast-type", "fp16", "--engine", "onnxruntime"]
    assert finecast("convert", net, "-o", one, *options, "--plan-out", plan).code == 0
    assert finecast("apply", plan, net, "-o", two, "--engine", "onnxruntime").code == 0
    assert one.read_bytes() == two.read_bytes()


SLIPS = [
    (["--op", "Sofmax=fp32"], "'Sofmax' does not match any op of the model (--op)", "Softmax"),
    (["--include", "produkt"], "'produkt' does not match the name of any node", "product"),
    (["--exclude", "bias", "--exclude", "^sofa$"], "(--exclude)", "soft"),
]


@pytest.mark.parametrize("verb", ["convert", "tune", "explain"])
@pytest.mark.parametrize(("options", "said", "offered"), [
    *SLIPS,
    (["--io", "X=bf16"], "'X' does not match any float input or output (--io)", "x, y"),
    (["--io", "state"], "no input is called a past", "(--io state): leave it out"),
    (["--io", "states"], "unknown word 'states' (--io)", "did you mean state? use one of"),
    (["--target", "trn1", "--op", "Sofmax=fp32"], "(--op)", "did you mean Softmax?"),
])  # fmt: skip
def test_names_that_match_nothing_are_errors_before_any_work(
    finecast: Finecast, net: Path, data: Path, tmp_path: Path, verb: str, options: list[str],
    said: str, offered: str,
) -> None:  # fmt: skip
    if verb == "tune" and "--include" in options:
        pytest.skip("tune has no such option")
    out = tmp_path / "l.onnx"
    ran = tmp_path / "ran"
    score = tmp_path / "score.py"
    score.write_text(f"def score(run):\n    open({str(ran)!r}, 'w')\n    return 1.0\n")
    more = {
        "convert": ["-o", out],
        "tune": ["-o", out, "--eval", f"{score}:score"],
        "explain": ["soft", "--data", data],
    }[verb]
    answer = finecast(verb, net, *more, *options)
    assert answer.code == ExitCode.USAGE, answer.err
    assert said in answer.err
    assert offered in answer.err
    assert answer.err.count("\n") == 1
    assert not out.exists()
    assert not ran.exists()


@pytest.mark.parametrize(("options", "words"), [
    (["--dim", "M=3"], "unknown free dimension 'M' (--dim): use one of N, x.0"),
    (["--dim", "M=3", "--no-verify"], "unknown free dimension 'M'"),
    (["--dim", "N=0"], "'N=0' is not NAME=SIZE (--dim): write N=4"),
    (["--dim", "=3"], "write NAME=4"),
    (["--dim", "N=3", "--data", "DATA"], "--dim sizes random feeds, and data is given"),
    (["--data", "DATA", "--labels", "labell"], "did you mean label?"),
    (["--labels", "label"], "--labels names an array of --data"),
])  # fmt: skip
def test_names_of_data_and_dimensions_too(
    finecast: Finecast, net: Path, data: Path, tmp_path: Path, options: list[str], words: str
) -> None:
    given = [data if o == "DATA" else o for o in options]
    answer = finecast("convert", net, "-o", tmp_path / "l.onnx", *given)
    assert (answer.code, answer.err.count("\n")) == (ExitCode.USAGE, 1)
    assert words in answer.err
    assert not (tmp_path / "l.onnx").exists()


@pytest.mark.parametrize("option", ["--batch=8", "--sample-axis=x=0"])
@pytest.mark.parametrize("verb", ["convert", "apply", "explain"])
def test_options_of_data_need_data(
    finecast: Finecast, net: Path, tmp_path: Path, verb: str, option: str
) -> None:
    plan = tmp_path / "net.plan.json"
    finecast("convert", net, "-o", tmp_path / "first.onnx", "--plan-out", plan)
    line = {
        "convert": ["convert", net, "-o", tmp_path / "low.onnx"],
        "apply": ["apply", plan, net, "-o", tmp_path / "low.onnx"],
        "explain": ["explain", net, "product"],
    }[verb]
    answer = finecast(*line, option)
    assert answer.code == ExitCode.USAGE
    assert f"{option.partition('=')[0]} is given without data" in answer.err


def test_the_closest_nodes_are_offered(finecast: Finecast, net: Path) -> None:
    answer = finecast("explain", net, "Prodct")
    assert answer.code == ExitCode.USAGE
    assert "unknown node 'Prodct': did you mean product?" in answer.err


def test_a_rule_without_an_opinion_is_told(
    finecast: Finecast, net: Path, tmp_path: Path
) -> None:
    rules = tmp_path / "mine.py"
    rules.write_text(
        "def rule_slip(node):\n    return 'fp32' if node.op == 'Softmax' else None\n\n"
        "def rule_soft(node):\n    return 'fp32' if node.op == 'softmax' else None\n"
    )
    answer = finecast("convert", net, "-o", tmp_path / "l.onnx", "--rules", rules)
    assert answer.code == 0, answer.err
    assert "user rule mine.py:rule_slip had no opinion on any op" in answer.err
    assert "rule_soft" not in answer.err


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lambda a: ["missing.onnx", *a[1:]], ExitCode.USAGE, "does not exist"),
        (lambda a: [*a, "--auto-cast", "some"], ExitCode.USAGE, "none, matmult, all, auto"),
        (lambda a: [*a, "--auto-cast-type", "fp7"], ExitCode.USAGE, "unknown format"),
        (lambda a: [*a, "--op", "Softmax"], ExitCode.USAGE, "NAME=FORMAT"),
        (lambda a: [*a, "--include", "("], ExitCode.USAGE, "regular expression"),
        (lambda a: [*a, "--engine", "abacus"], ExitCode.USAGE, "openvino, onnxruntime"),
        (
            lambda a: [*a, "--io", "z=fp16"],
            ExitCode.USAGE,
            "does not match any float input or output",
        ),
        (lambda a: [a[0], "-o", "/nowhere/x.onnx"], ExitCode.USAGE, "folder"),
        (lambda a: [*a, "--wrong"], ExitCode.USAGE, "--help"),
    ],
)
def test_bad_input_is_one_line(
    finecast: Finecast,
    net: Path,
    tmp_path: Path,
    change: Callable[[list[str]], list[str]],
    code: ExitCode,
    words: str,
) -> None:
    before = sorted(p.name for p in tmp_path.iterdir())
    answer = finecast("convert", *change([str(net), "-o", str(tmp_path / "low.onnx")]))
    assert answer.code == code
    assert words in answer.err
    assert answer.err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize("content", [b"", b"hello\n", b"\x08\x0a"])
def test_what_is_not_onnx(
    finecast: Finecast, net: Path, tmp_path: Path, content: bytes
) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(content or net.read_bytes()[:100])
    answer = finecast("convert", broken, "-o", tmp_path / "low.onnx")
    assert answer.code == ExitCode.FAILED
    assert answer.err.count("\n") == 1
    assert not (tmp_path / "low.onnx").exists()


def test_output_is_not_replaced_unasked(finecast: Finecast, net: Path, tmp_path: Path) -> None:
    out = tmp_path / "low.onnx"
    out.write_text("precious")
    options = ["--auto-cast-type", "fp16", "--engine", "onnxruntime"]
    answer = finecast("convert", net, "-o", out, *options)
    assert answer.code == ExitCode.USAGE
    assert "--force" in answer.err
    assert out.read_text() == "precious"
    assert finecast("convert", net, "-o", out, *options, "--force").code == 0


def test_a_model_nothing_here_runs_is_not_written(
    finecast: Finecast, net: Path, tmp_path: Path
) -> None:
    out = tmp_path / "low.onnx"
    options = ["--auto-cast", "all", "--engine", "onnxruntime", "--op", "MatMul=bf16"]
    answer = finecast("convert", net, "-o", out, *options)
    assert answer.code == ExitCode.FAILED  # ONNX Runtime's CPU has no bf16 MatMul
    assert "MatMul" in answer.err or "product" in answer.err
    assert not out.exists()


def test_plan_of_another_model(finecast: Finecast, net: Path, tmp_path: Path) -> None:
    plan, other = tmp_path / "p.json", tmp_path / "other.onnx"
    options = ["--auto-cast-type", "fp16", "--engine", "onnxruntime", "--plan-out", plan]
    assert finecast("convert", net, "-o", tmp_path / "l.onnx", *options).code == 0
    text = """<ir_version: 10, opset_import: ["" : 17]>
    net (float[4] x) => (float[4] y) { t = Sin(x) y = Cos(t) }"""
    onnx.save(onnx.parser.parse_model(text), other)
    answer = finecast("apply", plan, other, "-o", tmp_path / "m.onnx")
    assert answer.code == ExitCode.FAILED
    assert "another model" in answer.err


@pytest.mark.parametrize("source", ["npz", "function"])
def test_data_of_either_kind_guides_the_rules(
    finecast: Finecast, net: Path, tmp_path: Path, source: str
) -> None:
    x = np.full((40, 16), 1e6, np.float32)  # beyond fp16's range
    np.savez(tmp_path / "d.npz", x=x, answers=np.zeros(40))
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import numpy as np\n"
        "def feeds():\n"
        "    yield {'x': np.full((4, 16), 1e6, np.float32)}\n"
    )
    given = {
        "npz": ["--data", tmp_path / "d.npz", "--labels", "answers", "--batch", "8"],
        "function": ["--calib", f"{mine}:feeds"],
    }[source]
    plan = tmp_path / "p.json"
    options = ["--auto-cast", "matmult", "--auto-cast-type", "fp16", "--engine", "onnxruntime"]
    answer = finecast(
        "convert", net, "-o", tmp_path / "l.onnx", *options, *given, "--plan-out", plan
    )
    assert answer.code == 0, answer.err
    assert Plan.load(plan).counts == {"fp32": 3}
    told = finecast("explain", net, "product", *options, *given, "--json").json
    verdict = next(v for v in told["verdicts"] if v["rule"] == "observed_range")
    assert verdict["permits"] == "fp32"
    again = finecast("apply", plan, net, "-o", tmp_path / "m.onnx", *given, *options[-2:])
    assert again.code == 0, again.err


def test_a_format_that_gains_nothing_is_named(
    finecast: Finecast, net: Path, tmp_path: Path
) -> None:
    # ONNX Runtime computes fp16 in fp32 on CPUs.
    low = ["--auto-cast", "all", "--auto-cast-type", "fp16", "--engine", "onnxruntime"]
    answer = finecast("convert", net, "-o", tmp_path / "low.onnx", *low)
    assert answer.code == 0, answer.err
    assert "fp16 runs at x1 of fp32's speed in ONNX Runtime" in answer.err
    assert "no speed is gained here" in answer.err


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A product with 64 kB of weights: enough to go to a second file."""
    weights = np.random.default_rng(0).normal(size=(128, 128)).astype(np.float32)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "wide",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [4, 128])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [4, 128])],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    path = tmp_path / "wide.onnx"
    opset = onnx.helper.make_opsetid("", 21)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10), path)
    return path


@needs_openvino
def test_one_file_or_external_data(finecast: Finecast, wide: Path, tmp_path: Path) -> None:
    apart, whole = tmp_path / "apart.onnx", tmp_path / "whole.onnx"
    low = ["--auto-cast", "all"]
    answer = finecast("convert", wide, "-o", apart, *low, "--external-data")
    assert answer.code == 0, answer.err
    data = tmp_path / "apart.onnx.data"
    assert data.stat().st_size > apart.stat().st_size
    # It stays as it came, unless told otherwise.
    came = tmp_path / "came.onnx"
    onnx.save(onnx.load(wide), came, save_as_external_data=True, location="came.data")
    for scope in ("none", "all", "matmult"):
        name = f"{scope}.onnx"
        assert finecast("convert", came, "-o", tmp_path / name, "--auto-cast", scope).code == 0
        assert (tmp_path / f"{name}.data").exists()
    assert finecast("convert", came, "-o", whole, "--one-file").code == 0
    assert not (tmp_path / "whole.onnx.data").exists()


@needs_openvino
def test_data_of_another_model_is_not_replaced(
    finecast: Finecast, wide: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "low.onnx.data"
    theirs.write_bytes(b"theirs")
    args = ["convert", wide, "-o", tmp_path / "low.onnx", "--external-data"]
    answer = finecast(*args)
    assert answer.code == ExitCode.USAGE
    assert "low.onnx.data" in answer.err
    assert "--force" in answer.err
    assert theirs.read_bytes() == b"theirs"
    assert not (tmp_path / "low.onnx").exists()
    assert finecast(*args, "--force").code == 0


@pytest.mark.parametrize("scope", ["all", "auto"])
def test_inputs_beyond_memory_are_not_drawn(
    finecast: Finecast, tmp_path: Path, scope: str
) -> None:
    text = """<ir_version: 10, opset_import: ["" : 17]>
    large (float[2935973616] x) => (float[2935973616] y) { y = Relu(x) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "large.onnx")
    given = ["convert", tmp_path / "large.onnx", "-o", tmp_path / "low.onnx"]
    answer = finecast(*given, "--auto-cast", scope)
    assert answer.code == 2
    assert "take 23.5 GB to draw" in answer.err
    assert "--no-verify" in answer.err
    assert finecast(*given, "--auto-cast", scope, "--no-verify").code == 0


def _edited(plan: dict[str, Any], **change: Any) -> str:
    return json.dumps(plan | change)


def _forged(plan: dict[str, Any], **change: Any) -> str:
    """With a digest and a checksum that fit what it became."""
    text = _edited(plan, **change)
    with pytest.raises(UsageError, match="the plan was changed") as caught:
        Plan.from_json(_edited(json.loads(text), digest=""))
    found = re.search("its digest is ([0-9a-f]{16})", str(caught.value))
    assert found is not None
    content = json.loads(text) | {"digest": found.group(1)}
    del content["checksum"]
    return _edited(content, checksum=checksum(content))


def _first(plan: dict[str, Any], **change: Any) -> list[dict[str, Any]]:
    first, *rest = plan["decisions"]
    return [first | change, *rest]


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (lambda p: _edited(p, digest="0" * 16), "the plan was changed"),
        (lambda p: _edited(p, opset=19), "the plan was changed"),
        (lambda p: _edited(p, policy="auto:fp16"), "the plan was changed: its checksum"),
        (
            lambda p: _edited(
                p,
                decisions=_first(
                    p, reasons=[{"rule": "a", "text": "b", "permits": [], "evidence": {}}]
                ),
            ),
            "the plan was changed: its checksum",
        ),
        (lambda p: _edited(p, more=1), "it has 'more', which is not known"),
        (lambda p: _edited(p, kind="finecast.lock"), "it is a lock of version 1"),
        (
            lambda p: _edited(p, decisions=_first(p, format="fp7")),
            "p.json, decisions[0])",
        ),
        (lambda p: _edited(p, io={"x": "fp7"}), "io.x is 'fp7', which is not known"),
        (lambda p: _edited(p, decisions=_first(p, format="fp32")), "the plan was changed"),
        (lambda p: _edited(p, decisions=p["decisions"][1:]), "the plan was changed"),
        (lambda p: _forged(p, decisions=p["decisions"][1:]), "leaves out 'product'"),
        (
            lambda p: _forged(p, decisions=_first(p, op="conv")),
            "'product' is 'conv'",
        ),
        (
            lambda p: _forged(p, decisions=_first(p, node="none")),
            "node the model lacks: 'none'",
        ),
        (lambda p: _edited(p, decisions=p["decisions"] * 2), "decides 'product' twice"),
        (
            lambda p: _edited(p, decisions=_first(p, format="fp1")),
            "format is 'fp1', which is not known",
        ),
        (lambda p: _edited(p, decisions=_first(p, format=["x"])), r"format is ['x']"),
        (lambda p: _edited(p, decisions=[3]), "not a finecast plan"),
        (lambda p: _edited(p, version=99), "upgrade finecast"),
        (lambda p: _edited(p, version=0), "version is 0, expected an integer >= 1"),
        (lambda p: _edited(p, version="1"), "version is '1', expected an integer"),
        (lambda p: _edited(p, opset="new"), "not a finecast plan"),
        (lambda p: _edited(p, io=3), "not a finecast plan"),
        (
            lambda p: _edited({k: v for k, v in p.items() if k != "digest"}),
            "it has no 'digest'",
        ),
        (lambda p: '{"version": ' + "[" * 100_000, "not a finecast plan"),
        (lambda p: '{"version": ' + "9" * 5_000 + "}", "not a finecast plan"),
    ],
)
def test_tampered_plans_are_errors(
    finecast: Finecast,
    net: Path,
    tmp_path: Path,
    tamper: Callable[[dict[str, Any]], str],
    words: str,
) -> None:
    plan, out = tmp_path / "p.json", tmp_path / "out.onnx"
    file = frontend.load(net)
    policy = Policy.parse("all:bf16")
    decisions = tuple(
        Decision(node=name, op=op, format=Format.BF16)
        for name, op in (("product", "matmul"), ("bias", "add"), ("soft", "softmax"))
    )
    made = Plan(model=file.digest, policy=policy.label, opset=22, decisions=decisions)
    plan.write_text(tamper(json.loads(made.to_json())))
    answer = finecast("apply", plan, net, "-o", out, "--no-verify")
    assert answer.code in (ExitCode.USAGE, ExitCode.FAILED), answer.out
    assert words in answer.err
    assert answer.err.count("\n") == 1
    assert not out.exists()
    plan.write_text(made.to_json())
    assert finecast("apply", plan, net, "-o", out, "--no-verify").code == 0


def test_a_plan_beyond_any_size_is_not_read(
    finecast: Finecast, net: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "p.json"
    with plan.open("wb") as file:
        file.truncate((1 << 30) + 1)  # a hole: it takes no room
    answer = finecast("apply", plan, net, "-o", tmp_path / "out.onnx")
    assert answer.code == ExitCode.USAGE
    assert "1073741824 are the most that are read" in answer.err


def test_sizes_that_it_was_verified_at_are_told(
    finecast: Callable[..., Answer], net: Path, tmp_path: Path
) -> None:
    asked = ("convert", net, "--auto-cast", "all", "--engine", "onnxruntime")
    assert "ONNX Runtime, N=1" in finecast(*asked, "-o", tmp_path / "a.onnx").out
    sized = finecast(*asked, "-o", tmp_path / "b.onnx", "--dim", "N=3", "--json")
    assert sized.json["verified"]["sizes"] == {"N": 3}

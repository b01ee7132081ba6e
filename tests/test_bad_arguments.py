"""Wrong types of arguments, odd ports and full streams: one line each, and no traceback."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

import finecast
from finecast.engines import ENGINES, installed
from finecast.engines.source import read_source
from finecast.errors import ExitCode, FinecastError, ModelError, UsageError
from finecast.native.opening import plan_beside

NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 4] x) => (float[n, 4] y)
<float[4] b = {1.0, 2.0, 3.0, 4.0}> { y = Add (x, b) }"""
X = {"x": np.ones((8, 4), np.float32)}


@pytest.fixture
def net(tmp_path: Path) -> Path:
    onnx.save(parser.parse_model(NET), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def five() -> int:
    return 5


def fives() -> Iterator[int]:
    yield 5


OF_PLUGINS = ["tensorflow"] if "tensorflow" in ENGINES else []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"metric": len}, "the name of a metric .* is expected for metric, not .* builtin"),
        ({"tolerance": "some"}, "'some' is not a number"),
        ({"tolerance": 1}, r"relative tolerance 1 lets every .* \(tolerance\): give less"),
        ({"confidence": 95}, r"95 is no confidence \(confidence\): give 0.95"),
        ({"min_speedup": float("inf")}, "inf times as good as fp32 is no gain to ask for"),
        ({"metric": "top11"}, "unknown metric 'top11'"),
        ({"batch": 2.5}, "a whole number is expected for batch, not .* float"),
        ({"batch": 0}, r"0 is less than 1.* \(batch\): give 1 or more"),
        ({"decode_steps": -3}, r"-3 is less than 1.* \(decode_steps\): give 1 or more"),
        ({"jobs": -1}, r"-1 is less than 0.* \(jobs\): give 0 or more"),
        ({"max_trials": True}, "a whole number is expected for max_trials, not .* bool"),
        ({"engine": 7}, "a name is expected for engine, not .* int"),
        *(
            ({"engine": engine}, r"does not run \.onnx files.* openvino or onnxruntime")
            for engine in ("torch", "torch-eager", "torch:CUDA", *OF_PLUGINS)
        ),
        ({"output": 5}, "a path is expected for output, not .* int"),
        ({"user_rules": [len]}, "a dict of rule functions by name is expected"),
        ({"target": 5}, "the name of a device, or one with options, is expected"),
        ({"objective": 5}, "the name of an objective is expected"),
        ({"evaluate": 5}, "a function of run is expected"),
        ({"progress": 5}, "True, False or a function of each step is expected"),
        ({"of": 5}, "an output's name, or several, is expected for of, not .* int"),
        ({"plan_out": 5}, "a path is expected for plan_out, not .* int"),
        ({"data": {"x": [[1.0], [1.0, 2.0]]}}, "a list in the data is no array: .*inhomogen"),
        ({"policy": 3}, "3 is no policy"),
        ({"policy": "bf16"}, "'bf16' is a format, and a scope is expected .*write all:bf16"),
        ({"target": "h101"}, "unknown target 'h101': did you mean h100"),
        ({"target": "h10"}, "unknown target 'h10': did you mean h100"),
        ({"target": "hopper"}, "unknown target 'hopper': did you mean sm90"),
        ({"tolerance": 0.1, "max_drop": 0.2}, "and so does another option"),
        ({"data": 7}, "data of type int is not iterable"),
        ({"calib": five}, "returns int, and arrays by the names of the inputs are needed"),
        ({"calib": fives}, "yields int, and arrays by the names of the inputs are needed"),
    ],
)
def test_an_argument_of_a_wrong_type(given: dict[str, Any], expected: str, net: Path) -> None:
    call: Any = finecast.tune
    with pytest.raises(UsageError, match=expected):
        call(net, **{"data": X, **given})


@pytest.mark.parametrize(
    "given", [{"max_drop": "x"}, {"tolerance": 1}, {"confidence": 95}, {"metric": "top11"}]
)
def test_what_no_model_can_meet_is_refused_before_one_is_read(given: dict[str, Any]) -> None:
    call: Any = finecast.tune
    with pytest.raises(UsageError, match=next(iter(given))):
        call("no model", data=X, **given)


def test_other_verbs_check_theirs(net: Path) -> None:
    with pytest.raises(UsageError, match="a dict of sizes by dimension is expected"):
        finecast.convert(net, dims=[1])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="True or False is expected for verify"):
        finecast.apply(net, net, verify="no")  # type: ignore[arg-type]
    with pytest.raises(
        UsageError, match=r"a plan or its path is expected for plan, not .* dict"
    ):
        finecast.apply({}, net)  # type: ignore[arg-type]


def test_a_name_that_is_too_long(net: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write the output: .*too long"):
        finecast.convert(net, net.with_name(f"{'o' * 300}.onnx"), "all:bf16")


TEXTS: dict[str, Callable[[onnx.ModelProto], None]] = {
    "graph.node[0].op_type": lambda m: setattr(m.graph.node[0], "op_type", MARK),
    "graph.node[0].domain": lambda m: setattr(m.graph.node[0], "domain", MARK),
    "graph.node[0].name": lambda m: setattr(m.graph.node[0], "name", MARK),
    "graph.node[0].doc_string": lambda m: setattr(m.graph.node[0], "doc_string", MARK),
    "graph.node[0].attribute[0].name": lambda m: setattr(
        m.graph.node[0].attribute.add(type=onnx.AttributeProto.INT), "name", MARK
    ),
    "graph.output[0].name": lambda m: setattr(m.graph.output[0], "name", MARK),
    "graph.input[0].type.tensor_type.shape.dim[0].dim_param": lambda m: setattr(
        m.graph.input[0].type.tensor_type.shape.dim[0], "dim_param", MARK
    ),
    "opset_import[1].domain": lambda m: setattr(m.opset_import.add(), "domain", MARK),
    "metadata_props[0].key": lambda m: setattr(m.metadata_props.add(), "key", MARK),
    "functions[0].node[0].input": lambda m: m.functions.add().node.add().input.append(MARK),
}
MARK = "no_utf8"


@pytest.mark.parametrize("place", TEXTS)
def test_text_in_onnx_that_is_no_utf8(place: str, net: Path) -> None:
    model = onnx.load(net)
    TEXTS[place](model)
    net.write_bytes(model.SerializeToString().replace(MARK.encode(), b"\xff\xfe_utf8"))
    said = rf"{re.escape(place)}, b'\\xff\\xfe_utf8', is no UTF-8"
    calls: list[Callable[[], object]] = [
        lambda: finecast.convert(net, None, "all:bf16"),
        lambda: finecast.inspect(net),
        lambda: finecast.diff(net, net),
        lambda: read_source(net),
    ]
    for call in calls:
        with pytest.raises(FinecastError, match=said) as raised:
            call()
        assert raised.value.exit_code == ExitCode.FAILED


@pytest.mark.parametrize("text", [b'type="Add"', b'names="y"', b'version="opset1"'])
def test_text_in_ir_that_is_no_utf8(text: bytes, net: Path) -> None:
    import openvino

    path = net.with_suffix(".xml")
    openvino.save_model(openvino.convert_model(net), path)
    assert text in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(text, text[:-2] + b'\xff"'))
    for call in (finecast.inspect, lambda path: finecast.convert(path, None, "all:bf16")):
        with pytest.raises(ModelError, match=r"line \d+ is no UTF-8, at .*\\xff"):
            call(path)


@pytest.mark.skipif(not installed("onnxruntime"), reason="needs ONNX Runtime")
def test_a_sequence_output(tmp_path: Path) -> None:
    """Its items are compared one by one."""
    made = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 4] x) => (seq(float[n, 2]) s)
<float[4, 2] w = {0.3, 0.7, -0.1, 0.9, 0.11, 0.6, -0.77, 0.2}>
{ y = MatMul (x, w) s = SequenceConstruct (y, y) }"""
    )
    onnx.save(made, tmp_path / "s.onnx")
    done = finecast.convert(tmp_path / "s.onnx", None, "all:fp16", engine="onnxruntime")
    assert done.verified.max_abs_error is not None
    assert 0 < done.verified.max_abs_error < 0.01


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_standard_output_is_full(options: list[str], net: Path) -> None:
    """The model is written, and the error says that."""
    out = net.with_name("low.onnx")
    command = [sys.executable, "-m", "finecast", "convert", str(net), "-o", str(out)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*command, "--auto-cast", "all", *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == ExitCode.USAGE
    *warnings, said = done.stderr.splitlines()
    assert said.startswith("error: cannot print the result: ")
    assert "files are written before the result is printed" in said
    # Another line says where the CPU is no faster in bf16.
    assert all("no speed is gained here" in warning for warning in warnings)
    onnx.checker.check_model(str(out))


def test_numbers_of_numpy_are_numbers(net: Path) -> None:
    given: dict[str, Any] = {"tolerance": np.float32(-1), "batch": np.int64(4)}
    call: Any = finecast.tune
    with pytest.raises(UsageError, match="'-1' is not a number"):
        call(net, data=X, max_trials=np.int64(1), progress=False, **given)


def test_arrays_in_another_byte_order(net: Path) -> None:
    swapped = np.arange(32, dtype=">f4").reshape(8, 4)
    np.savez(net.with_name("x.npz"), x=swapped)
    for data in ({"x": swapped}, net.with_name("x.npz"), [{"x": swapped}]):
        done = finecast.convert(net, None, "all:bf16", data=data)
        assert done.verified.max_abs_error is not None


def test_labels_that_are_dates(net: Path) -> None:
    data = {**X, "label": np.zeros(8, "datetime64[s]")}
    with pytest.raises(UsageError, match=r"top1 needs numbers or text, .* datetime64\[s\]"):
        finecast.tune(net, data=data, metric="top1")


@pytest.mark.parametrize("suffix", [".pt", ".PTH", ".safetensors", ".txt", ""])
def test_an_output_named_as_no_format_that_is_written(suffix: str, net: Path) -> None:
    with pytest.raises(UsageError, match=r"name it .*low\.onnx"):
        finecast.convert(net, net.with_name(f"low{suffix}"), "all:bf16")
    assert [p.name for p in net.parent.iterdir()] == ["net.onnx"]


def test_models_of_one_stem_have_plans_of_their_own() -> None:
    outputs = ["m", "m.onnx", "m.xml", "m.pt2", "m.v1", "m.v1.onnx"]
    assert [plan_beside(Path("to", name)).name for name in outputs] == [
        "m.saved_model.plan.json",
        "m.plan.json",
        "m.xml.plan.json",
        "m.pt2.plan.json",
        "m.v1.saved_model.plan.json",
        "m.v1.plan.json",
    ]


@pytest.mark.skipif(not installed("openvino"), reason="needs OpenVINO")
@pytest.mark.parametrize(("wide", "grows"), [(8, True), (512, False)])
def test_weights_in_8_bits_that_make_the_file_larger(
    wide: int, grows: bool, tmp_path: Path
) -> None:
    made = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, W] x) => (float[n, W] y) { y = MatMul (x, w) }""".replace("W]", f"{wide}]")
    )
    draw = np.random.default_rng(0).normal(size=(wide, wide)).astype(np.float32)
    made.graph.initializer.append(onnx.numpy_helper.from_array(draw, "w"))
    onnx.save(made, tmp_path / "net.onnx")
    done = finecast.convert(tmp_path / "net.onnx", tmp_path / "low.onnx", "all:int8_weights")
    assert (done.size_bytes[1] >= done.size_bytes[0]) == grows
    assert any("makes the model no smaller" in text for text in done.warnings) == grows


def test_arguments_too_many_or_too_few_name_the_verb_and_its_parameters(net: Path) -> None:
    with pytest.raises(TypeError, match=r"tune: too many positional .*model, output; all"):
        finecast.tune(net, "out.onnx", X)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="emulate: missing a required argument: 'target'"):
        finecast.emulate(net)  # pyright: ignore[reportCallIssue]


def test_a_result_in_place_of_a_model_says_what_it_has(net: Path) -> None:
    result = finecast.convert(net, policy="all:bf16", verify=False)
    with pytest.raises(UsageError, match=r"a Result is not a model: give .* plan=result.plan"):
        finecast.explain(result)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match=r"name of an op \(plan= .*, not .* type Plan"):
        finecast.explain(net, result.plan)  # pyright: ignore[reportArgumentType]

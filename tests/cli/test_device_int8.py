"""int8 on devices that are not here, as a user asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import openvino
import pytest
import torch
from onnx import numpy_helper, parser
from onnx.reference import ReferenceEvaluator

from finecast import api
from finecast.devices.emulation import Emulation, Scope, check
from finecast.devices.targets import load_target
from finecast.engines.loading import exact_engine
from finecast.errors import ExitCode, UsageError
from finecast.numbers.formats import Format
from tests.cli.conftest import Answer

Finecast = Callable[..., Answer]

NET = """<ir_version: 9, opset_import: ["" : 19]>
net (float[n, 1, 8, 8] x) => (float[n, 16] y)
<int64[2] flat = {-1, 64}> {
  [flatten] f = Reshape (x, flat)
  [one] a = MatMul (f, w)
  [act] r = Relu (a)
  [two] b = Gemm <transB = 1> (r, u)
  [conv] c = Conv <kernel_shape = [8, 8]> (x, k)
  [flat1] d = Flatten (c)
  [sum] e = Add (d, b)
  [head] y = MatMul (e, v)
}"""
SHAPES = {"w": (64, 64), "u": (64, 64), "k": (64, 1, 8, 8), "v": (64, 16)}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    draw = np.random.default_rng(0)
    made = parser.parse_model(NET)
    for name, shape in SHAPES.items():
        array = (draw.standard_normal(shape) / 8).astype(np.float32)
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(made, tmp_path / "net.onnx")
    np.savez(tmp_path / "x.npz", x=draw.standard_normal((16, 1, 8, 8)).astype(np.float32))
    return tmp_path / "net.onnx", tmp_path / "x.npz"


def test_one_emulation_for_every_verb(finecast: Finecast, files: tuple[Path, Path]) -> None:
    net, data = files
    options = ["--auto-cast-type", "int8", "--data", data]
    seen = finecast("emulate", net, "--target", "sm75", *options, "--json").json
    assert seen["options"] == "--auto-cast all --auto-cast-type int8"
    assert seen["cast_ops"] == 4  # of sums the device makes none on integers
    assert seen["output_error"] > 0
    assert {one["node"] for one in seen["ops"]} <= {"one", "two", "conv", "head"}
    out = net.with_name("low.onnx")
    options = ["--auto-cast", "all", *options]
    made = finecast("convert", net, "-o", out, "--target", "sm75", *options, "--json").json
    assert made["ops"]["int8"] == 4
    assert made["verified"]["engine"] == "emulator:sm75"
    assert made["verified"]["relative_error"] == pytest.approx(seen["output_error"], rel=0.01)
    # Of the sum of two 8-bit products in 32 bits no CPU's integer kernel may lose a bit.
    session = exact_engine().load(out)
    (reference,) = map(
        np.asarray, ReferenceEvaluator(onnx.load(out)).run(["y"], dict(np.load(data)))
    )
    found = session.run(dict(np.load(data)))["y"]
    assert np.abs(found - reference).max() <= 1e-5 * np.abs(reference).max()


def test_models_of_openvino_are_emulated_alike(
    finecast: Finecast, files: tuple[Path, Path]
) -> None:
    net, data = files
    given, out = net.with_suffix(".xml"), net.with_name("low.xml")
    openvino.save_model(openvino.convert_model(net), given, compress_to_fp16=False)
    options = ["--target", "sm75", "--auto-cast-type", "int8", "--data", data]
    wanted = finecast("emulate", net, *options, "--json").json
    seen = finecast("emulate", given, *options, "--json").json
    assert seen["cast_ops"] == wanted["cast_ops"]
    assert seen["output_error"] == pytest.approx(wanted["output_error"], rel=0.01)
    options = ["-o", out, "--auto-cast", "all", *options]
    made = finecast("convert", given, *options, "--json").json
    assert made["ops"]["int8"] == 4
    assert made["verified"]["engine"] == "emulator:sm75"
    assert made["verified"]["relative_error"] == pytest.approx(seen["output_error"], rel=0.01)


@pytest.fixture
def heavy(tmp_path: Path) -> tuple[Path, Path]:
    """A product whose weights are most of what is read."""
    draw = np.random.default_rng(0)
    text = """<ir_version: 9, opset_import: ["" : 19]>
    net (float[n, 2048] x) => (float[n, 8] y) {
      [large] a = MatMul (x, w)
      [small] y = MatMul (a, v)
    }"""
    made = parser.parse_model(text)
    for name, shape in (("w", (2048, 1024)), ("v", (1024, 8))):
        array = (draw.standard_normal(shape) / 30).astype(np.float32)
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(made, tmp_path / "heavy.onnx")
    np.savez(tmp_path / "heavy.npz", x=draw.standard_normal((4, 2048)).astype(np.float32))
    return tmp_path / "heavy.onnx", tmp_path / "heavy.npz"


KEPT = ("--metric", "cosine", "--tolerance", "0.01", "--auto-cast-type", "int8,bf16", "--json")


@pytest.mark.parametrize("target", ["inf1", "avx2-vnni"])
def test_tune_for_a_device_with_integers(
    target: str, finecast: Finecast, heavy: tuple[Path, Path]
) -> None:
    net, data = heavy
    out = net.with_name("low.onnx")
    found = finecast("tune", net, "-o", out, "--target", target, "--data", data, *KEPT).json
    assert found["verdict"] == "improved", found["why"]
    assert "QuantizeLinear" in {n.op_type for n in onnx.load(out).graph.node}


def test_tune_tries_every_format_that_gains_on_a_device(
    finecast: Finecast, heavy: tuple[Path, Path]
) -> None:
    net, data = heavy
    kept = ("--target", "AVX512-VNNI", "--metric", "cosine", "--tolerance", "0.01", "--json")
    found = finecast("tune", net, "-o", net.with_name("a.onnx"), "--data", data, *kept).json
    assert found["verdict"] == "improved", found["why"]
    assert {"int8", "int8_weights"} & found["ops"].keys()  # as fast, where weights are most
    assert "skipped: bf16, which avx512-vnni computes in a wider format" in found["why"]
    verified = finecast("verify", net.with_name("a.onnx"))
    assert verified.code == ExitCode.USAGE
    assert "and none for a --target; convert writes one with --lock" in verified.err


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
def test_weights_alone_on_devices_that_widen_them(
    suffix: str, finecast: Finecast, heavy: tuple[Path, Path]
) -> None:
    """Without data to convert; priced by the bytes that are read, emulated by their codes."""
    net, data = heavy
    given, out = net.with_suffix(suffix), net.with_name(f"low{suffix}")
    if suffix == ".xml":
        openvino.save_model(openvino.convert_model(net), given, compress_to_fp16=False)
    device = ("--target", "avx2-vnni", "--auto-cast-type", "int8_weights")
    kept = ("--data", data, "--metric", "cosine", "--tolerance", "0.01", "--json")
    seen = finecast("emulate", given, *device, *kept[:4], "--json").json
    assert seen["cast_ops"] == 2
    found = finecast("tune", given, "-o", out, *device, *kept).json
    assert found["verdict"] == "improved", found["why"]
    assert found["ops"]["int8_weights"] >= 1
    assert 0 < found["relative_error"]["measured"] < 2 * seen["output_error"]
    again = net.with_name(f"again{suffix}")
    made = finecast(
        "convert", given, "-o", again, "--auto-cast", "all", *device, "--json"
    ).json
    assert made["ops"] == {"int8_weights": 2}
    fewer = finecast(
        "tune", given, "-o", out, "--force", *device[:2], "--objective", "size", *kept
    )
    assert fewer.json["ops"]["int8_weights"] >= 1


@pytest.mark.parametrize("target", ["inf1", "sm80"])
def test_weights_alone_are_refused_where_no_kernel_is_known(
    target: str, files: tuple[Path, Path]
) -> None:
    with pytest.raises(UsageError, match="no kernels known that widen weights"):
        api.convert(files[0], None, "all:int8_weights", target=target)


def test_an_exported_program_is_tuned_in_what_it_can_state(tmp_path: Path) -> None:
    program = torch.export.export(torch.nn.Linear(16, 16), (torch.ones(4, 16),))
    torch.export.save(program, tmp_path / "net.pt2")
    x = np.ones((4, 16), np.float32)
    found = api.tune(
        tmp_path / "net.pt2", None, data={"input": x}, metric="cosine", target="avx512-vnni"
    )
    assert found.counts.keys() <= {"fp32", "bf16"}


def test_the_ladder_has_a_plan_on_integers(
    finecast: Finecast, heavy: tuple[Path, Path]
) -> None:
    pytest.importorskip("finecast_neuron")
    net, data = heavy
    found = finecast("ladder", net, "--target", "inf1", "--data", data, *KEPT).json
    assert found["per_op"]["ops"]["int8"] >= 1, found["per_op"]
    assert found["per_op"]["speed"] > max(r["speed"] for r in found["rungs"])


def test_what_a_device_has_no_integers_for_is_refused(files: tuple[Path, Path]) -> None:
    net, data = files
    nothing = "int8 with .*target trn1: the device has no such arithmetic"
    with pytest.raises(UsageError, match=nothing):
        api.tune(net, None, data=str(data), policy="auto:int8", target="trn1")
    with pytest.raises(UsageError, match=nothing):
        api.convert(net, None, "all:int8", target="trn1", data=str(data))
    with pytest.raises(UsageError, match=nothing):
        api.convert(net, None, "all:int8", engine="emulator:trn1", data=str(data))
    with pytest.raises(UsageError, match=nothing):
        api.explain(net, policy="all:int8", target="trn1", data=str(data))
    with pytest.raises(UsageError, match="needs the ranges"):
        api.convert(net, None, "all:int8", target="sm80")


def test_the_error_names_what_a_device_without_low_arithmetic_takes() -> None:
    emulation = Emulation(target=load_target("avx2"), scope=Scope.ALL, format=Format.INT8)
    with pytest.raises(UsageError) as raised:
        check(emulation)
    assert raised.value.fix == "use one of int8_weights, int4_weights, tf32, bf16, fp16"

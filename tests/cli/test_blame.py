"""``finecast blame`` as a user calls it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from benchmarks.blame_nets import to_fp16
from finecast.errors import ExitCode
from tests.cli.conftest import Answer
from tests.frontends.tools import parse

Finecast = Callable[..., Answer]


@pytest.fixture
def low(net: Path) -> Path:
    """The net in fp16."""
    path = net.with_name("low.onnx")
    onnx.save(to_fp16(onnx.load(net)), path)
    return path


@pytest.fixture
def wrong(low: Path) -> Path:
    """The same, whose product has other weights."""
    model = onnx.load(low)
    (weight,) = (t for t in model.graph.initializer if t.name == "w")
    rolled = np.ascontiguousarray(np.roll(numpy_helper.to_array(weight), 1, axis=1))
    weight.CopyFrom(numpy_helper.from_array(rolled, "w"))
    path = low.with_name("wrong.onnx")
    onnx.save(model, path)
    return path


def test_the_culprit_is_named_with_what_to_do(
    finecast: Finecast, net: Path, wrong: Path, data: Path
) -> None:
    done = finecast("blame", str(net), str(wrong), "--data", str(data))
    assert done.code == ExitCode.NOT_IMPROVED
    assert done.out.startswith("1 op to blame: relative output error ")
    assert "convert and tune keep them in fp32 by --exclude '^product$'" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    told = finecast("blame", str(net), str(wrong), "--data", str(data), "--json")
    assert told.code == ExitCode.NOT_IMPROVED
    (culprit,) = told.json["culprits"]
    assert (culprit["node"], culprit["format"]) == ("product", "fp16")
    assert told.json["first_wrong"]["node"] == "product"
    assert told.json["restored"] <= told.json["limit"] < told.json["value"]


def test_the_emulator_of_a_device_runs_the_joined_model(
    finecast: Finecast, net: Path, wrong: Path, data: Path
) -> None:
    """The joined model's switch was taken for the emulator's own, and not fed."""
    done = finecast("blame", net, wrong, "--data", data, "--engine", "emulator:trn1")
    assert done.code == ExitCode.NOT_IMPROVED, done.err
    assert "convert and tune keep them in fp32 by --exclude '^product$'" in done.out


def test_a_right_model_ends_with_0(
    finecast: Finecast, net: Path, low: Path, data: Path
) -> None:
    done = finecast("blame", str(net), str(low), "--data", str(data))
    assert done.code == ExitCode.DONE
    assert done.out.startswith("nothing to blame: relative output error ")
    assert "evaluation" in done.out


def test_it_says_whether_kernels_or_definitions_computed(
    finecast: Finecast, net: Path, low: Path, wrong: Path, data: Path
) -> None:
    """A file that an engine computed wrongly had nothing to blame, without a word of why."""
    for other in (low, wrong):
        told = finecast("blame", net, other, "--data", data).out.replace("\n", " ")
        assert "computed op by op, as the ops are defined" in told
        by_engine = ("blame", net, other, "--data", data, "--engine", "onnxruntime")
        assert "definitions of the ops" not in finecast(*by_engine).out.replace("\n", " ")
        assert finecast(*by_engine, "--json").json["engine"] == "onnxruntime"
    assert finecast("blame", net, low, "--data", data, "--json").json["engine"] is None
    emulated = finecast("blame", net, low, "--data", data, "--engine", "emulator:trn1")
    assert "definitions of the ops" not in emulated.out.replace("\n", " ")


def test_the_figure_says_how_many_samples_it_is_of(finecast: Finecast, tmp_path: Path) -> None:
    """That of the probed samples was given as that of all."""
    net, low, data = classifier(tmp_path, "float[n,16] y, int64[n,1] k")
    call = ("blame", net, low, "--data", data)
    found = finecast(*call)
    assert " on 128 samples " in found.out.replace("\n  ", " ")
    assert finecast(*call, "--json").json["samples"] == 128
    metric = finecast(*call, "--metric", "agreement", "--of", "k", "--json").json
    assert metric["samples"] is None
    assert "samples" not in metric["verdict"]


def test_a_check_from_a_file(
    finecast: Finecast, net: Path, wrong: Path, data: Path, tmp_path: Path
) -> None:
    file = tmp_path / "check.py"
    file.write_text("def close(name, low, fp32):\n    return abs(low - fp32).max() < 0.1\n")
    line = ("blame", str(net), str(wrong), "--data", str(data))
    done = finecast(*line, "--check", f"{file}:close", "--json")
    assert done.code == ExitCode.NOT_IMPROVED
    assert [c["node"] for c in done.json["culprits"]] == ["product"]
    file.write_text("def close(name, low, fp32):\n    return 1 / 0\n")
    failed = finecast(*line, "--check", f"{file}:close")
    assert failed.code == ExitCode.USER_CODE
    assert "the check function failed: ZeroDivisionError" in failed.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "no model is given to compare with"),
        (("LOW", "--plan", "p.json"), "more than one model is given to compare with"),
        (("LOW", "--auto-cast", "all"), "no device is named (--target)"),
        (("LOW", "--metric", "top1", "--max-error", "1"), "judged in two ways"),
    ],
)
def test_options_that_do_not_fit(
    finecast: Finecast, net: Path, low: Path, data: Path, words: tuple[str, ...], text: str
) -> None:
    given = [str(low) if word == "LOW" else word for word in words]
    done = finecast("blame", str(net), *given, "--data", str(data))
    assert done.code == ExitCode.USAGE
    assert text in done.err


CLASSES = """
net (float[n,16] x) => (OUTPUTS) { h = MatMul(x, w) [product] y = MatMul(h, w) k = ArgMax(y) }
"""


def classifier(folder: Path, outputs: str) -> tuple[str, str, str]:
    """A model, a low version whose classes are others, and data."""
    rng = np.random.default_rng(0)
    model = parse(CLASSES.replace("OUTPUTS", outputs), opset=17)
    w = rng.standard_normal((16, 16)).astype(np.float32) / 4
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    files = [folder / name for name in ("net.onnx", "low.onnx", "x.npz")]
    onnx.save(model, files[0])
    low = to_fp16(model)
    (weight,) = (t for t in low.graph.initializer if t.name == "w")
    noisy = w + 0.02 * rng.standard_normal(w.shape)
    weight.CopyFrom(numpy_helper.from_array(noisy.astype(np.float16), "w"))
    onnx.save(low, files[1])
    np.savez(files[2], x=rng.standard_normal((400, 16)).astype(np.float32))
    return str(files[0]), str(files[1]), str(files[2])


def test_integers_that_differ_are_an_error(finecast: Finecast, tmp_path: Path) -> None:
    """An error of 0 was said, as integers have none."""
    net, low, data = classifier(tmp_path, "int64[n,1] k")
    told = finecast("blame", net, low, "--data", data, "--json").json
    assert told["figure"] == "share of numbers that differ"
    assert 0.01 < told["value"] < 0.2
    assert not told["passed"]


def test_integers_that_differ_beside_floats_are_told(
    finecast: Finecast, tmp_path: Path
) -> None:
    net, low, data = classifier(tmp_path, "float[n,16] y, int64[n,1] k")
    told = finecast("blame", net, low, "--data", data, "--json").json
    assert told["figure"] == "relative output error"
    (text,) = (w for w in told["warnings"] if "without floats differ" in w)
    assert "% of k: --metric agreement --of NAME" in text


def test_the_worst_slice_is_named(finecast: Finecast, tmp_path: Path) -> None:
    """Boxes in pixels hide scores; which of them the figure is of was not said."""
    net, low = (tmp_path / name for name in ("net.onnx", "low.onnx"))
    text = """net (float[n,16] x) => (float[n,16] y) {
      a = MatMul(x, w) boxes = Abs(a) b = MatMul(x, v) scores = Sigmoid(b)
      large = Mul(boxes, k) moved = Add(large, k) y = Concat<axis = 1>(moved, scores) }"""
    model = parse(text, opset=17)
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal((16, 8)).astype(np.float32) for n in ("w", "v")}
    for name, array in (arrays | {"k": np.array(100, np.float32)}).items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(model, net)
    onnx.save(to_fp16(model), low)
    np.savez(tmp_path / "x.npz", x=rng.standard_normal((64, 16)).astype(np.float32))
    data = ("--data", str(tmp_path / "x.npz"))
    found = finecast("blame", str(net), str(low), *data)
    assert "relative output error of y[:, " in found.out.replace("\n  ", " ")
    snr = finecast(
        "blame", str(net), str(low), *data, "--metric", "snr_db", "--tolerance", "1"
    )
    assert "snr_db of y[:, " in snr.out

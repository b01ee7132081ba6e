"""Models whose tensors lie in a second file: of any size, in any place of the model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import openvino
import pytest
from onnx import TensorProto, helper

import finecast
from finecast.cli import main
from finecast.frontends import onnx as frontend
from tests.frontends.tools import Array, model, parse, run, tensor

RNG = np.random.default_rng(0)
DATA = "weights.bin"


def _of_nodes(nodes: Sequence[onnx.NodeProto]) -> Iterator[TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            for body in (
                *([attribute.g] if attribute.HasField("g") else ()),
                *attribute.graphs,
            ):
                yield from body.initializer
                yield from _of_nodes(body.node)


def tensors(proto: onnx.ModelProto) -> list[TensorProto]:
    functions = (t for f in proto.functions for t in _of_nodes(f.node))
    return [*proto.graph.initializer, *_of_nodes(proto.graph.node), *functions]


def put_apart(proto: onnx.ModelProto, path: Path) -> Path:
    """Save with every tensor that may be so in the file ``weights.bin`` beside it."""
    content = bytearray()
    for one in tensors(proto):
        if one.data_type == TensorProto.STRING:
            continue
        raw = (
            one.raw_data
            or onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(one)).raw_data
        )
        entries = {"location": DATA, "offset": len(content), "length": len(raw)}
        content += raw
        for field in ("raw_data", "float_data", "int32_data", "int64_data"):
            one.ClearField(field)
        one.data_location = TensorProto.EXTERNAL
        for key, value in entries.items():
            one.external_data.add(key=key, value=str(value))
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / DATA).write_bytes(content)
    path.write_bytes(proto.SerializeToString())
    return path


def indices() -> onnx.ModelProto:
    """Small int64 indices and fp32 scales, large weights; the opset has to be raised."""
    return model(
        [
            helper.make_node("Gather", ["table", "ids"], ["rows"]),
            helper.make_node("MatMul", ["x", "rows"], ["m"]),
            helper.make_node("Mul", ["m", "scale"], ["y"]),
        ],
        {"x": [2, 4]},
        {"y": [2, 32]},
        [
            tensor("table", RNG.normal(size=(40, 32))),
            tensor("ids", [1, 3, 5, 7], np.int64),
            tensor("scale", RNG.normal(size=32)),
        ],
        opset=12,
    )


def large_indices() -> onnx.ModelProto:
    """Indices over a kilobyte, which stay as they are."""
    proto = indices()
    proto.graph.initializer[1].CopyFrom(
        tensor("ids", np.arange(400) % 40, np.int64),
    )
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 400
    return proto


def constant_nodes() -> onnx.ModelProto:
    proto = indices()
    for weight in reversed(list(proto.graph.initializer)):
        node = helper.make_node("Constant", [], [weight.name], value=weight)
        proto.graph.node.insert(0, node)
    del proto.graph.initializer[:]
    return proto


def bodies() -> onnx.ModelProto:
    def body(number: int) -> onnx.GraphProto:
        weight, fill = f"w{number}", np.array([number + 1], np.float32)
        constant = helper.make_node("Constant", [], [f"k{number}"], value=tensor("", fill))
        nodes = [
            helper.make_node("MatMul", ["x", weight], [f"m{number}"]),
            helper.make_node("Mul", [f"m{number}", f"k{number}"], [f"o{number}"]),
        ]
        out = helper.make_tensor_value_info(f"o{number}", TensorProto.FLOAT, [2, 4])
        weights = [tensor(weight, RNG.normal(size=(400, 4)) if number else np.ones((400, 4)))]
        return helper.make_graph([constant, *nodes], f"b{number}", [], [out], weights)

    choice = tensor("c", True, np.bool_)
    branch = helper.make_node("If", ["c"], ["y"], then_branch=body(0), else_branch=body(1))
    return model([branch], {"x": [2, 400]}, {"y": [2, 4]}, [choice], opset=12)


def functions() -> onnx.ModelProto:
    return parse(
        """g (float[2,4] x) => (float[2,4] y) { y = own.scaled(x) }
        <domain: "own", opset_import: ["" : 12]>
        scaled (a) => (b) {
          k = Constant<value = float[4] {1, 2, 3, 4}>()
          i = Constant<value = int64[4] {0, 2, 1, 3}>()
          g = Gather<axis = 1>(a, i)
          b = Mul(g, k)
        }""",
        opset=12,
        imports='"own" : 1',
    )


def strings_and_small_types() -> onnx.ModelProto:
    """Four-bit weights; a table of strings, which ONNX has in the model only."""
    four = helper.make_tensor("q", TensorProto.UINT4, [4, 4], list(range(16)))
    names = TensorProto(name="names", data_type=TensorProto.STRING, dims=[2])
    names.string_data.extend([b"a", b"b"])
    proto = model(
        [
            helper.make_node("DequantizeLinear", ["q", "s"], ["w"]),
            helper.make_node("MatMul", ["x", "w"], ["y"]),
            helper.make_node("Gather", ["names", "one"], ["z"]),
        ],
        {"x": [2, 4]},
        {"y": [2, 4]},
        [four, names, tensor("s", 0.5), tensor("one", 1, np.int64)],
        opset=21,
        ir_version=10,
    )
    proto.graph.output.append(helper.make_tensor_value_info("z", TensorProto.STRING, []))
    return proto


BUILDS = (indices, large_indices, constant_nodes, bodies, functions, strings_and_small_types)


def feeds(path: Path) -> dict[str, Array]:
    x = onnx.load(path, load_external_data=False).graph.input[0]
    shape = [d.dim_value for d in x.type.tensor_type.shape.dim]
    return {"x": np.random.default_rng(1).normal(size=shape).astype(np.float32)}


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory where a file with the data's name holds other bytes."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / DATA).write_bytes(b"\x7f" * 100_000)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "way"),
    [("bf16", ()), ("fp16", ()), ("fp16", ("--one-file",)), ("fp16", ("--external-data",))],
    ids=lambda p: "".join(p),
)
@pytest.mark.parametrize("build", BUILDS, ids=lambda b: b.__name__)
def test_convert_alike_from_every_folder_and_never_refer_to_the_source(
    build: Callable[[], onnx.ModelProto],
    kind: str,
    way: tuple[str, ...],
    tmp_path: Path,
    foreign: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = build()
    source = put_apart(
        onnx.ModelProto.FromString(whole.SerializeToString()), tmp_path / "model" / "m.onnx"
    )
    low = ["--auto-cast", "all", "--auto-cast-type", kind, "--engine", "onnxruntime", *way]
    if kind == "bf16" or build is strings_and_small_types:
        low += ["--no-verify"]  # ONNX Runtime has no bf16 on CPUs, nor all of these types
    spellings = {"foreign": source, "own": Path("m.onnx"), "up": Path("../model/m.onnx")}
    for name, spelled in spellings.items():
        (tmp_path / name).mkdir(exist_ok=True)
        if name != "foreign":
            monkeypatch.chdir(source.parent)
        assert (
            main(["convert", str(spelled), "-o", str(tmp_path / name / "o.onnx"), *low]) == 0
        )
    written = [{p.name: p.read_bytes() for p in (tmp_path / n).glob("o.*")} for n in spellings]
    assert written[0] == written[1] == written[2]
    monkeypatch.chdir(foreign)
    shutil.rmtree(source.parent)
    _check(tmp_path / "foreign" / "o.onnx", whole, kind)


def _check(path: Path, whole: onnx.ModelProto, kind: str) -> None:
    """Valid, of its own data only, and near the source in the engines that can run it."""
    onnx.checker.check_model(path, full_check=True)
    proto = onnx.load(path, load_external_data=False)
    apart = [t for t in tensors(proto) if t.data_location == TensorProto.EXTERNAL]
    assert {e.value for t in apart for e in t.external_data if e.key == "location"} <= {
        "o.onnx.data"
    }
    given = feeds(path)
    wanted = run(whole, **given)[0]
    scale = float(np.abs(wanted).max())
    if kind == "fp16":
        assert float(np.abs(run(path, **given)[0] - wanted).max()) < 1e-2 * scale
    if not any(t.data_type == TensorProto.STRING for t in tensors(whole)):
        low = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        assert float(np.abs(low(given)[0] - wanted).max()) < 4e-2 * scale


def test_the_size_told_is_that_of_all_files(tmp_path: Path) -> None:
    path = put_apart(indices(), tmp_path / "m.onnx")
    files = sum(f.stat().st_size for f in tmp_path.iterdir())
    assert finecast.inspect(path).size_bytes == files > path.stat().st_size


def test_a_temporary_model_shares_the_data_that_it_leaves_as_they_are(tmp_path: Path) -> None:
    """A decoder of four gigabytes was written again for each look at its values."""
    table = RNG.normal(size=(40, 32)).astype(np.float32)
    proto = model(
        [
            helper.make_node("MatMul", ["x", "table"], ["m"]),
            helper.make_node("MatMul", ["m", "square"], ["y"]),
        ],
        {"x": [2, 40]},
        {"y": [2, 32]},
        [tensor("table", table), tensor("square", RNG.normal(size=(32, 32)))],
    )
    file = frontend.load(put_apart(proto, tmp_path / "net.onnx"))
    x = RNG.standard_normal((2, 40)).astype(np.float32)
    wanted = run(tmp_path / "net.onnx", x=x)[0]
    for factor, shared in ((1, True), (2, False)):
        folder = tmp_path / f"times{factor}"
        folder.mkdir()
        other = file.model.clone()
        if factor != 1:  # more than half of the numbers are its own
            other.graph.initializers["table"].const_value = ir.Tensor(table * factor)
        frontend.save(other, folder / "model.onnx", linking=True)
        names = {one.name for one in folder.iterdir()}
        assert names == {"model.onnx", "linked0.data" if shared else "model.onnx.data"}
        found = run(folder / "model.onnx", x=x)[0]
        np.testing.assert_allclose(found, factor * wanted, rtol=1e-5, atol=1e-5)
        shutil.rmtree(folder)
    assert (tmp_path / DATA).read_bytes()

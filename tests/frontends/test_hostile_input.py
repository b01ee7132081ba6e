"""Files that are broken or mean harm: one clear error each, in bounded memory and time."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import finecast
from finecast.cli import main
from finecast.errors import ExitCode, FinecastError, ModelError
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import native
from tests.frontends.tools import convert_file, model, parse, tensor
from tests.fuzz.mutate import mutated


def small() -> onnx.ModelProto:
    return parse(
        """
        g (bool c, float[2,4] x) => (float[2,4] y)
        <float[4,4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}>
        {
          h = MatMul (x, w)
          z = If (c) <
            then_branch = t () => (float[2,4] a) { a = Relu (h) },
            else_branch = e () => (float[2,4] b) { b = Exp (h) }
          >
          y = Softmax (z)
        }
        """
    )


def attempt(data: bytes, folder: Path, policy: str = "all:bf16") -> str:
    """Convert ``data``; the error's text, or nothing. Anything but FinecastError is a bug."""
    source, target = folder / "hostile.onnx", folder / "out.onnx"
    source.write_bytes(data)
    target.unlink(missing_ok=True)
    try:
        convert_file(source, target, policy)
    except FinecastError as error:
        text = str(error)
    else:
        return ""
    assert "\n" not in text
    return text


def test_every_truncation(tmp_path: Path) -> None:
    data = small().SerializeToString()
    for length in range(0, len(data), 7):
        attempt(data[:length], tmp_path)
    assert not list(tmp_path.glob(".finecast-*"))


@pytest.mark.long
@pytest.mark.parametrize("policy", ["all:fp16", "all:bf16"])
def test_flipped_bits_and_spliced_bytes(tmp_path: Path, policy: str) -> None:
    data, random = small().SerializeToString(), Random(0)
    for _ in range(150):
        attempt(mutated(data, random), tmp_path, policy)


def external(location: str, *, offset: int = 0, length: int | None = 64) -> onnx.ModelProto:
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4, 4])
    weight.data_location = TensorProto.EXTERNAL
    entries = {"location": location, "offset": str(offset)}
    if length is not None:
        entries["length"] = str(length)
    for key, value in entries.items():
        weight.external_data.add(key=key, value=value)
    return model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [2, 4]}, {"y": [2, 4]}, [weight]
    )


def outside(folder: Path) -> Path:
    secret = folder / "secret.bin"
    secret.write_bytes(bytes(64))
    return secret


def absolute(folder: Path, inner: Path) -> onnx.ModelProto:
    return external(str(outside(folder)))


def parent(folder: Path, inner: Path) -> onnx.ModelProto:
    outside(folder)
    return external("../secret.bin")


def symlink(folder: Path, inner: Path) -> onnx.ModelProto:
    (inner / "link.bin").symlink_to(outside(folder))
    return external("link.bin")


def linked_folder(folder: Path, inner: Path) -> onnx.ModelProto:
    outside(folder)
    (inner / "up").symlink_to(folder)
    return external("up/secret.bin")


def too_long(folder: Path, inner: Path) -> onnx.ModelProto:
    (inner / "w.bin").write_bytes(bytes(60))
    return external("w.bin")


def offset_beyond(folder: Path, inner: Path) -> onnx.ModelProto:
    (inner / "w.bin").write_bytes(bytes(64))
    return external("w.bin", offset=1 << 62)


def wrong_length(folder: Path, inner: Path) -> onnx.ModelProto:
    (inner / "w.bin").write_bytes(bytes(640))
    return external("w.bin", length=65)


def missing(folder: Path, inner: Path) -> onnx.ModelProto:
    return external("nowhere.bin")


def null_byte(folder: Path, inner: Path) -> onnx.ModelProto:
    return external("a\0b")


def no_location(folder: Path, inner: Path) -> onnx.ModelProto:
    return external("")


@pytest.mark.parametrize(
    ("build", "what"),
    [
        (absolute, "leaves the model's folder"),
        (parent, "leaves the model's folder"),
        (symlink, "leaves the model's folder"),
        (linked_folder, "leaves the model's folder"),
        (too_long, "is shorter than the 64 bytes"),
        (offset_beyond, f"is shorter than the {(1 << 62) + 64} bytes"),
        (wrong_length, "its shape takes 64"),
        (missing, "does not exist"),
        (null_byte, "cannot be found"),
        (no_location, "leaves the model's folder"),
    ],
    ids=lambda b: getattr(b, "__name__", ""),
)
@pytest.mark.parametrize("where", ["initializer", "constant", "body"])
def test_external_data(
    tmp_path: Path, build: Callable[[Path, Path], onnx.ModelProto], what: str, where: str
) -> None:
    inner = tmp_path / "model"
    inner.mkdir()
    proto = build(tmp_path, inner)
    weight = proto.graph.initializer.pop()
    if where == "initializer":
        proto.graph.initializer.append(weight)
    elif where == "constant":
        proto.graph.node.insert(0, helper.make_node("Constant", [], ["w"], value=weight))
    else:
        body = helper.make_graph(
            [helper.make_node("Identity", ["w"], ["o"])], "b", [], [], [weight]
        )
        proto.graph.node.append(helper.make_node("If", ["c"], ["z"], then_branch=body))
    (inner / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match=what):
        frontend.load(inner / "m.onnx")


def test_external_data_in_a_folder_below_is_fine(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "w.bin").write_bytes(np.eye(4, dtype=np.float32).tobytes())
    (tmp_path / "m.onnx").write_bytes(external("data/w.bin").SerializeToString())
    after, _, _ = convert_file(tmp_path / "m.onnx", tmp_path / "o.onnx", "all:fp16")
    assert after.graph.initializer[0].data_location != TensorProto.EXTERNAL or os.path.exists(
        tmp_path / "o.onnx.data"
    )


@pytest.mark.parametrize(
    ("dims", "size"),
    [
        ([4, 4], 63),
        ([4, 4], 68),
        ([1 << 40, 1 << 40], 0),
        ([-1, 4], 64),
        ([1 << 62], 64),
        ([], 64),
    ],
)
@pytest.mark.parametrize("raw", [True, False])
def test_declared_sizes_that_lie(
    tmp_path: Path, dims: list[int], size: int, raw: bool
) -> None:
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims)
    if raw:
        weight.raw_data = bytes(size)
    else:
        weight.float_data.extend([0.0] * (size // 4 + 3))
    proto = model(
        [helper.make_node("Add", ["x", "w"], ["y"])], {"x": [4]}, {"y": [4]}, [weight]
    )
    assert "declares" in attempt(proto.SerializeToString(), tmp_path)


def test_a_type_that_does_not_exist(tmp_path: Path) -> None:
    weight = TensorProto(name="w", data_type=99, dims=[1], raw_data=b"0000")
    proto = model(
        [helper.make_node("Add", ["x", "w"], ["y"])], {"x": [4]}, {"y": [4]}, [weight]
    )
    assert "unknown type 99" in attempt(proto.SerializeToString(), tmp_path)


def test_cycles(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Add", ["x", "b"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
    ]
    proto = model(nodes, {"x": [4]}, {"b": [4]})
    assert "cycle" in attempt(proto.SerializeToString(), tmp_path)
    proto = model([helper.make_node("Relu", ["a"], ["a"])], {"x": [4]}, {"a": [4]})
    assert attempt(proto.SerializeToString(), tmp_path)


def test_a_value_that_nothing_makes(tmp_path: Path) -> None:
    proto = model([helper.make_node("Add", ["x", "ghost"], ["y"])], {"x": [4]}, {"y": [4]})
    assert "'ghost'" in attempt(proto.SerializeToString(), tmp_path)


def functions(calls: list[list[int]]) -> onnx.ModelProto:
    """Function i calls the functions ``calls[i]`` one after the other."""
    ids = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    proto = model(
        [helper.make_node("f0", ["x"], ["y"], domain="f")],
        {"x": [4]},
        {"y": [4]},
        imports={"f": 1},
    )
    for number, callees in enumerate(calls):
        names = ["a", *(f"v{k}" for k in range(len(callees)))]
        body = [
            helper.make_node(f"f{c}", [names[k]], [names[k + 1]], domain="f")
            for k, c in enumerate(callees)
        ]
        body.append(helper.make_node("Relu", [names[-1]], ["b"]))
        proto.functions.append(
            helper.make_function("f", f"f{number}", ["a"], ["b"], body, ids)
        )
    return proto


@pytest.mark.parametrize("calls", [[[0]], [[1], [2], [0]], [[1, 1], [2], [1]]])
def test_recursive_functions(tmp_path: Path, calls: list[list[int]]) -> None:
    assert "calls itself" in attempt(functions(calls).SerializeToString(), tmp_path)


@pytest.mark.parametrize("verb", ["inspect", "profile", "emulate"])
def test_a_recursive_function_is_named_by_every_verb(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(functions([[0]]).SerializeToString())
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 2), np.float32))
    target = ["--target", "trn1", "--data", str(tmp_path / "x.npz")]
    assert main([verb, str(path), *(target if verb == "emulate" else [])]) == ExitCode.FAILED
    assert "calls itself" in capsys.readouterr().err


def test_graphs_without_a_name_get_one(tmp_path: Path) -> None:
    """Onnx's checker wants names, of bodies, too; engines do not."""
    given = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
g (float[2, 2] x, bool c) => (float[2, 2] y)
{ z = MatMul (x, x) y = If (c) <then_branch = a () => (float[2, 2] t) { t = Relu (z) },
                 else_branch = b () => (float[2, 2] e) { e = Neg (z) }> }"""
    )
    given.graph.name = ""
    for attribute in given.graph.node[1].attribute:
        attribute.g.name = ""
    path = tmp_path / "m.onnx"
    path.write_bytes(given.SerializeToString())
    for one in (path, given):
        finecast.convert(one, tmp_path / "low.onnx", "all:fp16", verify=False, force=True)
        onnx.checker.check_model(tmp_path / "low.onnx", full_check=True)


def test_functions_that_expand_without_end(tmp_path: Path) -> None:
    """A billion laughs: 30 functions, each of which calls the next one ten times."""
    calls = [[i + 1] * 10 for i in range(30)] + [[]]
    assert "expand to" in attempt(functions(calls).SerializeToString(), tmp_path)


def test_functions_called_from_functions_very_deep(tmp_path: Path) -> None:
    calls = [[i + 1] for i in range(20_000)] + [[]]
    assert "deep" in attempt(functions(calls).SerializeToString(), tmp_path)


def nested(depth: int) -> bytes:
    """A model whose node has a body, whose node has a body, and so on: only headers."""
    lengths, headers = 0, []
    for _ in range(depth):
        for tag in (6, 5, 1):  # AttributeProto.g, NodeProto.attribute, GraphProto.node
            header = bytes([tag << 3 | 2]) + _varint(lengths)
            headers.append(header)
            lengths += len(header)
    headers.append(bytes([7 << 3 | 2]) + _varint(lengths))  # ModelProto.graph
    return b"".join(reversed(headers))


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


@pytest.mark.parametrize("depth", [20, 40, 1_000, 1_000_000])
def test_nesting(tmp_path: Path, depth: int) -> None:
    assert attempt(nested(depth), tmp_path)


def test_memory_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here and in onnx's process: nothing tried to make what was only declared."""
    monkeypatch.setattr(native, "OF_MESSAGES", native.Bounds(memory=200_000_000))
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1 << 20, 1 << 20])
    proto = model(
        [helper.make_node("Add", ["x", "w"], ["y"])], {"x": [4]}, {"y": [4]}, [weight]
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    attempt(proto.SerializeToString(), tmp_path)
    said = attempt(
        model(
            [helper.make_node("ConstantOfShape", ["s"], ["y"])],
            {"x": [4]},
            {"y": None},
            [tensor("s", [1 << 20, 1 << 20], np.int64)],
        ).SerializeToString(),
        tmp_path,
    )
    assert "memory" not in said
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


def test_a_failed_save_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "out.onnx"
    target.write_bytes(b"precious")
    source = tmp_path / "in.onnx"
    source.write_bytes(small().SerializeToString())
    file = frontend.load(source)
    with pytest.raises(FinecastError, match="exists"):
        frontend.save(file.model, target)
    broken = file.model.clone()
    value = next(iter(broken.graph.initializers.values()))
    unreadable: Any = _Unreadable(numpy_helper.to_array(small().graph.initializer[0]))
    value.const_value = unreadable
    with pytest.raises(FinecastError, match="cannot write"):
        frontend.save(broken, target, force=True, external_data=True)
    assert target.read_bytes() == b"precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.onnx", "out.onnx"]


class _Unreadable:
    """A tensor whose file went away."""

    def __init__(self, array: np.ndarray) -> None:
        import onnx_ir as ir

        self.dtype, self.shape, self.name = ir.DataType.FLOAT, array.shape, "w"
        self.nbytes = 1 << 20
        self.size = array.size

    def tobytes(self) -> bytes:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("opset", [9, 17])
def test_an_untyped_value_where_onnx_itself_would_end_the_process(
    tmp_path: Path, opset: int
) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Mystery", ["r"], ["h"], domain="custom"),
        helper.make_node(
            "LabelEncoder",
            ["h"],
            ["y"],
            domain="ai.onnx.ml",
            keys_strings=["a"],
            values_int64s=[1],
            default_int64=0,
        ),
    ]
    given = model(nodes, {"x": [2]}, {}, opset=opset, imports={"ai.onnx.ml": 2, "custom": 1})
    given.graph.output.append(helper.make_tensor_value_info("y", TensorProto.INT64, [2]))
    said = attempt(given.SerializeToString(), tmp_path)
    assert "LabelEncoder" in said
    assert "type is not known" in said


def test_inputs_without_a_type(tmp_path: Path) -> None:
    given = small()
    given.graph.input[1].ClearField("type")
    assert "input 'x' has no type" in attempt(given.SerializeToString(), tmp_path)


@pytest.mark.parametrize(
    "equation", [b"i.j->ij", b"\xffij", b"ij-", b"i\0j", b"i" * 10**6 + b"!"]
)
def test_an_equation_that_onnx_reads_for_ever(equation: bytes, tmp_path: Path) -> None:
    node = helper.make_node("Einsum", ["x"], ["y"], equation="")
    node.attribute[0].s = equation
    said = attempt(model([node], {"x": [2, 3]}, {}).SerializeToString(), tmp_path)
    assert "Einsum has the equation" in said


@pytest.mark.parametrize("equation", ["ij->ji", " i j -> j i ", "...j->j...", "ij"])
def test_an_equation_that_onnx_defines(equation: str, tmp_path: Path) -> None:
    node = helper.make_node("Einsum", ["x"], ["y"], equation=equation)
    assert not attempt(model([node], {"x": [2, 3]}, {}).SerializeToString(), tmp_path)


def test_an_empty_tensor_of_huge_dimensions(tmp_path: Path) -> None:
    given = small()
    given.graph.initializer[0].CopyFrom(
        TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[0, 1 << 40, 1 << 40])
    )
    assert "beyond any memory" in attempt(given.SerializeToString(), tmp_path)


def test_an_attribute_of_another_kind(tmp_path: Path) -> None:
    node = helper.make_node("Unsqueeze", ["x"], ["y"], axes="")
    given = model([node], {"x": [2]}, {}, opset=11)
    assert "'axes' of Unsqueeze is of kind string" in attempt(
        given.SerializeToString(), tmp_path
    )


def test_an_input_of_more_elements_than_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnx's data propagation makes an object for each element of what a Slice reads.

    A long signal is no attack: such models are inferred without it.
    """
    monkeypatch.setattr(native, "OF_MESSAGES", native.Bounds(memory=256 << 20))
    node = helper.make_node("Slice", ["x", "starts", "ends"], ["y"])
    ends = [tensor("starts", [0], np.int64), tensor("ends", [2], np.int64)]
    given = model([node], {"x": [2935973616]}, {"y": [2]}, ends)
    del given.graph.value_info[:]
    with pytest.raises(native.PassDiedError, match="shape inference ran out of memory"):
        native.transform("infer", given, data_prop=1)
    assert attempt(given.SerializeToString(), tmp_path) == ""
    shapes = native.transform("infer", given, data_prop=0).graph
    assert shapes.output[0].type.tensor_type.shape.dim[0].dim_value == 2


def test_numbers_in_the_field_of_another_type(tmp_path: Path) -> None:
    given = small()
    given.graph.initializer[0].CopyFrom(
        TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[0], int32_data=[1])
    )
    assert "has some in int32_data" in attempt(given.SerializeToString(), tmp_path)

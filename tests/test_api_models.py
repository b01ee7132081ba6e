"""Models that callers hold in memory: taken, converted, tuned and given back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import finecast
from finecast import api
from finecast.errors import ModelError, UsageError
from tests.frontends.tools import model, run, tensor

RNG = np.random.default_rng(0)


@pytest.fixture
def net() -> onnx.ModelProto:
    """x -> MatMul -> Add -> y with 64 features, 8 classes."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Add", ["m", "b"], ["y"]),
    ]
    weights = [tensor("w", RNG.normal(size=(64, 8))), tensor("b", RNG.normal(size=8))]
    return model(nodes, {"x": ["N", 64]}, {"y": ["N", 8]}, weights)


KINDS: tuple[Callable[[onnx.ModelProto], object], ...] = (lambda m: m, ir.from_proto)


@pytest.mark.parametrize("kind", KINDS, ids=["ModelProto", "ir.Model"])
def test_convert_gives_the_model_back(
    net: onnx.ModelProto, kind: Callable[[onnx.ModelProto], api.Model], tmp_path: Path
) -> None:
    before = net.SerializeToString()
    given: Any = kind(net)
    done = finecast.convert(given, policy="all:fp16", engine="onnxruntime")
    assert type(done.model) is type(given)
    model: Any = done.model
    low = model if isinstance(model, onnx.ModelProto) else ir.to_proto(model)
    onnx.checker.check_model(low, full_check=True)
    assert done.verified.engine == "onnxruntime"
    assert net.SerializeToString() == before
    x = RNG.normal(size=(4, 64)).astype(np.float32)
    np.testing.assert_allclose(run(low, x=x)[0], run(net, x=x)[0], atol=0.1)
    # And it is what the same model gives as a file.
    onnx.save(net, tmp_path / "net.onnx")
    finecast.convert(
        tmp_path / "net.onnx", tmp_path / "low.onnx", "all:fp16", engine="onnxruntime"
    )
    if isinstance(given, onnx.ModelProto):  # onnx_ir writes other bytes of the same model
        written = onnx.load(tmp_path / "low.onnx")
        for converted in (low, written):  # each names what it was made of
            (name,) = (p for p in converted.metadata_props if p.key == "finecast.original")
            converted.metadata_props.remove(name)
        assert low.SerializeToString() == written.SerializeToString()


def test_every_verb_takes_a_model_in_memory(net: onnx.ModelProto, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=RNG.normal(size=(32, 64)).astype(np.float32))
    loaded = finecast.load(net)
    assert finecast.load(loaded) is loaded
    assert api.inspect(net).parameters == 64 * 8 + 8
    outcome = finecast.tune(net, data=tmp_path / "d.npz", metric="agreement")
    assert outcome.plan.model == loaded.digest
    assert isinstance(outcome.model, onnx.ModelProto)
    assert not outcome.source.exists()  # a command with its temporary file would be told
    applied = finecast.apply(outcome.plan, net)
    assert applied.model is not None


@pytest.mark.parametrize(
    "beside",
    [
        {"metric": "cosine"},
        {"labels": "y"},
        {"evaluate": lambda run: 1.0},
        {"calib": "c.npz"},
        {"batch": 4},
        {"lower_is_better": True},
    ],
)
def test_options_of_data_stand_in_one_place(
    net: onnx.ModelProto, beside: dict[str, Any]
) -> None:
    data = api.DataOptions(data={"x": RNG.normal(size=(32, 64)).astype(np.float32)})
    with pytest.raises(UsageError, match=f"{next(iter(beside))} is given beside DataOptions"):
        finecast.tune(net, data=data, **beside)


def test_a_digest_covers_external_data(net: onnx.ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(net, path, save_as_external_data=True, location="w.bin")
    first = finecast.load(path)
    assert finecast.load(ir.load(path)).model.graph.initializers["w"].const_value is not None
    data = bytearray((tmp_path / "w.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "w.bin").write_bytes(data)
    assert finecast.load(path).digest != first.digest


def test_a_loaded_model_outlives_the_working_directory(
    net: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(net, tmp_path / "net.onnx", save_as_external_data=True, location="w.bin")
    monkeypatch.chdir(tmp_path)
    loaded = finecast.load("net.onnx")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert finecast.convert(loaded, policy="all:fp16", engine="onnxruntime").model is not None


def test_temporary_files_go_with_the_model(net: onnx.ModelProto) -> None:
    loaded = finecast.load(net)
    folder = loaded.path.parent
    assert loaded.path.exists()
    del loaded
    gc.collect()
    assert not folder.exists()


def test_what_is_no_whole_model_is_refused(net: onnx.ModelProto, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a dict is not a model"):
        finecast.load({})  # pyright: ignore[reportArgumentType]
    net.graph.initializer[0].data_location = TensorProto.EXTERNAL
    with pytest.raises(ModelError, match="the elements of 'w' are in another file"):
        finecast.load(net)
    with pytest.raises(ModelError, match=r"no graph \(the ModelProto that was given\)"):
        finecast.load(onnx.ModelProto())


def test_data_are_read_by_the_engine_that_is_asked_for(
    net: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    # OpenVINO ends the process at some models, for which a user asks for another engine
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("not the engine that was asked for")

    monkeypatch.setattr("finecast.engines.openvino.OpenVinoEngine.load", loaded)
    (given,) = net.graph.input
    shape = [d.dim_value or 2 for d in given.type.tensor_type.shape.dim]
    data = {given.name: np.ones(shape, np.float32)}
    done = api.convert(net, policy="all:fp16", engine="onnxruntime", data=data)
    assert done.verified.engine == "onnxruntime"

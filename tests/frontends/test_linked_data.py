"""Caches of Hugging Face's hub: a model and its data are links to files beside each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from finecast import api
from finecast.engines import get_engine
from finecast.errors import EngineError, ModelError
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx.model import without_links

DATA = "model.onnx_data"
SIZE = 32


def save(folder: Path, location: str = DATA) -> None:
    """``h1`` and ``h2``, as blobs: the model, and data that it calls ``location``."""
    weight = numpy_helper.from_array(np.eye(SIZE, dtype=np.float32), "w")
    (folder / "h2").write_bytes(weight.raw_data)
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    ports = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", SIZE]) for n in ("x", "y")
    ]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="mm")]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], [weight])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "h1").write_bytes(proto.SerializeToString())


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """A model as huggingface_hub lays it out."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc" / "onnx"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save(blobs)
    (snapshot / "model.onnx").symlink_to("../../../blobs/h1")
    (snapshot / DATA).symlink_to("../../../blobs/h2")
    return snapshot / "model.onnx"


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_a_cached_model_is_converted_and_verified(
    cached: Path, engine: str, tmp_path: Path
) -> None:
    done = api.convert(cached, tmp_path / "out.onnx", "all:fp16", engine=engine)
    assert done.verified.engine == engine
    assert not (tmp_path / "out.onnx").is_symlink()
    frontend.check(tmp_path / "out.onnx")


def test_a_path_through_other_folders_is_the_same(cached: Path) -> None:
    cached.parent.with_name("other").mkdir()
    path = cached.parent.with_name("other") / ".." / "onnx" / "model.onnx"
    x = np.ones((1, SIZE), np.float32)
    assert (get_engine("openvino").load(path).run({"x": x})["y"] == x).all()


def test_data_is_copied_where_no_hard_link_can_be(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refused)
    with without_links(cached) as place:
        assert isinstance(place, Path)
        assert not (place.parent / DATA).is_symlink()
        assert (place.parent / DATA).read_bytes() == (cached.parent / DATA).read_bytes()
    assert not place.exists()


def secret(cached: Path) -> Path:
    file = cached.parents[3] / "secret"
    file.write_bytes(bytes(4 * SIZE * SIZE))
    return file


def linked_elsewhere(cached: Path) -> None:
    """The data are a link to another folder than the model's."""
    (cached.parent / DATA).unlink()
    (cached.parent / DATA).symlink_to(secret(cached))


def passwords(cached: Path) -> None:
    (cached.parent / DATA).unlink()
    (cached.parent / DATA).symlink_to("/etc/passwd")


def real_model(cached: Path) -> None:
    content = cached.read_bytes()
    cached.unlink()
    cached.write_bytes(content)


def no_link_of_its_own(cached: Path) -> None:
    """The data are no entry of the model's folder, but named by a way out of it."""
    (cached.parent / DATA).unlink()
    save(cached.parents[3] / "blobs", "../../../blobs/h2")


def in_a_linked_folder(cached: Path) -> None:
    """The entry that is a link lies in a folder that is one too."""
    (cached.parent / DATA).unlink()
    outside = cached.parents[3] / "outside"
    outside.mkdir()
    (outside / "data").symlink_to("../blobs/h2")
    (cached.parent / "sub").symlink_to(outside)
    save(cached.parents[3] / "blobs", "sub/data")


def by_way_of_the_parent(cached: Path) -> None:
    save(cached.parents[3] / "blobs", "../onnx/" + DATA)


@pytest.mark.parametrize(
    "attack",
    [
        linked_elsewhere,
        passwords,
        real_model,
        no_link_of_its_own,
        in_a_linked_folder,
        by_way_of_the_parent,
    ],
)
def test_other_links_stay_refused(cached: Path, attack: object) -> None:
    assert callable(attack)
    attack(cached)
    with pytest.raises(ModelError, match="leaves the model's folder"):
        frontend.load(cached)
    with without_links(cached) as place:  # nothing is brought where an engine would read it
        assert place == cached
    with pytest.raises(EngineError):
        get_engine("openvino").load(cached)

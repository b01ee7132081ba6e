"""Signatures of a SavedModel, of which OpenVINO reads one."""

from __future__ import annotations

from pathlib import Path

import pytest

from finecast.errors import ModelError
from finecast.frontends.openvino.model import load
from finecast.frontends.saved_models import NOTES_FILE, notes_in, taken_signature
from finecast.planning.provenance import Provenance


def message(number: int, content: bytes) -> bytes:
    """A field of protobuf's with short content."""
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def saved(folder: Path, *names: str) -> Path:
    entries = [message(5, message(1, name.encode()) + message(2, b"")) for name in names]
    (folder / "saved_model.pb").write_bytes(b"\x08\x01" + message(2, b"".join(entries)))
    return folder


@pytest.mark.parametrize(
    "names",
    [
        ("scores",),
        ("serving_default", "__saved_model_init_op"),
        ("scores", "__saved_model_init_op"),
    ],
)
def test_one_signature_is_read(names: tuple[str, ...], tmp_path: Path) -> None:
    assert not taken_signature(saved(tmp_path, *names))


def test_none_is_told_as_tensorflow_does(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no signatures") as caught:
        taken_signature(saved(tmp_path, "__saved_model_init_op"))
    assert "signatures=" in str(caught.value.fix)


def test_several_without_the_usual_one_are_listed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'features', 'scores'") as caught:
        taken_signature(saved(tmp_path, "scores", "__saved_model_init_op", "features"))
    assert "signatures=" in str(caught.value.fix)


@pytest.mark.parametrize("content", [b"", b"\x12\x7fshort", b"no protobuf"])
def test_what_is_no_saved_model_is_told_by_openvino(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").write_bytes(content)
    assert not taken_signature(tmp_path)


@pytest.mark.parametrize("name", ["net.keras", "net.xml", "net.tflite"])
def test_a_folder_is_a_saved_model_whatever_its_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "saved_model.pb").write_bytes(b"no protobuf")
    with pytest.raises(ModelError, match="cannot be read as a SavedModel"):
        load(folder)


def test_a_folder_of_another_kind(tmp_path: Path) -> None:
    assert not taken_signature(tmp_path)


def noted(folder: Path, text: str) -> Path:
    (folder / NOTES_FILE).parent.mkdir()
    (folder / NOTES_FILE).write_text(text, encoding="utf-8")
    return folder


def test_the_conversion_that_made_it_is_read(tmp_path: Path) -> None:
    notes = notes_in(noted(tmp_path, '{"policy": "all:bf16", "plan": "0"}'))
    assert Provenance.read(notes) == Provenance(plan="0", policy="all:bf16")


@pytest.mark.parametrize("text", ["", "[1]", "{}", "no notes", '{"plan": 0}'])
def test_other_notes_are_of_no_conversion(text: str, tmp_path: Path) -> None:
    notes = notes_in(noted(tmp_path, text))
    assert Provenance.read(notes) is None
    assert notes.keys() <= {"plan"}

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from finecast.data.datasets import Dataset, data_set, open_npz
from finecast.engines.base import TensorSpec
from finecast.errors import UsageError

X = np.arange(30, dtype=np.float32).reshape(10, 3)
SPEC = TensorSpec(name="x", dtype="fp32", shape=("N", 3))


def saved(path: Path, *, compressed: bool = False, **arrays: Any) -> Path:
    file = path / "data.npz"
    (np.savez_compressed if compressed else np.savez)(file, **arrays)
    return file


def load_npz(path: Path, inputs: Sequence[TensorSpec], **options: Any) -> Dataset:
    return data_set(open_npz(path), inputs, where=str(path), **options)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("size", [1, 3, 10, 99])
def test_batches_cover_every_sample_once_in_order(
    tmp_path: Path, size: int, compressed: bool
) -> None:
    labels = np.arange(10)
    file = saved(tmp_path, compressed=compressed, x=X, label=labels)
    batches = list(load_npz(file, [SPEC]).batches(size))
    np.testing.assert_array_equal(np.concatenate([b.feeds["x"] for b in batches]), X)
    found = [b.labels for b in batches if b.labels is not None]
    np.testing.assert_array_equal(np.concatenate(found), labels)
    assert [b.count for b in batches[:-1]] == [size] * (len(batches) - 1)


def test_stored_arrays_are_mapped_not_loaded(tmp_path: Path) -> None:
    order = np.asfortranarray(X)
    data = load_npz(saved(tmp_path, x=order), [SPEC])
    assert isinstance(data.arrays["x"], np.memmap)
    np.testing.assert_array_equal(data.arrays["x"], X)


def test_limit(tmp_path: Path) -> None:
    data = load_npz(saved(tmp_path, x=X), [SPEC])
    assert [b.count for b in data.batches(4, limit=6)] == [4, 2]


def test_a_fixed_batch_fills_the_last_one_up(tmp_path: Path) -> None:
    spec = TensorSpec(name="x", dtype="fp32", shape=(4, 3))
    data = load_npz(saved(tmp_path, x=X, label=np.arange(10)), [spec])
    assert data.fixed_batch == 4
    *_, last = data.batches(99)
    assert last.feeds["x"].shape == (4, 3)
    np.testing.assert_array_equal(last.feeds["x"], X[[8, 9, 9, 9]])
    assert last.labels is not None
    assert last.labels.tolist() == [8, 9]
    outputs = last.trim({"y": np.arange(4), "total": np.ones(1)})
    assert outputs["y"].tolist() == [0, 1]
    assert outputs["total"].tolist() == [1]


def test_samples_lie_where_the_model_has_its_batch_dimension(tmp_path: Path) -> None:
    specs = [
        TensorSpec(name="x", dtype="fp32", shape=("N", 3)),
        TensorSpec(name="state", dtype="fp32", shape=(2, "N", 5)),
        TensorSpec(name="rate", dtype="int64", shape=()),
        TensorSpec(name="table", dtype="fp32", shape=(4, 4)),
    ]
    state = np.arange(100, dtype=np.float32).reshape(2, 10, 5)
    file = saved(tmp_path, x=X, state=state, rate=np.array(16000), table=np.eye(4, dtype="f4"))
    data = load_npz(file, specs)
    assert data.axes == {"x": 0, "state": 1, "rate": None, "table": None}
    _, second, *_ = data.batches(4)
    np.testing.assert_array_equal(second.feeds["state"], state[:, 4:8])
    assert second.feeds["rate"].shape == ()
    assert second.feeds["table"].shape == (4, 4)


@pytest.mark.parametrize(
    ("array", "dtype", "wanted"),
    [
        (X.astype(np.float64), "fp32", np.float32),
        (X, "bf16", ml_dtypes.bfloat16),
        (X.astype(np.int32), "int64", np.int64),
    ],
)
def test_feeds_have_the_models_types(
    tmp_path: Path, array: np.ndarray, dtype: str, wanted: type[np.generic]
) -> None:
    spec = TensorSpec(name="x", dtype=dtype, shape=("N", 3))
    (batch,) = load_npz(saved(tmp_path, x=array), [spec]).batches(10)
    assert batch.feeds["x"].dtype == np.dtype(wanted)
    np.testing.assert_array_equal(batch.feeds["x"].astype(np.float64), X)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"y": X}, r"input 'x' is missing .*: the arrays are y"),
        ({"x:0": X}, r"are x:0; name them as inputs: .*numpy.savez\(FILE, \*\*\{'x': ARRAY\}"),
        ({"x": X, "extra": X}, "array 'extra' is neither an input nor the labels"),
        ({"x": X[:, :2]}, r"array 'x' has shape \[10, 2\], expected \[N, 3\]"),
        ({"x": X[0]}, r"array 'x' has shape \[3\], expected \[N, 3\]"),
        ({"x": X.astype(np.uint8)}, "array 'x' has type uint8, expected fp32"),
        ({"x": X[:0]}, "the data has no samples"),
        ({"x": X, "label": np.arange(9)}, "array 'label' has 9 samples, 'x' has 10"),
        ({"x": X, "label": np.array(1)}, "array 'label' is a single number"),
        ({"x": np.array([{}])}, "cannot be read"),
        ({"x": np.array(["a"])}, "array 'x' has type string, expected fp32"),
    ],
)
def test_data_that_does_not_fit(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load_npz(saved(tmp_path, **arrays), [SPEC])
    assert "\n" not in str(caught.value)


def test_a_model_without_inputs_takes_no_array(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"'x' is neither .*: the model has no inputs; labels"
    ):
        load_npz(saved(tmp_path, x=X), [])


def test_labels_by_name(tmp_path: Path) -> None:
    file = saved(tmp_path, x=X, y=np.arange(10))
    data: Dataset = load_npz(file, [SPEC], labels="y")
    assert data.labels is not None
    with pytest.raises(UsageError, match="label array 'z' is missing"):
        load_npz(file, [SPEC], labels="z")


def test_labels_have_one_of_two_usual_names() -> None:
    inputs = (TensorSpec(name="x", dtype="fp32", shape=("n", 2)),)
    x, y = np.ones((3, 2), np.float32), np.arange(3)
    for name in ("label", "labels"):
        labels = data_set({"x": x, name: y}, inputs).labels
        assert labels is not None
        assert labels.tolist() == [0, 1, 2]
    own = (*inputs, TensorSpec(name="labels", dtype="int64", shape=("n",)))
    assert data_set({"x": x, "labels": y}, own).labels is None  # an input is none


def test_folders_and_other_files_are_told_how_to_be_given(tmp_path: Path) -> None:
    """Folders of .npy files and tables: the advice was to check the path."""
    np.save(tmp_path / "x.npy", X)
    for given in (tmp_path, tmp_path / "x.npy"):
        with pytest.raises(UsageError, match="one file, named as the inputs") as caught:
            open_npz(given)
        assert "--data FILE.py:FUNCTION" in str(caught.value.fix)


def test_a_single_array_is_told_from_a_broken_file(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    with pytest.raises(UsageError, match=r"one array without a name .*: save all samples"):
        open_npz(tmp_path / "x.npy")


def test_files_that_are_no_npz(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load_npz(tmp_path / "none.npz", [SPEC])
    text = tmp_path / "text.npz"
    text.write_text("hello")
    with pytest.raises(UsageError, match=r"not an \.npz file"):
        load_npz(text, [SPEC])
    file = saved(tmp_path, x=X)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UsageError, match=r"not an \.npz file"):
        load_npz(file, [SPEC])


def test_a_batch_has_at_least_one_sample(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="batch size 0"):
        next(load_npz(saved(tmp_path, x=X), [SPEC]).batches(0))


def test_nan_in_the_data_is_refused(tmp_path: Path) -> None:
    broken = X.copy()
    broken[7, 1] = np.nan
    data = load_npz(saved(tmp_path, x=broken), [SPEC])
    with pytest.raises(UsageError, match="array 'x' holds NaN"):
        list(data.batches(4))


@pytest.mark.parametrize("kind", ["U", "S", "O"])
def test_text_is_taken_by_inputs_of_text(kind: str) -> None:
    spec = TensorSpec(name="words", dtype="string", shape=("N",))
    (batch,) = data_set({"words": np.array(["a", "bc"]).astype(kind)}, [spec]).batches(2)
    assert batch.feeds["words"].dtype == object
    assert batch.feeds["words"].tolist() == ["a", "bc"]


GRAPH = [
    TensorSpec(name="x", dtype="fp32", shape=("nodes", 3)),
    TensorSpec(name="edges", dtype="int64", shape=(2, "edges")),
]
EDGES = np.zeros((2, 40), np.int64)


def test_unlike_sample_axes_name_the_ways_out() -> None:
    with pytest.raises(UsageError) as caught:
        data_set({"x": X, "edges": EDGES}, GRAPH)
    for word in ("evaluate", "calib", "sample_axes edges=none"):
        assert word in str(caught.value)


def test_inputs_that_all_samples_share() -> None:
    arrays = {"x": X, "edges": EDGES, "label": np.arange(10)}
    data = data_set(arrays, GRAPH, sample_axes={"edges": None})
    assert [b.feeds["edges"].shape for b in data.batches(5)] == [(2, 40), (2, 40)]
    # One graph: one batch, and all of its labels.
    whole = data_set(arrays, GRAPH, sample_axes={"edges": None, "x": None})
    (batch,) = whole.batches(4)
    assert batch.labels is not None
    assert (batch.feeds["x"].shape, len(batch.labels)) == ((10, 3), 10)
    with pytest.raises(UsageError, match=r"unknown input 'edge' \(.*sample_axes\).*edges"):
        data_set(arrays, GRAPH, sample_axes={"edge": None})
    for axis in (2, -1):
        with pytest.raises(UsageError, match=rf"no axis {axis} \(DataOptions\.sample_axes\)"):
            data_set(arrays, GRAPH, sample_axes={"x": axis})


@pytest.mark.parametrize(
    ("model", "shape", "order"),
    [
        (("N", 3, 8, 8), (5, 8, 8, 3), (0, 3, 1, 2)),
        (("N", 3, "H", "W"), (5, 24, 16, 3), (0, 3, 1, 2)),
        (("N", 8, 8, 3), (5, 3, 8, 8), (0, 2, 3, 1)),
        (("N", 12, 100), (5, 100, 12), (0, 2, 1)),
    ],
)
def test_transposed_data_gets_the_transpose(
    model: tuple[int | str, ...], shape: tuple[int, ...], order: tuple[int, ...]
) -> None:
    spec = TensorSpec(name="x", dtype="fp32", shape=model)
    array = np.zeros(shape, np.float32)
    with pytest.raises(UsageError) as caught:
        data_set({"x": array}, [spec])
    assert str(caught.value).endswith(f"save array.transpose{order}")
    assert data_set({"x": array.transpose(order)}, [spec]).size == 5


def test_samples_are_never_advised_to_change_places_with_another_axis() -> None:
    spec = TensorSpec(name="x", dtype="fp32", shape=(5, 3, 4))
    with pytest.raises(UsageError) as caught:
        data_set({"x": np.zeros((3, 5, 4), np.float32)}, [spec])
    assert "transpose" not in str(caught.value)


def _with_header(path: Path, header: bytes, content: bytes = b"\0" * 16) -> Path:
    """An npz with one compressed array ``x`` whose header is given as it is."""
    start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", start + content)
    return path


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 4)}\n",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -4)}\n",
        b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': " + b"(" * 5000 + b"\n",
        b"{'descr': '<f4', 'shape': ",
        b"-" * 9000 + b"1\n",
    ],
)
def test_headers_that_lie_take_no_memory(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(UsageError, match=r"an array cannot be read.*x\.npz"):
        open_npz(_with_header(tmp_path / "x.npz", header))


def test_compressed_arrays_are_bounded_and_the_bound_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = tmp_path / "big.npz"
    np.savez_compressed(big, x=np.zeros((1 << 20, 4), np.float32))
    assert big.stat().st_size < 100_000
    assert open_npz(big)["x"].shape == (1 << 20, 4)
    monkeypatch.setattr("finecast.data.datasets._COMPRESSED_MOST", 1 << 23)
    words = r"compressed arrays of 0\.0 GiB, 'x\.npy' the largest: 0\.0078125 GiB are the most"
    with pytest.raises(UsageError, match=words + r".*savez: what is not compressed"):
        open_npz(big)


def test_compressed_arrays_are_read_as_numpy_reads_them(tmp_path: Path) -> None:
    arrays = {
        "c": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        "f": np.asfortranarray(np.arange(6, dtype=np.int64).reshape(2, 3)),
        "s": np.array(["a", "bc"]),
        "n": np.array(3.5),
        "e": np.zeros((0, 4), np.float32),
    }
    np.savez_compressed(tmp_path / "a.npz", **arrays)  # pyright: ignore[reportArgumentType]
    found = open_npz(tmp_path / "a.npz")
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_name_given_twice_is_told(tmp_path: Path) -> None:
    path = tmp_path / "twice.npz"
    np.savez(path, x=np.zeros(3))
    with (
        zipfile.ZipFile(path, "a") as archive,
        pytest.warns(UserWarning, match="Duplicate name"),
    ):
        archive.writestr("x.npy", archive.read("x.npy"))
    with pytest.raises(UsageError, match="two arrays are called 'x'"):
        open_npz(path)

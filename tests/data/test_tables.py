"""Tables, folders of images and functions as the samples of a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finecast.data.datasets import Dataset
from finecast.data.options import DataOptions
from finecast.data.sources import given_samples
from finecast.data.streams import Stream
from finecast.data.tables import ImageFolder, samples_of, table_in
from finecast.engines.base import Array, Session, TensorSpec
from finecast.errors import UsageError, UserCodeError

X = np.arange(12, dtype=np.float32).reshape(6, 2)
SPEC = TensorSpec(name="x", dtype="fp32", shape=("N", 2))
IMAGES = TensorSpec(name="x", dtype="fp32", shape=(4, 3, 2, 2))


class Inputs(Session):
    """A model of which only the inputs are looked at."""

    def __init__(self, *inputs: TensorSpec) -> None:
        self.inputs = self.outputs = inputs

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        raise NotImplementedError


class Table:
    """A table as those of pyarrow and ``datasets``."""

    def __init__(self, **columns: Any) -> None:
        self.columns_by_name = columns

    @property
    def column_names(self) -> list[str]:
        return list(self.columns_by_name)

    def __len__(self) -> int:
        return len(next(iter(self.columns_by_name.values())))

    def __getitem__(self, name: str) -> Any:
        return self.columns_by_name[name]


def samples(data: Any, spec: TensorSpec = SPEC, **options: Any) -> Dataset | Stream:
    stated = DataOptions(data=data, **options).loaded()
    assert stated.data is not None
    return given_samples(stated.data, stated, Inputs(spec), labels=stated.labels)


def whole(data: Any, spec: TensorSpec = SPEC, **options: Any) -> tuple[Array, list[int]]:
    """All samples and labels."""
    batches = list(samples(data, spec, **options).batches(4))
    feeds = [batch.feeds["x"][: batch.count] for batch in batches]
    labels = [int(one) for b in batches if b.labels is not None for one in b.labels]
    return np.concatenate(feeds), labels


@pytest.mark.parametrize("names", [("x.0", "x.1"), ("a", "b")])
def test_columns_of_a_csv_are_the_numbers_of_an_input(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    file = tmp_path / "data.csv"
    rows = [f"{a},{b},{i % 3}" for i, (a, b) in enumerate(X)]
    file.write_text("\n".join((",".join((*names, "label")), *rows)))
    values, labels = whole(str(file))
    np.testing.assert_array_equal(values, X)
    assert labels == [0, 1, 2, 0, 1, 2]


def test_numbered_columns_are_in_the_order_of_their_numbers() -> None:
    many = TensorSpec(name="x", dtype="fp32", shape=("N", 11))
    columns = {f"x.{i}": [float(i)] for i in sorted(range(11), key=str)}
    values, _ = whole(Table(**columns), many)
    assert values.tolist() == [[*map(float, range(11))]]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1,2,0\n3,4,1", "the first line does not name the columns"),
        ("x.0,x.1,label", "the table has no rows"),
        ("x.0,x.1,label\n1,2,0\n1,2", "row 3 has 2 values, and there are 3 columns"),
        ("x.0,x.1,label\n1,2,0\n1,abc,0", "row 1 of column 'x.1' is 'abc', no number"),
        ("x.0,x.1,label\n1,2,0\n1,,0", "row 1 of column 'x.1' is '', no number"),
        ("a,b,c,label\n1,2,3,0", "has 2 numbers a sample, and the table 3 columns"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "data.csv"
    file.write_text(text)
    with pytest.raises(UsageError, match=told):
        samples(file)


def test_other_columns_of_a_table_are_left_out() -> None:
    table = Table(x=X.tolist(), sentence=["text"] * 6, labels=[1] * 6)
    values, labels = whole(table)
    np.testing.assert_array_equal(values, X)
    assert labels == [1] * 6


def test_integers_of_a_table_become_the_inputs_type() -> None:
    """Tables hold int64; token ids of many models are int32."""
    spec = TensorSpec(name="x", dtype="int32", shape=("N", 2))
    values, _ = whole(Table(x=[[1, 2], [3, 4]]), spec)
    assert values.dtype == np.int32
    with pytest.raises(UsageError, match="array 'x' has type int64, expected int32"):
        samples(Table(x=[[1, 2], [3, 1 << 40]]), spec)


def test_lists_of_other_lengths_name_their_row() -> None:
    with pytest.raises(UsageError, match=r"row 1 of column 'x' has shape \[3\], the first"):
        samples(Table(x=[[1.0, 2.0], [1.0, 2.0, 3.0]]))


def test_parts_of_a_data_set_are_named() -> None:
    class Parts(dict[str, Any]):
        @property
        def column_names(self) -> dict[str, list[str]]:
            return {name: ["x"] for name in self}

    with pytest.raises(UsageError, match="the data has the parts train, test"):
        samples(Parts(train=[], test=[]))


def test_a_missing_column_is_named() -> None:
    two = (SPEC, TensorSpec(name="mask", dtype="int64", shape=("N", 2)))
    with pytest.raises(UsageError, match="no column is input 'mask'; there are x, y"):
        samples_of(Table(x=X, y=X).columns_by_name, two, labels=None, beside=None, where="t")


def test_pandas_arrow_and_parquet_are_tables(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"x": X.tolist(), "label": list(range(6))})
    parquet.write_table(table, tmp_path / "data.parquet")
    frames = [table.to_pandas()] if find_spec("pandas") else []
    for data in (table, tmp_path / "data.parquet", *frames):
        values, labels = whole(data)
        np.testing.assert_array_equal(values, X)
        assert labels == list(range(6))


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UsageError, match="pyarrow, which is not installed") as raised:
        table_in(tmp_path / "data.parquet")
    assert "pip install pyarrow" in str(raised.value.fix)


def test_images_of_a_folder_have_its_folders_as_classes(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for number, name in enumerate(("ant", "bee")):
        (tmp_path / name).mkdir()
        for i in range(3):
            pixels = np.full((4, 6, 3), 51 * (number + 1), np.uint8)
            image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    found = samples(tmp_path, IMAGES)
    values, labels = whole(tmp_path, IMAGES)
    assert labels == [0, 0, 0, 1, 1, 1]
    assert values[:, 0, 0, 0].tolist() == pytest.approx([0.2] * 3 + [0.4] * 3)
    assert isinstance(found, Stream)
    assert "divided by 255" in found.notices[0]


@pytest.mark.parametrize(
    ("spec", "told"),
    [(SPEC, "fits one input of 1 or 3 channels"), (IMAGES, "there are no images")],
)
def test_a_folder_that_holds_no_images_for_the_model(
    tmp_path: Path, spec: TensorSpec, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        ImageFolder.of(tmp_path, [spec], 4)


def test_images_without_pillow_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(UsageError, match="Pillow, which is not installed"):
        ImageFolder.of(tmp_path, [IMAGES], 4)


def test_a_function_gives_data(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "X = np.arange(12, dtype=np.float32).reshape(6, 2)\n"
        "def arrays():\n    return {'x': X, 'label': np.arange(6)}\n"
        "def batches():\n    yield X[:4], np.arange(4)\n    yield X[4:], np.arange(4, 6)\n"
        "def broken():\n    raise OSError('gone')\n"
    )
    for name in ("arrays", "batches"):
        for _ in range(2):  # a generator starts anew in each pass
            values, labels = whole(f"{tmp_path / 'mine.py'}:{name}")
            np.testing.assert_array_equal(values, X)
            assert labels == list(range(6))
    with pytest.raises(UserCodeError, match="the function of the data failed: OSError: gone"):
        samples(f"{tmp_path / 'mine.py'}:broken")


def test_a_python_file_without_a_function_is_told_to_name_one() -> None:
    with pytest.raises(UsageError, match="names no function"):
        samples("mine.py")


def test_a_function_in_python_is_called_for_each_pass() -> None:
    def batches() -> Iterator[tuple[Array, list[int]]]:
        yield X, [0] * 6

    data = samples(batches)
    assert [len(list(data.batches(1))) for _ in range(2)] == [1, 1]

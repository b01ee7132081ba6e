"""An input of OpenVINO may have several names: data may have any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
from openvino import opset13 as op

import finecast
from finecast.engines.base import TensorSpec, by_own_names
from finecast.errors import UsageError

X = np.random.default_rng(0).standard_normal((12, 8)).astype(np.float32)
NAMES = ("a_name", "z_name", "parameter")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = op.parameter([-1, 8], np.float32, name="parameter")
    given.output(0).get_tensor().set_names({"a_name", "z_name"})
    w = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)
    product = op.matmul(given, w, False, False)
    path = tmp_path_factory.mktemp("aliases") / "model.xml"
    net = openvino.Model([product], [given], "net")  # pyright: ignore[reportGeneralTypeIssues]
    openvino.save_model(net, path, compress_to_fp16=False)
    return path


def npz(folder: Path, name: str) -> Path:
    arrays: dict[str, Any] = {name: X}
    np.savez(folder / "data.npz", **arrays)
    return folder / "data.npz"


GIVEN: dict[str, Callable[[Path, str], Any]] = {
    "npz": npz,
    "dict": lambda _, name: {name: X},
    "batches": lambda _, name: [{name: X[:6]}, {name: X[6:]}],
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", GIVEN)
def test_data_may_name_an_input_by_any_of_its_names(
    model: Path, tmp_path: Path, kind: str, name: str
) -> None:
    data = GIVEN[kind](tmp_path, name)
    result = finecast.convert(model, policy="all:bf16", data=data)
    assert result.verified.samples


def test_a_name_of_no_input_is_refused_still(model: Path) -> None:
    with pytest.raises(UsageError, match="input 'a_name' is missing"):
        finecast.convert(model, policy="all:bf16", data={"other": X})


def specs(*names: Iterable[str]) -> list[TensorSpec]:
    return [
        TensorSpec(name=own, dtype="fp32", shape=None, aliases=tuple(rest))
        for own, *rest in names
    ]


def test_two_names_of_one_input_stay_two() -> None:
    given = {"a": 1, "b": 2}
    assert by_own_names(given, specs("abc")) == given
    assert by_own_names({"b": 1, "c": 2}, specs("abc")) == {"b": 1, "c": 2}


def test_the_name_of_an_input_is_no_other_inputs_alias() -> None:
    given = {"b": 1}
    assert by_own_names(given, specs("ab", "b")) == given
    assert by_own_names({"c": 1, "b": 2}, specs("ac", "b")) == {"a": 1, "b": 2}

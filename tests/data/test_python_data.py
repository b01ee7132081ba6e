"""finecast.tune, convert and inspect on data as people have it in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import finecast
from finecast.data.options import DataOptions
from finecast.engines import get_engine
from finecast.errors import UsageError
from tests.engines.emulator import models

X = np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32)
BATCHES = [X[i : i + 16] for i in range(0, 64, 16)]


def forms() -> dict[str, Any]:
    return {
        "arrays": {"x": X},
        "a list of feeds": [{"x": b} for b in BATCHES],
        "a list of tuples": [(b,) for b in BATCHES],
    }


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    return models.mlp(tmp_path / "mlp.onnx")


@pytest.mark.parametrize("form", list(forms()))
def test_all_forms_give_what_the_file_gives(mlp: Path, tmp_path: Path, form: str) -> None:
    np.savez(tmp_path / "d.npz", x=X)
    cut: dict[str, Any] = {"batch": 16}
    results = [
        finecast.tune(mlp, data=data, metric="cosine", target="trn1", **how)
        for data, how in (
            (tmp_path / "d.npz", cut),
            (forms()[form], cut if form == "arrays" else {}),
        )
    ]
    assert results[0].baseline == results[1].baseline
    assert results[0].plan.formats == results[1].plan.formats
    out = tmp_path / "low.onnx"
    errors = [
        finecast.convert(mlp, out, "all:bf16", data=data, force=True).verified.relative_error
        for data in (DataOptions(data=tmp_path / "d.npz", batch=16), forms()[form])
    ]
    if form != "arrays":  # whose batches are of 32
        assert errors[0] == errors[1]
    assert finecast.inspect(mlp, data=forms()[form]).nodes > 0


def test_calibration_takes_them_too(mlp: Path) -> None:
    total = get_engine("onnxruntime").load(mlp).run({"x": X})["y"].sum()

    def evaluate(run: Any) -> float:
        return float(np.isclose(run({"x": X})["y"].sum(), total))

    for calib in forms().values():
        found = finecast.tune(mlp, evaluate=evaluate, calib=calib, target="trn1")
        assert found.baseline.metric == 1.0


@pytest.mark.parametrize("option", [{"batch": 16}, {"sample_axes": {"x": 0}}])
def test_what_cuts_samples_needs_arrays(mlp: Path, option: dict[str, Any]) -> None:
    """Batches and functions give whole calls: such an option has no effect on them."""
    (name,) = option
    calls: dict[str, Any] = {"metric": "cosine", "data": forms()["a list of feeds"]}
    apart: dict[str, Any] = {"evaluate": lambda run: 1.0, "calib": lambda: [{"x": BATCHES[0]}]}
    for given in (calls, apart):
        with pytest.raises(UsageError, match="samples are cut out of arrays") as caught:
            finecast.tune(mlp, target="trn1", **given, **option)
        assert caught.value.where == "--" + name.replace("_axes", "-axis")
    # Arrays beside them are cut.
    assert finecast.tune(mlp, target="trn1", calib={"x": X}, **calls, **option).baseline
    with pytest.raises(UsageError, match="samples are cut out of arrays"):
        finecast.convert(mlp, None, "all:bf16", data=DataOptions(data=BATCHES, **option))


def test_a_generator_is_refused_before_any_work(mlp: Path) -> None:
    with pytest.raises(UsageError, match="can be read only once"):
        finecast.tune(mlp, data=(b for b in BATCHES), metric="cosine")


def test_an_error_names_the_file_of_the_data(mlp: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=X)
    for path in (tmp_path / "d.npz", str(tmp_path / "d.npz")):
        with pytest.raises(UsageError, match="needs labels") as caught:
            finecast.tune(mlp, data=path, metric="top1", target="trn1")
        assert caught.value.where == str(path)


def test_there_is_nothing_to_trust_in_a_file_without_code(mlp: Path) -> None:
    with pytest.raises(UsageError, match="no code in this file is executed"):
        finecast.load(mlp, trust=True)

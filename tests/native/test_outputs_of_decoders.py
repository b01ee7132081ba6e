"""A decoder's logits decide, not the keys and values that it gives back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from finecast import api
from finecast.data.options import DataOptions
from finecast.data.sources import workload_of
from finecast.devices.emulation import Emulation, explicit_casts
from finecast.diagnosis.emulating import EmulationReport, emulate
from finecast.engines.exact import Exact
from finecast.errors import UsageError
from finecast.numbers.formats import Format
from finecast.rules.policy import Scope
from tests.models.decoder import PRESENTS, decoder, decoder_data

DATA = decoder_data(samples=4, past=24, new=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("decoder") / "decoder.onnx"
    onnx.save(decoder(), found)
    return found


def emulated(path: Path, of: tuple[str, ...] = (), metric: str = "snr_db") -> EmulationReport:
    """The decoder with every product in bf16."""
    device: Emulation = replace(explicit_casts("trn1"), format=Format.BF16, scope=Scope.ALL)
    model = api.load(path)
    loaded = model.reference()
    workload = workload_of(DataOptions(data=DATA, metric=metric, batch=2, of=of), loaded)
    return emulate(model, loaded, device, workload)


def test_metric_and_error_are_of_the_logits(path: Path) -> None:
    found = emulated(path)
    assert [*found.errors] == ["logits"]
    assert found.left_out == PRESENTS
    # One number for all outputs would be far better: the caches are most of their power.
    assert found.metric == pytest.approx(-20 * np.log10(found.error), abs=0.5)
    assert found.metric < emulated(path, of=PRESENTS).metric - 6
    # No op is hidden: the last product of the net reaches the logits alone.
    assert "logits" in [c.node.name for c in found.contributions]


def test_an_output_that_is_named_is_what_metric_and_error_are_of(path: Path) -> None:
    found = emulated(path, of=("present.1.value", "present.0.key"), metric="cosine")
    # The keys that come in are far larger than those that are new: slices of their own.
    named = {name.partition("[")[0] for name in found.errors}
    assert named == {"present.1.value", "present.0.key"}
    assert list(found.errors.values()) == sorted(found.errors.values(), reverse=True)
    assert found.error == max(found.errors.values())
    assert "logits" not in [c.node.name for c in found.contributions]


def test_a_cache_that_is_empty_is_no_copy(path: Path) -> None:
    session = api.load(path).reference()
    feeds = {n: a if n == "ids" else a[:, :, :0] for n, a in DATA.items()}
    assert Exact.of(session, [feeds]).left_out == ()


def test_an_unknown_output_is_told_with_the_closest(path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown output 'logit' .*did you mean logits\?"):
        emulated(path, of=("logit",))

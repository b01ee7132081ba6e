"""Lengths of sequences in a tensor of free sizes: OpenVINO ignores them in its own IR, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import finecast
from finecast.devices.faults import known_faults
from finecast.engines import get_engine, installed
from finecast.errors import EngineError
from finecast.frontends.openvino.refused import LENGTHS as FAULT

pytestmark = pytest.mark.skipif(not installed("openvino"), reason="OpenVINO is not installed")

KINDS = {"lstm": 4, "gru": 3, "rnn": 1}
FREE, FIXED = [3, -1, 2], [3, 5, 2]
X = np.random.default_rng(0).standard_normal((3, 5, 2)).astype(np.float32)
FEEDS = {"x": X, "n": np.array([1, 3, 5], np.int32)}


def net(kind: str, shape: list[int], lengths: str = "input") -> Any:
    import openvino
    from openvino import opset13 as op

    def weights(*sizes: int) -> Any:
        return op.constant(np.full(sizes, 0.3, np.float32))

    x = op.parameter(shape, np.float32, name="x")
    n = op.parameter([3], np.int32, name="n")
    sizes = op.shape_of(x, "i32")
    length = op.gather(sizes, op.constant(np.int32(1)), op.constant(np.int32(0)))
    given = {
        "input": n,
        "computed": op.add(n, op.constant(np.int32(0))),
        "constant": op.constant(np.array([1, 3, 5], np.int32)),
        "whole constant": op.constant(np.array([5, 5, 5], np.int32)),
        "whole by sizes": op.broadcast(length, op.constant(np.array([3], np.int64))),
    }[lengths]
    start = op.constant(np.zeros((3, 1, 4), np.float32))
    states = [start, start] if kind == "lstm" else [start]
    gates = 4 * KINDS[kind]
    own = weights(1, gates, 2), weights(1, gates, 4), weights(1, gates)
    make = getattr(op, f"{kind}_sequence")
    result = op.result(make(x, *states, given, *own, 4, "forward").output(1), name="h")
    read = [x, n] if lengths in ("input", "computed") else [x]
    return openvino.Model([result], read, "net")  # pyright: ignore[reportGeneralTypeIssues]


def last(model: Any) -> Any:
    loaded = get_engine("openvino").load(model)
    (h,) = loaded.run({spec.name: FEEDS[spec.name] for spec in loaded.inputs}).values()
    return h


@pytest.mark.parametrize("kind", KINDS)
def test_openvino_still_ignores_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not, the release is right: it is the row's ``mended``."""
    right = last(net(kind, FIXED))
    monkeypatch.setitem(known_faults(), FAULT, replace(known_faults()[FAULT], mended="0"))
    assert np.abs(last(net(kind, FREE)) - right).max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", ["input", "computed", "constant"])
def test_such_a_model_is_refused_by_the_ops_name(
    kind: str, lengths: str, tmp_path: Path
) -> None:
    """It was "verified", with errors of 1 against what the model says."""
    import openvino

    openvino.save_model(net(kind, FREE, lengths), tmp_path / "net.xml")
    with pytest.raises(EngineError, match="reads lengths of sequences") as e:
        finecast.convert(tmp_path / "net.xml", tmp_path / "low.xml", "all:bf16")
    assert FAULT in str(e.value)
    assert "fixed sizes" in str(e.value)
    assert not (tmp_path / "low.xml").exists()


@pytest.mark.parametrize("lengths", ["whole constant", "whole by sizes"])
def test_lengths_of_the_whole_tensor_are_given_to_it(lengths: str) -> None:
    whole, fixed = net("lstm", FREE, lengths), net("lstm", FIXED, "whole constant")
    np.testing.assert_allclose(last(whole), last(fixed), rtol=1e-5)

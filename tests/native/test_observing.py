"""Observed facts are those of every array that the model computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finecast.engines import get_engine
from finecast.engines.base import Array
from finecast.engines.loading import exact_session
from finecast.frontends import openvino as openvino_frontend
from finecast.frontends.prepared import PreparedModel
from finecast.native import observing
from finecast.native.observing import observe
from finecast.numbers.formats import Format
from finecast.rules.facts import ValueFacts, merge
from finecast.rules.policy import Policy
from tests.planning import nets

TEXT = """net (float[N, 4, 6] x) => (float[N, 24] y) {
  p = MatMul (x, w)
  t = Transpose <perm = [0, 2, 1]> (p)
  f = Flatten (t)
  r = Reshape (p, shape)
  i = Identity (r)
  y = Add (f, i)
}"""
CONSTANTS: dict[str, Any] = {
    **nets.drawn(1, w=(6, 6)),
    "shape": np.array([-1, 24], np.int64),
}
RNG = np.random.default_rng(2)
BATCHES = [{"x": RNG.normal(size=(n, 4, 6)).astype(np.float32)} for n in (2, 5, 1, 5)]


def in_onnx() -> PreparedModel:
    return nets.prepared(TEXT, CONSTANTS)


def in_openvino(folder: Path) -> PreparedModel:
    import onnx

    openvino = pytest.importorskip("openvino")
    path = folder / "net.onnx"
    onnx.save(onnx.load_from_string(to_bytes(in_onnx())), path)
    file = openvino_frontend.from_model(openvino.Core().read_model(path))
    return openvino_frontend.prepare(file, Policy.parse("none"))


def to_bytes(prepared: Any) -> bytes:
    from finecast.frontends import onnx as frontend

    return frontend.to_bytes(prepared.model)


@pytest.fixture(params=["onnx", "openvino"])
def prepared(request: pytest.FixtureRequest, tmp_path: Path) -> PreparedModel:
    return in_onnx() if request.param == "onnx" else in_openvino(tmp_path)


def of_every_array(prepared: PreparedModel) -> dict[int, ValueFacts]:
    ids = prepared.observable()
    session = exact_session(prepared.with_outputs([*ids]), optimizing=False)
    facts = dict[int, ValueFacts]()
    x = next(v for v in prepared.graph.inputs if v.name == "x")
    for feeds in BATCHES:
        seen = {ids[name]: ValueFacts.of(array) for name, array in session.run(feeds).items()}
        facts = merge(facts, seen | {x.id: ValueFacts.of(feeds["x"])})
    return facts


def plain(facts: dict[int, ValueFacts]) -> dict[int, ValueFacts]:
    return {index: replace(one, moments=None) for index, one in facts.items()}


@pytest.mark.parametrize("shown_bytes", [observing.SHOWN_BYTES, 1])
@pytest.mark.parametrize("sized", [True, False])
def test_facts_are_those_of_every_array(
    prepared: PreparedModel, shown_bytes: int, sized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moved values have those of what they move, in their own shape."""
    monkeypatch.setattr(observing, "SHOWN_BYTES", shown_bytes)
    if not sized:
        monkeypatch.setattr(type(prepared), "static_shapes", lambda *_: {})
    assert plain(observe(prepared, lambda: BATCHES)) == of_every_array(prepared)


def test_numbers_that_are_moved_are_read_once(
    prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, ...]] = []
    of = ValueFacts.of

    def counted(array: Array) -> ValueFacts:
        read.append(array.shape)
        return of(array)

    monkeypatch.setattr(ValueFacts, "of", counted)
    observe(prepared, lambda: BATCHES[:1])
    assert sorted(read) == [(2, 4, 6), (2, 4, 6), (2, 24)]  # the input, the product, the sum


def test_a_value_that_reads_bits_in_another_format_is_not_moved(
    prepared: PreparedModel,
) -> None:
    graph, ids = prepared.graph, prepared.observable()
    moved = next(n.outputs[0] for n in graph.nodes if n.op == "transpose")
    assert moved is not None
    name = next(n for n, index in ids.items() if index == moved)
    names = {index: n for n, index in ids.items()}
    other = tuple(
        replace(v, dtype=Format.BF16.label) if v.id == moved else v for v in graph.values
    )
    assert name in observing._sources(graph, names)
    assert name not in observing._sources(replace(graph, values=other), names)


def test_a_model_of_known_sizes_is_loaded_once(
    prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []

    def counted(model: Any, **options: Any) -> Any:
        loaded.append(model)
        return exact_session(model, **options)

    monkeypatch.setattr(observing, "exact_session", counted)
    observe(prepared, lambda: BATCHES)
    assert len(loaded) == 1


def test_outputs_are_lent_until_the_next_run(tmp_path: Path) -> None:
    """Those of ``run`` and ``step`` are the caller's own."""
    model = in_openvino(tmp_path)
    session = get_engine("openvino").load(model.with_outputs([*model.observable()]))

    own = [session.run(BATCHES[1]), session.step(BATCHES[1])]
    lent = {name: array.copy() for name, array in session.lend(BATCHES[1]).items()}
    session.lend(BATCHES[3])
    for kept in own:
        assert all(np.array_equal(kept[name], array) for name, array in lent.items())

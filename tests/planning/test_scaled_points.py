"""Values that ops encode are rounded for each unit that encodes them, and for no other."""

from __future__ import annotations

import pytest

from finecast.numbers.formats import Format
from finecast.planning.points import RoundingPoint, scaled_points
from finecast.planning.units import make_units
from finecast.rules import Permission
from tests import toy_encoding
from tests.planning.test_encodings import graph, scaled


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Format:
    return toy_encoding.install(monkeypatch)


def test_each_reader_rounds_a_value_for_itself_alone(toy: Format) -> None:
    may = Permission(
        formats=frozenset({toy, Format.FP32}), reasons=(), encodings={toy: scaled(toy)}
    )
    fp32 = Permission(formats=frozenset({Format.FP32}), reasons=())
    permissions = {0: fp32, 1: may, 2: may}
    units = make_units(graph(), permissions, (toy,))
    points = scaled_points(graph(), units, permissions, toy)
    shared = scaled(toy).operands[0]
    assert points.points == (
        RoundingPoint(places=((1, 0),), readers=(units.of[1],), encoding=shared),
        RoundingPoint(places=((2, 0),), readers=(units.of[2],), encoding=shared),
    )


def test_readers_of_one_unit_round_it_together(toy: Format) -> None:
    may = Permission(
        formats=frozenset({toy, Format.FP32}), reasons=(), encodings={toy: scaled(toy)}
    )
    permissions = {1: may, 2: may}
    units = make_units(graph(), permissions, (toy,), [[1, 2]])
    (point,) = scaled_points(graph(), units, permissions, toy).points
    assert point.places == ((1, 0), (2, 0))

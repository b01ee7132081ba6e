"""Some random graphs in both engines; ``python -m tests.engines.differential`` tries more."""

from __future__ import annotations

from random import Random

import pytest

from finecast.engines import installed
from tests.engines.differential import difference, random_graph


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_engines_compute_random_graphs_as_numpy_does(engine: str) -> None:
    if not installed(engine):
        pytest.skip(f"{engine} is not installed")
    found = {n: difference(random_graph(Random(f"0/{n}")), engine) for n in range(12)}
    wrong = {n: text for n, text in found.items() if text and not text.startswith("not run")}
    assert not wrong
    assert sum(not text for text in found.values()) > len(found) // 2

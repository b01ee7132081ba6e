"""Coverage-guided fuzzing of loading and converting.

    python -m tests.fuzz.fuzz_convert CORPUS -max_total_time=600 -rss_limit_mb=2048 -timeout=30

Needs ``pip install atheris``. The first run fills CORPUS with small models of the suite. What
is not a FinecastError is a bug: it stops the run and leaves ``crash-*``, which belongs into
``tests/fuzz/found/`` and so into the tests.
"""

from __future__ import annotations

import logging
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

_atheris: Any = import_module("atheris")

with _atheris.instrument_imports(include=["finecast", "onnx_ir"]):
    from tests.fuzz.target import try_bytes

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")

_SMALL_BYTES = 2000


def seed(corpus: Path) -> None:
    """Small models of the suite, one for each op."""
    from tests.conformance.cases import node_cases

    corpus.mkdir(parents=True, exist_ok=True)
    if any(corpus.iterdir()):
        return
    seen: set[str] = set()
    for case in node_cases():
        data = case.model.SerializeToString()
        if case.op not in seen and len(data) < _SMALL_BYTES:
            seen.add(case.op)
            (corpus / f"{case.name}.onnx").write_bytes(data)


if __name__ == "__main__":
    seed(Path(sys.argv[1]))
    _atheris.Setup(sys.argv, try_bytes)
    _atheris.Fuzz()

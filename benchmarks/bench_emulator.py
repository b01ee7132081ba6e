"""Emulating a 12-layer encoder takes at most twice the time of running it in fp32.

BERT-base's shapes with random weights, 4 x 128 tokens, a bf16 plan of all ops through the
switch; and the same plan with a session built for it alone, as ``ladder`` does.

    python -m benchmarks.bench_emulator
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import onnx_ir as ir

from benchmarks.bench_convert_bert import WORDS, bert
from benchmarks.common import report
from finecast.devices.emulation import Emulation
from finecast.devices.targets import load_target
from finecast.engines import get_engine
from finecast.engines.base import Session
from finecast.engines.emulator import EmulatorEngine, prepare, setting_of
from finecast.frontends import onnx as frontend
from finecast.rules.policy import Scope

ROUNDS = 8


def main() -> None:
    """Time the three sessions in turns."""
    emulation = Emulation(target=load_target("trn2"), scope=Scope.ALL)
    engine = EmulatorEngine(emulation=emulation)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "bert.onnx"
        ir.save(bert(), source, external_data="bert.onnx.data")
        plain = get_engine("onnxruntime").load(source)
        prepared = prepare(frontend.load(source), emulation)
        setting = setting_of(prepared.graph, emulation)
        switched = engine.session(prepared).apply(setting)
        fixed = engine.session(prepared, fixed=setting)
        _time(plain, switched, fixed)


def _time(plain: Session, switched: Session, fixed: Session) -> None:
    ids = np.random.default_rng(0).integers(0, WORDS, (4, 128))
    feeds = {"input_ids": ids.astype(np.int64)}
    runs: dict[str, Callable[[], object]] = {
        "fp32": lambda: plain.run(feeds),
        "switched": lambda: switched.run(feeds),
        "fixed": lambda: fixed.run(feeds),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS + 1):
        for name, run in runs.items():
            start = perf_counter()
            run()
            times[name].append(perf_counter() - start)
    for name in ("switched", "fixed"):
        pairs = zip(times[name][1:], times["fp32"][1:], strict=True)
        report(
            "emulator",
            f"{name} bf16 plan over fp32",
            round(median(a / b for a, b in pairs), 3),
            "x", bar=2.0, fp32_ms=round(1e3 * median(times["fp32"][1:]), 1),
        )  # fmt: skip


if __name__ == "__main__":
    main()

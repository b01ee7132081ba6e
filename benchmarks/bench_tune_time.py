"""Where the time of ``tune`` goes: seconds by phase, beside evaluations of all data.

    python -m benchmarks.bench_tune_time [NAME ...]

One line for each model: the digits of ``examples/``, a StarNet as a ``.pt2`` and as ONNX, and
the shared models where they are. The bar is five evaluations of all data by the fp32 model
plus ten seconds. Processor seconds stand beside those of the clock, as other processes change
them less. Each is tuned twice, with a price book of this benchmark's own: the second run takes
the times of kernels from there. Models that are absent are skipped.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, Final, TypeAlias

import numpy as np

from benchmarks.bench_tune import score
from benchmarks.common import cpu_seconds, report, shared_case, skip
from finecast import api
from finecast.progress import Notice, Progress
from finecast.tuning.result import Result

_DIGITS: Final = Path(__file__).resolve().parents[1] / "examples" / "digits"
# The shared models: the metric, and the samples of a call.
_SHARED: Final[Mapping[str, tuple[str, int]]] = {
    "cifar10_resnet20": ("top1", 20),
    "sts_minilm_l6": ("spearman", 16),
    "speaker_ge2e_lstm": ("pair_auc", 16),
}
Run: TypeAlias = Callable[[Path, Progress], Result | None]
_EVALUATIONS, _REST_S = 5, 10.0
_IMAGES: Final = 64


def digits(folder: Path, progress: Progress) -> Result:
    """The example, by the command of its page."""
    return api.tune(
        _DIGITS / "digits.onnx",
        folder / "digits.onnx",
        data=_DIGITS / "digits_eval.npz",
        calib=_DIGITS / "digits_calib.npz",
        metric="top1",
        progress=progress,
    )


def starnet(folder: Path, progress: Progress, *, onnx: bool) -> Result:
    """StarNet-S1 (Ma et al., "Rewrite the Stars", 2024) with random weights."""
    import torch

    from benchmarks.torch_nets import StarNet

    torch.manual_seed(0)
    module, image = StarNet().eval(), torch.randn(1, 3, 224, 224)
    path = folder / ("starnet.onnx" if onnx else "starnet.pt2")
    if onnx:
        torch.onnx.export(module, (image,), path, dynamo=False, input_names=["x"])
    else:
        torch.export.save(torch.export.export(module, (image,)), path)
    draw = np.random.default_rng(0)
    data = {"x": draw.standard_normal((_IMAGES, 3, 224, 224)).astype(np.float32)}
    output = folder / f"low{path.suffix}"
    return api.tune(path, output, data=data, metric="cosine", progress=progress)


def shared(name: str, folder: Path, progress: Progress) -> Result | None:
    """One of the shared models, by its own metric."""
    case = shared_case(name)
    if case is None:
        return None
    metric, batch = _SHARED[name]
    return api.tune(
        case.model(),
        folder / "low.onnx",
        evaluate=score(case, metric, batch),
        calib=lambda: list(case.calib(8)),
        tolerance=0.005,
        progress=progress,
    )


class ProcessorTime:
    """Progress that counts processor seconds by phase, as ``tune`` does those of the clock."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phase, self._last = "load", cpu_seconds()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """The time since the last call is that call's phase's."""
        del done, total
        if isinstance(stage, Notice):
            return
        now = cpu_seconds()
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._last
        self._phase, self._last = stage.partition(" of ")[0], now


def timed(name: str, run: Run) -> None:
    """Run ``tune`` once, and print its line."""
    with tempfile.TemporaryDirectory(prefix="finecast-") as folder:
        start, used = perf_counter(), ProcessorTime()
        found = run(Path(folder), used)
        used("the end", 0, 0)
        wall_s = perf_counter() - start
    if found is None:
        skip(f"tune {name}", "the model is absent")
        return
    phases: dict[str, Any] = {k: round(s, 2) for k, s in found.phases.items()}
    evaluation_s = found.phases["baseline"]
    report(
        f"tune {name}", "whole run", round(found.seconds, 1), "s",
        bar=round(_EVALUATIONS * evaluation_s + _REST_S, 1), verdict=found.verdict.value,
        wall_s=round(wall_s, 1), processor_s=round(sum(used.seconds.values()), 1),
        phases_s=phases, phases_processor_s={k: round(s, 2) for k, s in used.seconds.items()},
        evaluations=found.evaluations, probes=found.probes,
        evaluation_s=round(evaluation_s, 2),
    )  # fmt: skip


def main(names: list[str]) -> None:
    """All models, or those named."""
    runs: dict[str, Run] = {"digits": digits}
    if find_spec("torch") is not None:
        runs["starnet_pt2"] = partial(starnet, onnx=False)
        runs["starnet_onnx"] = partial(starnet, onnx=True)
    for one in _SHARED:
        runs[one] = partial(shared, one)
    with tempfile.TemporaryDirectory(prefix="finecast-") as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for name, run in runs.items():
            if not names or name in names:
                timed(name, run)
                timed(f"{name} again", run)


if __name__ == "__main__":
    main(sys.argv[1:])

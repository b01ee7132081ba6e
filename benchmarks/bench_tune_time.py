"""Where the time of ``tune`` goes: seconds by phase, beside evaluations of all data.

    python -m benchmarks.bench_tune_time [NAME ...] [--nets FOLDER]

One line for each model: the digits of ``examples/``, the shared models where they are, and
those that ``benchmarks.tune_time_nets`` wrote into ``FOLDER``; StarNets, as a ``.pt2`` and as
ONNX, if they are named. The bar is five evaluations of all data by the fp32 model plus ten
seconds. Processor seconds stand beside those of the clock, as other processes change them
less. Each is tuned twice, in a process each, with a timing cache of this benchmark's own: the
second run takes the times of kernels from there. Models that are absent are skipped.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final, TypeAlias

import numpy as np

from benchmarks.bench_tune import score
from benchmarks.common import cpu_seconds, report, run_apart, shared_case, skip, tune_aim_s
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
# Nets of ``tune_time_nets``: the metric, and the samples of a call.
_NETS: Final[Mapping[str, tuple[str, int]]] = {
    "magika": ("top1", 32),
    "efficientnet_lite0": ("cosine", 32),
    "recogniser": ("agreement", 8),
}
_LIMIT_S: Final = 600.0
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


def of_folder(name: str, nets: Path, folder: Path, progress: Progress) -> Result | None:
    """One of the nets of ``tune_time_nets``."""
    model, data = nets / f"{name}.onnx", nets / f"{name}.npz"
    if not (model.is_file() and data.is_file()):
        return None
    metric, batch = _NETS[name]
    output = folder / "low.onnx"
    return api.tune(model, output, data=data, metric=metric, batch=batch, progress=progress)


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


def tuned(run: Run) -> dict[str, Any] | None:
    """The figures of one run of ``tune`` here; None if the model is absent."""
    with tempfile.TemporaryDirectory(prefix="finecast-") as folder:
        start, used = perf_counter(), ProcessorTime()
        found = run(Path(folder), used)
        used("the end", 0, 0)
        wall_s = perf_counter() - start
    if found is None:
        return None
    return {
        "seconds": round(found.seconds, 1),
        "verdict": found.verdict.value,
        "speedup": round(found.speedup, 3),
        "wall_s": round(wall_s, 1),
        "processor_s": round(sum(used.seconds.values()), 1),
        "phases_s": {k: round(s, 2) for k, s in found.phases.items()},
        "phases_processor_s": {k: round(s, 2) for k, s in used.seconds.items()},
        "evaluations": found.evaluations,
        "probes": found.probes,
        "evaluation_s": round(found.phases["baseline"], 2),
    }


def runs(nets: Path) -> dict[str, Run]:
    """How each model is tuned, by its name."""
    return {
        "digits": digits,
        **{name: partial(shared, name) for name in _SHARED},
        **{name: partial(of_folder, name, nets) for name in _NETS},
        "starnet_pt2": partial(starnet, onnx=False),
        "starnet_onnx": partial(starnet, onnx=True),
    }


def main() -> None:
    """All models but the StarNets, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=(*runs(Path()), []), metavar="NAME")
    parser.add_argument("--nets", type=Path, default=Path(), metavar="FOLDER")
    parser.add_argument("--one", action="store_true", help="one run, here; prints JSON")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(tuned(runs(given.nets)[given.names[0]])))
        return
    with tempfile.TemporaryDirectory(prefix="finecast-") as cache:
        for name in given.names or ("digits", *_SHARED, *_NETS):
            for again in ("", " again"):
                arguments = [name, "--one", "--nets", str(given.nets)]
                held = {"XDG_CACHE_HOME": cache}
                found = run_apart("bench_tune_time", arguments, limit_s=_LIMIT_S, held=held)
                if not found or "failed" in found:
                    why = found["failed"] if found else "the model is absent"
                    skip(f"tune {name}{again}", why)
                    break
                bar = round(tune_aim_s(found["evaluation_s"]), 1)
                seconds = found.pop("seconds")
                report(f"tune {name}{again}", "whole run", seconds, "s", bar=bar, **found)


if __name__ == "__main__":
    main()

"""The Neuron compilers' options as verbs take them, and data options beside them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from finecast.emulation import Emulation
    from finecast.measure.criterion import Criterion
    from finecast.neuron import Given
    from finecast.tuner.workload import Workload

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL",
        help="The FP32 ONNX model (and keywords that go on after --fast-math).",
    ),
]
AutoCast = Annotated[
    str | None,
    typer.Option("--auto-cast", help="none, matmult (or matmul), all.", metavar="SCOPE"),
]
AutoCastType = Annotated[
    str | None,
    typer.Option("--auto-cast-type", help="bf16, fp16, tf32, fp8_e4m3.", metavar="FORMAT"),
]
FastMath = Annotated[
    list[str] | None,
    typer.Option(
        "--fast-math",
        metavar="KEYWORD...",
        help="inf1: all, none, fp32-cast-all[-fp16], fp32-cast-matmult[-bf16|-fp16],"
        " [no-]fast-relayout.",
    ),
]
Fp32Cast = Annotated[
    str | None,
    typer.Option(
        "--fp32-cast",
        metavar="KEYWORD",
        help="inf1, the older spelling: all[-fp16], matmult[-bf16|-fp16].",
    ),
]
MixedAccumulation = Annotated[
    bool | None,
    typer.Option(
        "--enable-mixed-precision-accumulation/--disable-mixed-precision-accumulation",
        help="Softmax, norms and the like keep fp32 inside.",
    ),
]
SaturateInfinity = Annotated[
    bool,
    typer.Option("--enable-saturate-infinity", help="Clamp Inf in transposes (trn1)."),
]
Stochastic = Annotated[
    bool, typer.Option("--stochastic-rounding", help="Casts round stochastically.")
]
Seed = Annotated[int | None, typer.Option(help="Of stochastic rounding.", min=0)]
Sdk = Annotated[
    str | None,
    typer.Option(metavar="RELEASE", help="Neuron SDK whose defaults hold, as 2.26."),
]
FromEnv = Annotated[
    bool,
    typer.Option("--from-env", help="Read NEURON_CC_FLAGS; the command line comes after it."),
]
Data = Annotated[Path | None, typer.Option(help="An .npz with the inputs' names, and labels.")]
Labels = Annotated[
    str | None, typer.Option(help="Array of labels in --data; default 'label'.")
]
MetricName = Annotated[
    str | None,
    typer.Option(
        help="top1, top5, agreement, cosine, spearman, snr_db, max_abs; default agreement."
    ),
]
Evaluate = Annotated[
    str | None,
    typer.Option(
        "--eval",
        metavar="FILE.py:FUNCTION",
        help="Your own metric: gets run(feeds) -> outputs by name, returns a number.",
    ),
]
Calib = Annotated[
    str | None,
    typer.Option(
        metavar="NPZ|FILE.py:FUNCTION",
        help="Calibration feeds: an unlabelled .npz, or a function that yields them.",
    ),
]
LowerIsBetter = Annotated[
    bool, typer.Option("--lower-is-better", help="The --eval metric is a loss.")
]
Batch = Annotated[int, typer.Option(min=1, help="Samples a call.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a verb was told of the compilers' options."""

    auto_cast: str | None = None
    auto_cast_type: str | None = None
    fast_math: tuple[str, ...] = ()
    fp32_cast: str | None = None
    mixed_accumulation: bool | None = None
    saturate_infinity: bool = False
    stochastic: bool = False
    seed: int | None = None
    from_env: bool = False


def model_and_keywords(
    words: Sequence[str], keywords: Sequence[str] | None
) -> tuple[Path, tuple[str, ...]]:
    """Tell the model from keywords that stand after ``--fast-math``.

    Raises:
        UsageError: If there is not exactly one model.
    """
    from finecast.errors import UsageError
    from finecast.neuron.options import FAST_MATH_KEYWORDS

    more = [w for w in words if keywords and w in FAST_MATH_KEYWORDS]
    models = [w for w in words if w not in more]
    if len(models) != 1:
        raise UsageError(
            f"one model is expected, got {', '.join(models) or 'none'}",
            fix="give one .onnx file",
        )
    return Path(models[0]), (*(keywords or ()), *more)


def given(choice: Choice) -> Given:
    """What the environment and then the command line state."""
    from finecast.neuron import Given, from_environment

    stated = Given(
        auto_cast=choice.auto_cast,
        auto_cast_type=choice.auto_cast_type,
        fast_math=choice.fast_math or None,
        fp32_cast=choice.fp32_cast,
        mixed_accumulation=choice.mixed_accumulation,
        saturate_infinity=choice.saturate_infinity or None,
        stochastic_rounding=choice.stochastic or None,
        seed=choice.seed,
    )
    return stated.over(from_environment(os.environ)) if choice.from_env else stated


def emulation_for(choice: Choice, target: str, sdk: str | None) -> tuple[Emulation, str]:
    """What to emulate, and the options in full.

    On devices that are not Neuron's, ``--auto-cast`` states the scope and the type.
    """
    from finecast.neuron import resolve

    options = resolve(given(choice), sdk=sdk, target=target)
    return options.emulation(), options.label


@dataclass(frozen=True, slots=True, kw_only=True)
class DataChoice:
    """What a verb was told of data and metric."""

    data: Path | None
    labels: str | None
    metric: str | None
    evaluate: str | None
    calib: str | None
    lower_is_better: bool
    batch: int

    @property
    def label(self) -> str:
        """The metric's name in reports."""
        return self.evaluate or self.metric or "agreement"

    def workload(self, model: Path) -> Workload:
        """The workload for ``model``, loaded once to see its inputs."""
        from finecast import api
        from finecast.engines import get_engine
        from finecast.measure.functions import load_function

        calib = self.calib
        feeds = (
            None
            if calib is None
            else (Path(calib) if calib.endswith(".npz") else load_function(calib))
        )
        options = api.DataOptions(
            data=self.data,
            labels=self.labels,
            metric=self.metric,
            evaluate=load_function(self.evaluate) if self.evaluate else None,
            evaluate_name=self.evaluate or "",
            calib=feeds,
            batch=self.batch,
            lower_is_better=self.lower_is_better,
        )
        return api.workload_of(options, get_engine("onnxruntime").load(model))


def criterion_for(kind: str, tolerance: float, workload: Workload) -> Criterion:
    """The criterion in the metric's own direction."""
    from finecast.measure.criterion import Criterion, CriterionKind

    return Criterion(
        kind=CriterionKind.parse(kind),
        tolerance=tolerance,
        higher_is_better=workload.higher_is_better,
    )

"""The keywords of Python's verbs with their types, for editors and type checkers.

What each does stands at the field of the dataclass that has it, such as ``DataOptions`` or
``Criterion``, of which ``arguments.checked`` reads the same names. A test holds the two to one
another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from finecast.data.criterion import Criterion, CriterionKind
    from finecast.data.options import Data, DataOptions
    from finecast.data.workload import CalibrationFunction
    from finecast.devices.emulation import Emulation
    from finecast.native.model import Check
    from finecast.planning.plan import Plan
    from finecast.progress import Progress
    from finecast.rules import UserRule
    from finecast.rules.policy import Policy
    from finecast.tuning.goal import Goal, Objective, Preset


class ReadingKeywords(TypedDict, total=False):
    """How a file is read; all that ``diff`` takes."""

    freeze_inputs: bool | None
    trust: bool


class LoadKeywords(ReadingKeywords, total=False):
    """Of ``load``: also how a PyTorch module is captured."""

    example_inputs: Sequence[Any] | None
    example_kwargs: Mapping[str, Any] | None
    dynamic_shapes: Any


class OpeningKeywords(LoadKeywords, total=False):
    """How a model is opened by a verb that takes models in low precision to fp32."""

    from_type: str | None


class FeedingKeywords(TypedDict, total=False):
    """How data are read."""

    labels: str | None
    calib: Data | CalibrationFunction | None
    sample_axes: Mapping[str, int | None] | None
    batch: int | None
    slices: int | None
    decode_steps: int | None
    state: Mapping[str, str] | None


class SizedKeywords(FeedingKeywords, total=False):
    """How data are read, or random feeds made."""

    dims: Mapping[str, int] | None


class JudgingKeywords(FeedingKeywords, total=False):
    """How data are read, and what tells a model's accuracy on them."""

    metric: str | None
    evaluate: Callable[..., Any] | str | None
    lower_is_better: bool | None
    of: str | Iterable[str] | None


class LimitKeywords(TypedDict, total=False):
    """How much accuracy may be lost."""

    criterion: Criterion | CriterionKind | str | None
    tolerance: float | str | None
    max_drop: float | str | None
    keep: float | str | None


class AccuracyKeywords(JudgingKeywords, OpeningKeywords, LimitKeywords, total=False):
    """Of verbs that judge by an accuracy that is to be kept."""


class WritingKeywords(TypedDict, total=False):
    """How a model is written."""

    force: bool
    external_data: bool | None


class InspectKeywords(SizedKeywords, OpeningKeywords, total=False):
    """Of ``inspect``."""


class ExplainKeywords(InspectKeywords, total=False):
    """Of ``explain``."""

    user_rules: Mapping[str, UserRule] | None


class ApplyKeywords(WritingKeywords, InspectKeywords, total=False):
    """Of ``apply``."""

    verify: bool


class ConvertKeywords(ApplyKeywords, total=False):
    """Of ``convert``."""

    user_rules: Mapping[str, UserRule] | None
    plan_out: str | Path | None
    lock: bool


class SearchKeywords(TypedDict, total=False):
    """What a search is for, what it may cost, and what it reads and writes."""

    groups: str | None
    baseline: float | None
    confidence: float | str | None
    score_range: str | Sequence[float] | None
    objective: Objective | str
    preset: Preset | str
    min_speedup: float
    max_size: str | int | None
    max_bits: float | None
    max_trials: int | None
    timeout_s: float | None
    jobs: int
    executor: str
    user_rules: Mapping[str, UserRule] | None
    plan_out: str | Path | None
    study: str | Path | None
    resume: bool
    start: str | Path | Plan | None
    report: str | Path | None
    lock: bool
    timing_cache: bool


class TuneKeywords(
    SearchKeywords,
    WritingKeywords,
    JudgingKeywords,
    OpeningKeywords,
    LimitKeywords,
    total=False,
):
    """Of ``tune``."""

    dims: Mapping[str, int] | None


class NamedKeywords(TypedDict, total=False):
    """What ``tune`` names itself, and functions that call it take as keywords."""

    engine: str | None
    goal: Goal | None
    target: Emulation | str | None
    progress: Progress | bool


class RequestKeywords(TuneKeywords, NamedKeywords, total=False):
    """All of ``tune``."""

    policy: Policy | str
    data: DataOptions | Data | None


class TuneModuleKeywords(SearchKeywords, LimitKeywords, NamedKeywords, total=False):
    """Of ``torch.tune``, beside its own."""

    calib: Data | CalibrationFunction | None
    lower_is_better: bool | None
    metric: str | None
    of: str | Iterable[str] | None
    slices: int | None


class ConvertModuleKeywords(TypedDict, total=False):
    """Of ``torch.convert``, beside its own."""

    engine: str | None
    target: Emulation | str | None
    progress: Progress | bool
    user_rules: Mapping[str, UserRule] | None
    verify: bool


class EmulateKeywords(JudgingKeywords, LoadKeywords, total=False):
    """Of ``emulate``."""


class BlameKeywords(AccuracyKeywords, total=False):
    """Of ``blame``."""

    check: Check | str | None
    max_error: float | None


class ProfileKeywords(SizedKeywords, LoadKeywords, total=False):
    """Of ``profile``."""

    runs: int
    seconds: float
    ops: bool
    memory: bool


class VerifyKeywords(TypedDict, total=False):
    """Of ``verify``."""

    lock: str | Path | None
    settings: Mapping[str, str] | None
    strict: bool

"""Python's verb ``profile``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from finecast import keywords
from finecast.api.models import Model
from finecast.arguments import checked, group_of
from finecast.data.options import Data, DataOptions
from finecast.native.model import ReadOptions
from finecast.native.profiling import ProfileReport, Rounds
from finecast.native.profiling import profile as profiled
from finecast.progress import Progress, reporting


@checked(Rounds, DataOptions, ReadOptions)
def profile(
    models: Model | Sequence[Model],
    *,
    data: DataOptions | Data | None = None,
    engine: str | None = None,
    rounds: Rounds | None = None,
    progress: Progress | bool = True,
    **options: Unpack[keywords.ProfileKeywords],
) -> ProfileReport:
    """Latency, throughput and peak memory of models, compared with those of the first.

    Args:
        models: A model, or several, which run in turns: paths or objects of their libraries.
        data: The feeds, as for ``convert``; random ones without data.
        engine: ``NAME[:DEVICE]``; by default the first that runs all of them.
        rounds: How long they are timed.
        progress: As for ``convert``.
        options: Options of ``Rounds`` and ``DataOptions`` by name, such as ``ops``,
            ``seconds``, ``batch``, ``dims``; and of ``ReadOptions``: ``trust``, and
            ``example_inputs`` of PyTorch modules.

    Raises:
        FinecastError: If a model cannot be read or run.
    """
    several = models if isinstance(models, list | tuple) else [models]
    stated = group_of(DataOptions, options, data=data)
    how = group_of(Rounds, options, runs=rounds)
    read = group_of(ReadOptions, options)
    with reporting(progress, "profiling") as report:
        return profiled(several, engine, stated, how, read=read, report=report)

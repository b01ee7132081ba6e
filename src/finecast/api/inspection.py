"""Python's verb ``inspect``."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from finecast import keywords
from finecast.api.models import Model, opened_in_fp32
from finecast.api.requests import on_data
from finecast.arguments import checked, group_of
from finecast.data.options import Data, DataOptions
from finecast.native.census import Census
from finecast.native.model import ReadOptions, RunOptions
from finecast.numbers.formats import Format


@checked(DataOptions, ReadOptions)
def inspect(
    model: Model,
    *,
    data: DataOptions | Data | None = None,
    low: Format = Format.BF16,
    **options: Unpack[keywords.InspectKeywords],
) -> Census:
    """Count a model's ops by class; with ``data``, report values that ``low`` cannot hold.

    Shapes are observed on data; without data on one random batch, of ``batch`` samples and
    the sizes in ``dims``, if the model runs on it. ``options`` are those of ``DataOptions``
    and ``ReadOptions``, such as ``labels``, ``from_type``, ``trust``.

    Raises:
        FinecastError: If the model or the data cannot be read.
    """
    stated = group_of(DataOptions, options, data=data)
    run = on_data(group_of(RunOptions, options), stated, sizes_feeds=True)
    given = opened_in_fp32(model, group_of(ReadOptions, options))
    return given.census(replace(run, own=given is not model), low)

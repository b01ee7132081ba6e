"""finecast for TensorFlow and Keras in Python: ``convert``, ``tune``, ``read_frozen``.

For example::

    low = finecast.tensorflow.convert(model, policy="all:bf16")
    low(x)
    low.save("low/")

``finecast.convert`` and ``finecast.tune`` also take the path of a SavedModel.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from finecast import DataOptions, Policy, Result, api
from finecast.arguments import checked
from finecast.calls import checks
from finecast.data import Data
from finecast.errors import EngineError, UsageError
from finecast.keywords import RequestKeywords
from finecast.rules import DEFAULT_POLICY, UserRule

if importlib.util.find_spec("tensorflow") is None:
    raise EngineError("finecast.tensorflow needs TensorFlow", fix="pip install tensorflow")

from finecast.native import check_written
from finecast_tensorflow.frontend.loading import read_frozen
from finecast_tensorflow.native import Function, TensorFlowModel

__all__ = ["Function", "Result", "convert", "read_frozen", "tune"]


@checks
def convert(
    model: Any,
    output: str | Path | None = None,
    policy: str | Policy = DEFAULT_POLICY,
    *,
    data: DataOptions | Data | None = None,
    user_rules: Mapping[str, UserRule] | None = None,
    force: bool = False,
) -> Function:
    """Convert a Keras model or a SavedModel into a mixed-precision function.

    Laws: inputs and outputs keep their names and types; ``model`` is unchanged. The plan, with
    every rule's reason, is ``result.plan``.

    Args:
        model: A built Keras model, or the path of a SavedModel or a ``.keras`` file.
        output: Where a SavedModel of the result goes; None for nowhere. To write OpenVINO's IR
            use ``finecast.convert``.
        policy: ``SCOPE:FORMAT[,FORMAT...]`` or a Policy.
        data: An npz or arrays by input name; the ranges of values on it guide the rules.
        user_rules: Rule functions by name.
        force: Whether a SavedModel at ``output`` may be replaced.

    Raises:
        FinecastError: One of its kinds, with what is wrong, where, and what to do.
    """
    opened = _opened(model)
    if output is not None:
        check_written(type(opened).__module__, Path(output))
    done = api.convert(opened, None, policy, data=data, user_rules=user_rules)
    result: Function = done.model
    if output is not None:
        result.save(output, force=force)
    return result


@checked(*api.OF_TUNING)
def tune(
    model: Any, output: str | Path | None = None, **options: Unpack[RequestKeywords]
) -> Result:
    """Find the fastest mixed precision that keeps an accuracy; write it if it helps.

    Args:
        model: As for ``convert``.
        output: Where a SavedModel of the result goes.
        options: Those of ``finecast.tune``: ``data``, ``metric``, ``evaluate``,
            ``tolerance`` and the like.

    Raises:
        FinecastError: As ``finecast.tune``.
    """
    return api.tune(_opened(model), output, **options)


def _opened(model: Any) -> TensorFlowModel:
    """The model in TensorFlow.

    Raises:
        UsageError: If it is another library's.
    """
    opened = api.load(model)
    if not isinstance(opened, TensorFlowModel):
        raise UsageError(
            "not a model that TensorFlow runs",
            where=opened.name,
            fix="give a Keras model, a .keras file or a SavedModel's folder; finecast.convert"
            " and finecast.tune take models of every kind",
        )
    return opened

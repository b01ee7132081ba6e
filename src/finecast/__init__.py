"""Fine-grained automatic mixed precision.

Public names are imported from their modules on first use, so ``import finecast`` is fast.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, cast

from finecast.plugin import install_public_modules, public_name

# Engines report to their makers that they are imported, unless they are kept from it before:
# ONNX Runtime by a variable; OpenVINO has a stand-in where this package is not found.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
cast("dict[str, Any]", sys.modules).setdefault("openvino_telemetry", None)

if TYPE_CHECKING:
    from finecast.api import (
        DataOptions,
        apply,
        blame,
        convert,
        diff,
        emulate,
        explain,
        inspect,
        load,
        profile,
        report,
        tune,
        verify,
    )
    from finecast.data.criterion import Criterion, CriterionKind
    from finecast.engines import default_engine, get_engine
    from finecast.errors import (
        EngineError,
        FinecastError,
        ModelError,
        RuleConflictError,
        UsageError,
    )
    from finecast.numbers.formats import Format
    from finecast.planning.plan import Decision, Plan
    from finecast.rules.policy import Policy, Scope
    from finecast.tuning.goal import Goal, Objective
    from finecast.tuning.result import Result, Verdict
    from finecast_neuron.api import ladder

_NAMES = {
    "finecast.api": (
        *("DataOptions", "apply", "blame", "convert", "diff", "emulate", "explain", "inspect"),
        *("load", "profile", "report", "tune", "verify"),
    ),
    "finecast.data.criterion": ("Criterion", "CriterionKind"),
    "finecast.engines": ("default_engine", "get_engine"),
    "finecast.errors": (
        *("EngineError", "FinecastError", "ModelError", "RuleConflictError", "UsageError"),
    ),
    "finecast.numbers.formats": ("Format",),
    "finecast.planning.plan": ("Decision", "Plan"),
    "finecast.rules.policy": ("Policy", "Scope"),
    "finecast.tuning.goal": ("Goal", "Objective"),
    "finecast.tuning.result": ("Result", "Verdict"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Criterion",
    "CriterionKind",
    "DataOptions",
    "Decision",
    "EngineError",
    "FinecastError",
    "Format",
    "Goal",
    "ModelError",
    "Objective",
    "Plan",
    "Policy",
    "Result",
    "RuleConflictError",
    "Scope",
    "UsageError",
    "Verdict",
    "apply",
    "blame",
    "convert",
    "default_engine",
    "diff",
    "emulate",
    "explain",
    "get_engine",
    "inspect",
    "ladder",
    "load",
    "profile",
    "report",
    "tune",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it, or from a plugin.

    The version is that of the installed distribution.
    """
    module = _MODULES.get(name)
    if module is not None:
        return getattr(importlib.import_module(module), name)
    if name == "__version__":
        from finecast.measure.environment import version_of

        return version_of(__name__) or "unknown"
    if name.startswith("_"):
        raise AttributeError(f"module 'finecast' has no attribute {name!r}")
    return public_name(f"finecast.{name}")


def __dir__() -> list[str]:
    """The public names."""
    return __all__


install_public_modules()

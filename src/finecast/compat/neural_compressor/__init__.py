"""Intel Neural Compressor 2.x's mixed precision: ``mix_precision.fit`` and its settings.

The signatures and defaults are those of release 2.6; it was removed upstream in 3.8. What
differs: an unsupported combination raises with the reason and never ends the process, a
model that came out all fp32 is never called a success, convolutions are converted too.
"""

from __future__ import annotations

from finecast.compat.neural_compressor import config, mix_precision
from finecast.compat.neural_compressor.config import (
    AccuracyCriterion,
    MixedPrecisionConfig,
    TuningCriterion,
)

__all__ = [
    "AccuracyCriterion",
    "MixedPrecisionConfig",
    "TuningCriterion",
    "config",
    "mix_precision",
]

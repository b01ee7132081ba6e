"""Intel Neural Compressor 2.x: ``mix_precision.fit``, ``quantization.fit``, their settings.

The signatures and defaults are those of release 2.6; it was removed upstream in 3.8. What
differs: an unsupported combination raises with the reason and never ends the process, a
model whose products all came out fp32 is never called a success, convolutions are converted
too, a name that matches no op is an error, and settings without effect say so in a warning.
"""

from __future__ import annotations

from finecast.compat.neural_compressor import config, mix_precision, quantization
from finecast.compat.neural_compressor.config import (
    AccuracyCriterion,
    MixedPrecisionConfig,
    PostTrainingQuantConfig,
    TuningCriterion,
)
from finecast.compat.neural_compressor.loading import load

__all__ = [
    "AccuracyCriterion",
    "MixedPrecisionConfig",
    "PostTrainingQuantConfig",
    "TuningCriterion",
    "config",
    "load",
    "mix_precision",
    "quantization",
]

"""Intel Neural Compressor 2.x: ``mix_precision.fit``, ``quantization.fit``, their settings.

The signatures and defaults are those of release 2.6; Intel removed the interface in 3.8. It
differs in this: an unsupported combination raises an error with the reason and never ends the
process, a model whose products all stay fp32 is not a success, convolutions are converted too,
a name that matches no op is an error, and a warning names each setting without effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from finecast.plugin import lazily

if TYPE_CHECKING:
    from finecast_neural_compressor import config, data, mix_precision, quantization
    from finecast_neural_compressor.config import (
        AccuracyCriterion,
        MixedPrecisionConfig,
        PostTrainingQuantConfig,
        TuningCriterion,
    )
    from finecast_neural_compressor.data import NamedMetric as Metric
    from finecast_neural_compressor.frameworks import load

__all__ = [
    "AccuracyCriterion",
    "Metric",
    "MixedPrecisionConfig",
    "PostTrainingQuantConfig",
    "TuningCriterion",
    "config",
    "data",
    "load",
    "mix_precision",
    "quantization",
]

_SETTINGS = (
    *("AccuracyCriterion", "MixedPrecisionConfig", "PostTrainingQuantConfig"),
    "TuningCriterion",
)
__getattr__ = lazily(
    {
        "Metric": "finecast_neural_compressor.data:NamedMetric",
        "load": "finecast_neural_compressor.frameworks",
        **dict.fromkeys(_SETTINGS, "finecast_neural_compressor.config"),
    }
)

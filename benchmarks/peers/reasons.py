"""Why finecast's model is not the fastest valid one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

HELD: Final = (
    "it keeps the loss on the samples that it was given, and loses more of the held ones: so"
    " few samples say little of others"
)
"""Of each model that loses more than is allowed."""

_TIE: Final = (
    "of two plans the more accurate one is taken unless it is known to be slower, and a ratio"
    " is timed until it is known to 0.8%; the first race, which tells which plans are"
    " evaluated, knows times to some percent"
)

REASONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("vad_silero", "cifar10_resnet20", "sst2_minilm_l6"), _TIE),
    "sts_minilm_l6": "a plan with attention in int8 and bf16 by the hint was taken; the search"
    " on SST-2 took 48 ops in int8 and the rest in fp32, which are faster",
    "synthetic_1000": "plans of int8 and bf16 are predicted to be as fast as bf16 alone, and"
    " are slower: casts of so small values take longer than predicted",
    "synthetic_5000": "most of the time goes into models of plans, and into the single errors"
    " of 5,000 ops, in two formats",
}
"""Of others, by model: found by looking at both."""

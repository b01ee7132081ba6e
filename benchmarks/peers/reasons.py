"""Why finecast's model is not the fastest valid one, by model: found by looking at both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

REASONS: Final[Mapping[str, str]] = {
    "vad_silero": "plans within 3% of one another count as equally fast, and of these the more"
    " accurate one is taken; this race sets them up to 5% apart",
    "cifar10_resnet20": "plans within 3% of one another count as equally fast, and of these"
    " the more accurate one is taken",
    "vit_tiny": "it keeps the loss on the 120 samples that it was given, two of which may be"
    " lost, and loses more of the 200 held ones: all of it in int8 is near the limit",
    "synthetic_1000": "it keeps the loss on the samples that it was given, and loses more of"
    " the held ones",
    "sst2_minilm_l6": "plans within 3% of one another count as equally fast, and of these the"
    " more accurate one is taken: all but the codes in fp32 instead of bf16",
    "resnet18": "it keeps the loss on the 120 samples that it was given, two of which may be"
    " lost, and loses seven of the 200 held ones: so few samples say little of others",
    "synthetic_5000": "most of the time goes into the single errors of 5,000 ops, in two"
    " formats, and into models of plans",
    "efficientnet_lite0": "it keeps the loss on the 120 samples that it was given, and loses"
    " more of the 200 held ones: so few samples say little of others",
}

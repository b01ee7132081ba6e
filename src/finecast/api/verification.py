"""Python's verb ``verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from finecast import keywords
from finecast.arguments import checked, group_of
from finecast.native.drift import Verification, VerifyOptions
from finecast.native.drift import verify as verified


@checked(VerifyOptions)
def verify(
    model: str | Path,
    *,
    deployed: object | None = None,
    **options: Unpack[keywords.VerifyKeywords],
) -> Verification:
    """Whether a tuned model does on this machine what it did where it was tuned.

    Its lock, which ``tune`` writes beside it, has what decides numbers (the engine and its
    version, instruction sets, settings, kernels), some samples with their outputs, and the
    time of a call. Neither data nor the fp32 model are needed.

    Args:
        model: The path of the model.
        deployed: What runs the model in production, to be verified itself: a compiled model of
            OpenVINO, an inference session of ONNX Runtime, a PyTorch module, or a function
            that takes arrays by the inputs' names and returns the outputs.
        options: ``lock`` (its path, if it is not beside the model), ``settings`` (of the
            engine, as the model is deployed) and ``strict``.

    Raises:
        FinecastError: If there is no lock, or the model cannot be run here.
    """
    return verified(Path(model), group_of(VerifyOptions, options), deployed)

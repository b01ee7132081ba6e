"""What is done with each network, in the order of ``STAGES``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from zoo import in_torch, onnx_files
from zoo.job import Found, Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage: its work, the stages it needs, and the seconds it may take."""

    work: Callable[[Job], Found]
    needs: tuple[str, ...] = ()
    limit_s: float = 240.0


def _onnx(exporter: str) -> dict[str, Stage]:
    found = {exporter: Stage(work=partial(onnx_files.export, exporter=exporter))}
    for low in ("bf16", "fp16"):
        work = partial(onnx_files.convert, exporter=exporter, low=low)
        found[f"{exporter} {low}"] = Stage(work=work, needs=(exporter,))
    return found


STAGES: Final = {
    "convert": Stage(work=in_torch.convert),
    "training": Stage(work=in_torch.train_where_bf16_pays),
    "compile": Stage(work=in_torch.compile_and_train, limit_s=2700.0),
    **_onnx("dynamo"),
    **_onnx("legacy"),
}

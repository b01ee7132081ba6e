"""A model of TensorFlow's as the subject of ``fit``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finecast.compat.neural_compressor.config import MixedPrecisionConfig, is_frozen, names
from finecast.compat.neural_compressor.lowest import all_low_but
from finecast.engines.probe import speed_of
from finecast.engines.tensorflow import TensorFlowEngine
from finecast.errors import UsageError
from finecast.files import writing
from finecast.frontends.tensorflow.loading import read_frozen
from finecast.naming import unknown_name
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.planning.planner import Planner
from finecast.rules.policy import Policy, Scope
from finecast.subjects.engine.planning import make_planner
from finecast.subjects.tensorflow.function import Function
from finecast.subjects.tensorflow.model import TensorFlowModel, of_frozen, read, take


@dataclass(frozen=True, kw_only=True)
class TensorFlowResult:
    """A converted model; ``lowered`` counts low nodes, ``products`` products among them."""

    model: Function
    lowered: int
    products: int

    @property
    def graph_def(self) -> Any:
        """The graph with its weights, as a GraphDef."""
        return self.model.graph_def

    def save(self, root: str | Path) -> None:
        """Write a SavedModel to the folder ``root``; an existing one is replaced.

        Raises:
            UsageError: If it cannot be written.
        """
        path = Path(root)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        self.model.save(path, force=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFlowFit:
    """A model with its planner; ``types`` has nodes that rules permit a low format."""

    opened: TensorFlowModel
    planner: Planner
    types: Mapping[str, str]
    known: Mapping[str, str]

    @classmethod
    def of(cls, model: Any, settings: MixedPrecisionConfig, low: Format) -> TensorFlowFit:
        """Read the model: a SavedModel, a frozen ``.pb``, a ``.keras`` file or a Keras model.

        Raises:
            UsageError: If ``inputs`` or ``outputs`` name what the model does not have, or the
                device is no CPU.
            ModelError: If it cannot be read.
        """
        if settings.device != "cpu":
            raise UsageError(
                f"TensorFlow models run on the CPU here, and device is {settings.device!r}",
                fix='use device="cpu"',
            )
        opened = _opened(model, settings)
        policy = Policy(scope=Scope.AUTO, formats=(low,))
        planner = make_planner(opened.prepare(policy), policy, TensorFlowEngine())
        known = {n.name: n.native.rpartition("::")[2] for n in planner.graph.nodes}
        types = {
            n.name: known[n.name]
            for n in planner.graph.float_nodes
            if low in planner.permissions[n.id].formats
        }
        return cls(opened=opened, planner=planner, types=types, known=known)

    @property
    def original(self) -> Function:
        """The fp32 model as a function."""
        return Function(frozen=self.opened.model)

    def build(self, kept: frozenset[str]) -> TensorFlowResult:
        """The model with every op low that may be and is not in ``kept``."""
        plan, lowered = all_low_but(self.planner, kept)
        return TensorFlowResult(
            model=Function(frozen=self.opened.build(plan).model, plan=plan),
            lowered=len(lowered),
            products=sum(by_name(op).matmul_engine for op in lowered),
        )

    def predictor(self, model: Function) -> Callable[[Any], Any]:
        """Outputs on one batch, as arrays."""

        def predict(inputs: Any) -> Any:
            given = inputs if isinstance(inputs, tuple | list | Mapping) else (inputs,)
            found = model(given) if isinstance(given, Mapping) else model(*given)
            if isinstance(found, dict):
                return [np.asarray(value) for value in found.values()]
            return np.asarray(found)

        return predict

    def slow(self, low: Format) -> str:
        """Why ``low`` gains nothing, measured; empty if it does."""
        found = speed_of(TensorFlowEngine(), low)
        return "" if found.gains else f"{found.text} (measured)"


def load_saved_model(folder: Path) -> TensorFlowResult:
    """A model that ``TensorFlowResult.save`` wrote.

    Raises:
        ModelError: If it cannot be read.
    """
    opened = read(folder)
    low = [n.op for n in opened.file.graph.float_nodes if n.format is not Format.FP32]
    return TensorFlowResult(
        model=Function(frozen=opened.model),
        lowered=len(low),
        products=sum(by_name(op).matmul_engine for op in low),
    )


def _opened(model: Any, settings: MixedPrecisionConfig) -> TensorFlowModel:
    inputs, outputs = names(settings.inputs), names(settings.outputs)
    if is_frozen(model):
        frozen = read_frozen(Path(model), inputs, outputs)
        return of_frozen(frozen, str(model))
    opened = read(Path(model)) if isinstance(model, str | Path) else take(model)
    ports = [p.name for p in (*opened.model.inputs, *opened.model.outputs)]
    for name in settings.ports:
        if name not in ports:
            raise unknown_name(name, ports, what="input or output", where="of the model")
    return opened

"""Models of ONNX and TensorFlow, which engines run, as ``fit`` takes and returns them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import onnx
import onnx_ir as ir

from finecast import api
from finecast.compat.neural_compressor.config import MixedPrecisionConfig
from finecast.compat.neural_compressor.given_model import (
    GivenModel,
    Lowered,
    Rules,
    feeds_of,
    low_ops,
    products_in,
)
from finecast.compat.neural_compressor.op_dicts import OpRule, names
from finecast.engines import get_engine
from finecast.engines.base import Feeds, Session
from finecast.engines.probe import Speed
from finecast.errors import UsageError
from finecast.files import writing
from finecast.frontends import onnx as frontend
from finecast.frontends import openvino as openvino_frontend
from finecast.frontends.onnx.model import Stage
from finecast.frontends.openvino.model import IR_SUFFIX
from finecast.graph import Graph
from finecast.naming import unknown_name
from finecast.numbers.formats import Format
from finecast.pipeline.model import OpenedModel, RunOptions
from finecast.pipeline.sources import DataOptions
from finecast.pipeline.subject import Built
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.rules import NodeView
from finecast.rules.policy import Policy, Scope
from finecast.rules.tier import TIER
from finecast.subjects.engine.subject import EngineSubject

_IN_TENSORFLOW: Final = {
    "Convolution": "Conv2D",
    "GroupConvolution": "DepthwiseConv2dNative",
}


class ModelSession:
    """A session (``inner``) with the native ``module`` that it was loaded from."""

    def __init__(self, inner: Session, module: Any) -> None:
        self.inner, self.module = inner, module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class ModelSubject(EngineSubject):
    """A subject whose sessions tell their models."""

    def session(self, built: Built) -> Session:
        """The session of a plan's model."""
        found: Any = ModelSession(EngineSubject.session(self, built), built.model)
        return found

    def hints(self, planner: Planner) -> tuple[()]:
        """None: what the engine lowers by itself is no model that could be evaluated."""
        del planner
        return ()


@dataclass(kw_only=True)
class EngineModelGiven(GivenModel):
    """A model of a library that has engines, opened; ``engine`` is None for the first."""

    opened: OpenedModel
    engine: str | None = None

    def __post_init__(self) -> None:
        """Load the model, and read its ops."""
        found = self.opened.subject(self.engine, None)
        assert isinstance(found, EngineSubject)
        self._subject, engine = found, found.engine
        self._options = RunOptions(engine=f"{engine.name}:{engine.device}", verify=False)
        graph = self.graph(Policy(scope=Scope.NONE))
        self.known = {n.name: self._kind(n.native.rpartition("::")[2]) for n in graph.nodes}

    def _kind(self, native: str) -> str:
        """The name that the user knows an op's type by."""
        return native

    def check_ports(self, names: Sequence[str]) -> None:
        """Raise UsageError for a name that no input and no output has."""
        if self.names_ports:  # they were looked up when it was read
            return
        reference = self._subject.reference
        ports = [spec.name for spec in (*reference.inputs, *reference.outputs)]
        for name in names:
            if name not in ports:
                raise unknown_name(name, ports, what="input or output", where="of the model")

    def graph(self, policy: Policy) -> Graph:
        """The graph, prepared for the policy."""
        return self.opened.judge(policy, self._options)[0]

    def convertible(self, low: Format) -> Mapping[str, str]:
        """The ops that rules permit ``low``."""
        _, plan = self.opened.judge(Policy(formats=(low,)), self._options)
        return {n: self.known[n] for n, fmt in plan.formats.items() if fmt is low}

    def speed(self, low: Format) -> Speed:
        """By short probes of the engine."""
        return self._subject.speed(low)

    def predictor(self, model: Any) -> Callable[[Any], Any]:
        """Outputs on one batch, as arrays: of several a list."""

        def predict(inputs: Any) -> Any:
            found = model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
            return list(found.values()) if isinstance(found, dict) else found

        return predict

    def lowered(self, low: Format, kept: frozenset[str]) -> Lowered:
        """By the lowest plan that rules permit."""
        rule = OpRule(dict.fromkeys(kept, frozenset({Format.FP32})))
        options = replace(self._options, user_rules={"conf": rule} if kept else {})
        _, plan = self.opened.judge(Policy(formats=(low,)), options)
        return self.result(self.opened.build(plan).model, plan)

    def feeds(self, inputs: Any) -> Feeds:
        """The inputs of one batch by name."""
        return feeds_of(inputs, [spec.name for spec in self._subject.reference.inputs])

    def quantized(self, policy: Policy, rules: Rules, calibration: Sequence[Any]) -> Lowered:
        """By ``finecast.convert``; as nothing is measured, sensitive ops keep fp32."""
        feeds = [self.feeds(inputs) for inputs in calibration]

        def sensitive(view: NodeView) -> str | None:
            if any(rule(view) for rule in rules.values()):
                return None
            unmeasured = replace(view.context, policy=Policy(formats=policy.formats))
            return "fp32" if TIER.judge(view.node, unmeasured) else None

        done = api.convert(
            self.opened,
            None,
            policy,
            engine=self._options.engine,
            data=DataOptions(calib=lambda: feeds),
            user_rules={**rules, "sensitive ops": sensitive},
            progress=False,
        )
        return self.result(self.opened.build(done.plan).model, done.plan)

    def subject(self) -> ModelSubject:
        """The model in its engine."""
        found = self._subject
        return ModelSubject(
            model=found.model, engine=found.engine, reference=found.reference, told=found.told
        )


@dataclass(frozen=True, kw_only=True)
class EngineResult:
    """A converted model; ``low_ops`` are the canonical ops of its low nodes."""

    low_ops: tuple[str, ...]

    @property
    def lowered(self) -> int:
        """How many nodes are low."""
        return len(self.low_ops)

    @property
    def products(self) -> int:
        """How many of them are matrix products or convolutions."""
        return products_in(self.low_ops)


def low_in(opened: OpenedModel) -> tuple[str, ...]:
    """The canonical op of each node that is low in a model as it is."""
    graph, _ = opened.judge(Policy(scope=Scope.NONE), RunOptions(verify=False))
    return tuple(n.op for n in graph.float_nodes if n.format is not Format.FP32)


class SessionFunction:
    """A loaded model, called with arrays by position or by name."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ports = [spec.name for spec in session.inputs]

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The output as an array; several as a dict by name."""
        whole = inputs[0] if len(inputs) == 1 else inputs
        found = self._session.run(feeds_of(named or whole, self._ports))
        return next(iter(found.values())) if len(found) == 1 else found


@dataclass(kw_only=True)
class OnnxGiven(EngineModelGiven):
    """An ONNX model."""

    @property
    def original(self) -> Any:
        """The model's ModelProto; its path, if it is too large for one message."""
        model = self.opened.model
        fits = frontend.fits_one_message(model)
        return frontend.to_proto(model) if fits else str(self.opened.path)

    def predictor(self, model: Any) -> Callable[[Any], Any]:
        """Outputs on one batch, in the engine."""
        given = Path(model) if isinstance(model, str) else model.SerializeToString()
        function = SessionFunction(self._subject.engine.load(given))
        return EngineModelGiven.predictor(self, function)

    def result(self, model: ir.Model, plan: Plan | None) -> OnnxResult:
        """The result for the model of a plan."""
        return OnnxResult(converted=model, low_ops=low_ops(plan), given=self.opened.path)


@dataclass(frozen=True, kw_only=True)
class OnnxResult(EngineResult):
    """A converted ONNX model; methods with INC's names give parts of ``model``.

    ``given`` is the file that it was converted from.
    """

    converted: ir.Model
    given: Path

    @cached_property
    def model(self) -> Any:
        """The ModelProto with its tensors; over 2 GB the path of a file, deleted with this."""
        if frontend.fits_one_message(self.converted):
            return frontend.to_proto(self.converted)
        path = self._stage.folder / "model.onnx"
        frontend.save(self.converted, path)
        return str(path)

    @cached_property
    def _stage(self) -> Stage:
        return Stage()

    def save(self, root: str | Path) -> None:
        """Write the ONNX file ``root``; in a folder, ``best_model.onnx``.

        An existing file is replaced. Tensors are stored as the given model had them, in the
        file or beside it in ``NAME.data``; over 2 GB always beside it.

        Raises:
            UsageError: If the file cannot be written, or is the one that was converted.
        """
        is_folder = str(root).endswith(("/", os.sep)) or Path(root).is_dir()
        path = Path(root) / "best_model.onnx" if is_folder else Path(root)
        if path.resolve() == self.given.resolve():
            raise UsageError(
                "would replace the model that was converted",
                where=str(path),
                fix="give another name",
            )
        make_parent(path)
        frontend.save(self.converted, path, force=True)

    def graph(self) -> onnx.GraphProto:
        """The graph."""
        proto = self.model
        large = isinstance(proto, str)
        return (onnx.load(proto, load_external_data=False) if large else proto).graph

    def nodes(self) -> Any:
        """The nodes of the graph."""
        return self.graph().node

    def initializer(self) -> Any:
        """The constants of the graph."""
        return self.graph().initializer

    def input(self) -> list[str]:
        """Names of the inputs."""
        constants = {t.name for t in self.initializer()}
        return [p.name for p in self.graph().input if p.name not in constants]

    def output(self) -> list[str]:
        """Names of the outputs."""
        return [p.name for p in self.graph().output]


@dataclass(kw_only=True)
class TensorFlowGiven(EngineModelGiven):
    """A model of TensorFlow's, in TensorFlow."""

    names_ports: bool = False

    @classmethod
    def of(cls, model: Any, settings: MixedPrecisionConfig) -> TensorFlowGiven:
        """A SavedModel, a frozen ``.pb``, a ``.keras`` file or a Keras model.

        A frozen graph has no signature: the settings name its inputs and outputs.
        """
        from finecast.frontends.tensorflow.loading import read_frozen

        if Path(str(model)).suffix.lower() != ".pb":
            return cls(opened=api.load(model))
        frozen: Any = read_frozen(Path(model), names(settings.inputs), names(settings.outputs))
        return cls(opened=api.load(frozen), names_ports=True)

    @property
    def original(self) -> Any:
        """The model as a function."""
        return self.result(self.opened.model, None).model

    def result(self, model: Any, plan: Plan | None) -> TensorFlowResult:
        """The result for the model of a plan."""
        from finecast.tensorflow import Function

        return TensorFlowResult(model=Function(frozen=model, plan=plan), low_ops=low_ops(plan))


@dataclass(frozen=True, kw_only=True)
class TensorFlowResult(EngineResult):
    """A converted model of TensorFlow's; ``model`` is a ``finecast.tensorflow.Function``."""

    model: Any

    @property
    def graph_def(self) -> Any:
        """The graph with its weights, as a GraphDef."""
        return self.model.graph_def

    def save(self, root: str | Path) -> None:
        """Write a SavedModel to the folder ``root``; an existing one is replaced.

        Raises:
            UsageError: If it cannot be written.
        """
        make_parent(Path(root))
        self.model.save(root, force=True)


@dataclass(kw_only=True)
class OpenVinoGiven(EngineModelGiven):
    """A model of TensorFlow's in OpenVINO, which has kernels for int8: TensorFlow has none.

    Ops have the names of OpenVINO's reading, and TensorFlow's types.
    """

    def _kind(self, native: str) -> str:
        return _IN_TENSORFLOW.get(native, native)

    @property
    def original(self) -> Any:
        """The model as a function."""
        return self.result(self.opened.model, None).model

    def result(self, model: Any, plan: Plan | None) -> OpenVinoResult:
        """The result for the model of a plan."""
        return OpenVinoResult(native=model, low_ops=low_ops(plan))


@dataclass(frozen=True, kw_only=True)
class OpenVinoResult(EngineResult):
    """A model quantized for OpenVINO; ``native`` is the ``openvino.Model``."""

    native: Any

    @cached_property
    def model(self) -> SessionFunction:
        """The model, compiled, as a function of arrays."""
        return SessionFunction(get_engine("openvino").load(self.native))

    def save(self, root: str | Path) -> None:
        """Write IR, ``root`` or ``best_model.xml`` in that folder; replaces existing files.

        Raises:
            UsageError: If it cannot be written.
        """
        path = Path(root)
        path = path if path.suffix == IR_SUFFIX else path / f"best_model{IR_SUFFIX}"
        make_parent(path)
        openvino_frontend.save(self.native, path)


def make_parent(path: Path) -> None:
    """Make the folder of ``path``; raises UsageError if that fails."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)


def load_model(path: Path) -> EngineResult:
    """A model that ``save`` wrote: an ONNX file, IR or a SavedModel.

    Raises:
        UsageError: If there is no such file.
        ModelError: If it is not a valid model.
    """
    opened = api.load(path)
    ops, model = low_in(opened), opened.model
    if path.is_dir():
        from finecast.tensorflow import Function

        return TensorFlowResult(model=Function(frozen=model), low_ops=ops)
    if path.suffix == IR_SUFFIX:
        return OpenVinoResult(native=model, low_ops=ops)
    return OnnxResult(converted=model, given=path, low_ops=ops)

"""Models of ONNX and TensorFlow, which engines run, as ``fit`` takes and returns them."""

from __future__ import annotations

import importlib
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import onnx

from finecast import DataOptions, Format, Plan, Policy, Scope, api, get_engine
from finecast.api import RunOptions
from finecast.engines import Engine, Feeds, Session, Speed
from finecast.errors import UsageError
from finecast.files import writing
from finecast.frontends import onnx as frontend
from finecast.frontends import openvino as openvino_frontend
from finecast.frontends.onnx import Stage
from finecast.frontends.openvino import IR_SUFFIX
from finecast.graph import Graph
from finecast.naming import unknown_name
from finecast.native import Built, EngineSubject, OpenedModel, plan_notes
from finecast.planning import Planner
from finecast.rules import TIER, NodeView
from finecast_neural_compressor.given_model import (
    GivenModel,
    Rules,
    feeds_of,
    low_ops,
    products_in,
)
from finecast_neural_compressor.op_dicts import OpRule


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
        session: Any = ModelSession(EngineSubject.session(self, built), built.model)
        return session

    def hints(self, planner: Planner) -> tuple[()]:
        """None: what the engine lowers by itself is no model that could be evaluated."""
        del planner
        return ()


@dataclass(kw_only=True)
class EngineModelGiven(GivenModel):
    """A model of a library that has engines, opened.

    Attributes:
        opened: The model.
        results: The class of its results.
        engine: ``NAME[:DEVICE]``; None for the first that runs the model.
    """

    opened: OpenedModel
    results: type[EngineResult]
    engine: str | None = None
    names_ports: bool = False

    def __post_init__(self) -> None:
        """Load the model, and read its ops."""
        subject = self.opened.subject(self.engine, None)
        assert isinstance(subject, EngineSubject)
        self._subject, engine = subject, subject.engine
        self._options = RunOptions(engine=engine.spec, verify=False)
        called = self.results.types
        graph = self.graph(Policy(scope=Scope.NONE))
        native = {n.name: n.native.rpartition("::")[2] for n in graph.nodes}
        self.known = {name: called.get(kind, kind) for name, kind in native.items()}

    @property
    def native(self) -> Any:
        """The fp32 model in its library's form."""
        return self.opened.model

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
        _, plan, _ = self.opened.judge(Policy(formats=(low,)), self._options)
        return {n: self.known[n] for n, fmt in plan.formats.items() if fmt is low}

    def speed(self, low: Format) -> Speed:
        """By short probes of the engine."""
        return self._subject.speed(low)

    def lowered(self, low: Format, kept: frozenset[str]) -> EngineResult:
        """By the lowest plan that rules permit."""
        rule = OpRule(dict.fromkeys(kept, frozenset({Format.FP32})))
        options = replace(self._options, user_rules={"conf": rule} if kept else {})
        _, plan, _ = self.opened.judge(Policy(formats=(low,)), options)
        return self.result(self.opened.build(plan).model, plan)

    def feeds(self, inputs: Any) -> Feeds:
        """The inputs of one batch by name."""
        return feeds_of(inputs, [spec.name for spec in self._subject.reference.inputs])

    def quantized(
        self, policy: Policy, rules: Rules, calibration: Sequence[Any]
    ) -> EngineResult:
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
        for text in plan_notes(done.plan):
            warnings.warn(text, stacklevel=4)
        return self.result(self.opened.build(done.plan).model, done.plan)

    def subject(self) -> ModelSubject:
        """The model in its engine."""
        subject = self._subject
        return ModelSubject(
            model=subject.model,
            engine=subject.engine,
            reference=subject.reference,
            told=subject.told,
        )

    def result(self, model: Any, plan: Plan | None) -> EngineResult:
        """The result for the native model of a plan."""
        engine = self._subject.engine
        return self.results(native=model, opened=self.opened, plan=plan, engine=engine)


class SessionFunction:
    """A loaded model, called with arrays by position or by name."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ports = [spec.name for spec in session.inputs]

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The output as an array; several as a dict by name."""
        whole = inputs[0] if len(inputs) == 1 else inputs
        outputs = self._session.run(feeds_of(named or whole, self._ports))
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs


@dataclass(frozen=True, kw_only=True)
class EngineResult(ABC):
    """A converted model.

    Attributes:
        native: The model in its library's form.
        opened: The model that it was converted from; or itself, as it was read from a file.
        plan: The plan that it was built from; None if it was read.
        engine: What runs it; None for OpenVINO.
        types: INC's names for types of ops that the library calls otherwise.
    """

    native: Any
    opened: OpenedModel
    plan: Plan | None = None
    engine: Engine | None = None
    types: ClassVar[Mapping[str, str]] = {}

    def __repr__(self) -> str:
        """The class and what is low; models' own forms are of any length and depth."""
        return f"<{type(self).__name__}: {self.lowered} ops in reduced precision>"

    @cached_property
    def model(self) -> Any:
        """The model, as an evaluation takes it."""
        raise NotImplementedError

    @abstractmethod
    def save(self, root: str | Path) -> None:
        """Write the model; what is there is replaced.

        Raises:
            UsageError: If it cannot be written.
        """

    @cached_property
    def low_ops(self) -> tuple[str, ...]:
        """The canonical op of each low node."""
        if self.plan is not None:
            return low_ops(self.plan)
        graph, _, _ = self.opened.judge(Policy(scope=Scope.NONE), RunOptions(verify=False))
        return tuple(n.op for n in graph.float_nodes if n.format is not Format.FP32)

    @property
    def lowered(self) -> int:
        """How many nodes are low."""
        return len(self.low_ops)

    @property
    def products(self) -> int:
        """How many of them are matrix products or convolutions."""
        return products_in(self.low_ops)

    def predict(self, inputs: Any) -> Any:
        """Outputs on one batch, as arrays: of several a list."""
        run = self._function
        outputs = run(*inputs) if isinstance(inputs, tuple | list) else run(inputs)
        return list(outputs.values()) if isinstance(outputs, dict) else outputs

    @cached_property
    def _function(self) -> Any:
        """The model as a function of arrays."""
        return self.model

    def _loaded(self, model: Any) -> SessionFunction:
        return SessionFunction((self.engine or get_engine("openvino")).load(model))


@dataclass(frozen=True, kw_only=True, repr=False)
class OnnxResult(EngineResult):
    """A converted ONNX model; methods with INC's names give parts of ``model``."""

    @cached_property
    def model(self) -> Any:
        """The ModelProto with its tensors.

        Over 2 GB it is the path of a file: the one that was read, or one that is deleted with
        this result.
        """
        if frontend.fits_one_message(self.native):
            return frontend.to_proto(self.native)
        if self.native is self.opened.model:
            return str(self.opened.path)
        path = self._stage.folder / "model.onnx"
        frontend.save(self.native, path)
        return str(path)

    @cached_property
    def _stage(self) -> Stage:
        return Stage()

    @cached_property
    def _function(self) -> Any:
        whole = self.model
        return self._loaded(
            Path(whole) if isinstance(whole, str) else whole.SerializeToString()
        )

    def save(self, root: str | Path) -> None:
        """Write the ONNX file ``root``; in a folder, ``best_model.onnx``.

        An existing file is replaced. Tensors are stored as the given model had them, in the
        file or beside it in ``NAME.data``; over 2 GB always beside it.

        Raises:
            UsageError: If the file cannot be written, or is the one that was converted.
        """
        is_folder = str(root).endswith(("/", os.sep)) or Path(root).is_dir()
        path = Path(root) / "best_model.onnx" if is_folder else Path(root)
        if path.resolve() == self.opened.path.resolve():
            raise UsageError(
                "would replace the model that was converted",
                where=str(path),
                fix="give another name",
            )
        make_parent(path)
        frontend.save(self.native, path, force=True)

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


@dataclass(frozen=True, kw_only=True, repr=False)
class TensorFlowResult(EngineResult):
    """A converted model of TensorFlow's."""

    @cached_property
    def model(self) -> Any:
        """The model as a ``finecast.tensorflow.Function``."""
        tensorflow = importlib.import_module("finecast.tensorflow")
        return tensorflow.Function(frozen=self.native, plan=self.plan)

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


@dataclass(frozen=True, kw_only=True, repr=False)
class OpenVinoResult(EngineResult):
    """A model of TensorFlow's quantized for OpenVINO: TensorFlow has no kernels for int8.

    ``native`` is the ``openvino.Model``. Ops have the names of OpenVINO's reading, and
    TensorFlow's types.
    """

    types: ClassVar[Mapping[str, str]] = {
        "Convolution": "Conv2D",
        "GroupConvolution": "DepthwiseConv2dNative",
    }

    @cached_property
    def model(self) -> SessionFunction:
        """The model, compiled, as a function of arrays."""
        return self._loaded(self.native)

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
    named = OpenVinoResult if path.suffix == IR_SUFFIX else OnnxResult
    results = TensorFlowResult if path.is_dir() else named
    return results(native=opened.model, opened=opened)

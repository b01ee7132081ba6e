"""An OpenVINO model that plans are made for and built of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from finecast.engines.base import Engine
from finecast.frontends import openvino as frontend
from finecast.frontends.openvino import OvApplied, OvFile, OvPrepared
from finecast.graph import Dim, Graph
from finecast.pipeline.artefact import Destination, Verified
from finecast.pipeline.conversion import kept_types
from finecast.pipeline.sources import FeedMaker
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.rules.policy import Policy
from finecast.subjects.engine.native import EngineBuilt, PreparedModel
from finecast.subjects.openvino.artefact import check_output, write

if TYPE_CHECKING:
    import openvino


@dataclass(slots=True, kw_only=True)
class OvSource:
    """A model as it was read, with its graph as the last policy had it prepared."""

    file: OvFile
    _prepared: tuple[Policy, OvPrepared] | None = field(default=None, init=False)

    @property
    def model(self) -> openvino.Model:
        """The model."""
        return self.file.model

    @property
    def loadable(self) -> openvino.Model:
        """The model: it was read once, from whatever it is stored as."""
        return self.file.model

    @property
    def name(self) -> str:
        """The file as it was named."""
        return self.file.name

    @property
    def digest(self) -> str:
        """Of all its files."""
        return self.file.digest

    @property
    def size_bytes(self) -> int:
        """Of all its files."""
        return self.file.size_bytes

    @property
    def told(self) -> Sequence[str]:
        """Models are taken as they are."""
        return ()

    @property
    def input_shapes(self) -> Mapping[str, tuple[Dim, ...] | None]:
        """Declared shapes of the inputs."""
        return frontend.input_shapes(self.file.model)

    def prepare(self, policy: Policy) -> OvPrepared:
        """The model as ``policy`` plans it; that of the last policy is kept."""
        if self._prepared is None or self._prepared[0] != policy:
            self._prepared = (policy, frontend.prepare(self.file, policy))
        return self._prepared[1]

    def check_policy(self, policy: Policy) -> None:
        """Names that match nothing are refused as the model is prepared."""
        self.prepare(policy)

    def build(self, plan: Plan) -> EngineBuilt:
        """The plan replayed on a copy of the model; constants that stay are shared with it."""
        applied = frontend.apply(self.file, plan)
        size = frontend.size_bytes(applied.model)
        return EngineBuilt(plan=plan, applied=applied, size_bytes=size)

    def consume(self, prepared: PreparedModel, plan: Plan) -> EngineBuilt:
        """As ``build``: a graph holds no copy of the model."""
        del prepared
        return self.build(plan)

    def notes(self, planner: Planner) -> Sequence[str]:
        """Of ops that keep a type of their own."""
        return self.kept(planner.graph, planner.policy)

    def kept(self, graph: Graph, policy: Policy) -> list[str]:
        """Which ops keep their types, and why."""
        return [
            f"{text}: convert the model in fp32" for text in kept_types(graph, policy).values()
        ]

    def earlier(self, policy: Policy) -> list[str]:
        """What becomes of a conversion that the model came with: it stays."""
        del policy
        was = self.file.converted
        what = f"an earlier conversion to {was} stays: for fp32 give the model of before it"
        return [what] if was else []

    def check(self, output: Destination) -> None:
        """Raise UsageError unless IR may be written there."""
        check_output(output)

    def store(
        self,
        built: EngineBuilt,
        output: Destination,
        engines: Sequence[Engine],
        feeds: FeedMaker,
    ) -> tuple[int, Verified]:
        """Both files of IR, once the model was loaded and run."""
        assert isinstance(built.applied, OvApplied)
        return write(self.file, built.plan, built.applied, output, engines, feeds)

    def handed(self, built: EngineBuilt) -> Any:
        """The ``ov.Model``."""
        return built.model

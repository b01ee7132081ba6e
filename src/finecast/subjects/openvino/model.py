"""An OpenVINO model that plans are made for and built of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finecast.devices.emulation import Emulation
from finecast.engines.base import Engine, Session
from finecast.engines.loading import exact_session
from finecast.errors import UsageError
from finecast.frontends import openvino as frontend
from finecast.frontends.openvino import OvApplied, OvFile, OvPrepared
from finecast.frontends.roundable import Roundable
from finecast.graph import Dim, Graph
from finecast.pipeline.artefact import Destination, Verified
from finecast.pipeline.conversion import earlier_conversion, kept_types
from finecast.pipeline.program import Program
from finecast.pipeline.sources import FeedMaker
from finecast.planning.plan import Plan
from finecast.rules.policy import Policy, Scope
from finecast.subjects.engine.model import EngineModel, engine_of
from finecast.subjects.engine.native import EngineBuilt, PreparedModel
from finecast.subjects.engine.program import NativeProgram
from finecast.subjects.engine.source import FileSource
from finecast.subjects.openvino.artefact import check_output, write

if TYPE_CHECKING:
    import openvino

_ENGINE = "openvino"


def read(path: Path, *, trust: bool = False) -> OvModel:
    """The model in a file or folder that OpenVINO reads.

    Raises:
        UsageError: If ``trust`` is given: there is nothing to trust.
    """
    if trust:
        raise UsageError("--trust is for .pt2 files", where=str(path), fix="leave it out")
    return OvModel(file=frontend.load(path))


def take(model: Any) -> OvModel:
    """An ``ov.Model``, or what was read."""
    return OvModel(file=model if isinstance(model, OvFile) else frontend.from_model(model))


@dataclass(slots=True, kw_only=True)
class OvModel(FileSource[OvFile, OvPrepared], EngineModel):
    """An OpenVINO model, opened."""

    @property
    def loadable(self) -> openvino.Model:
        """The model: it was read once, from whatever it is stored as."""
        return self.file.model

    @property
    def opset(self) -> int:
        """Operation sets do not tell what types an op takes."""
        return 0

    @property
    def told(self) -> Sequence[str]:
        """Models are taken as they are."""
        return ()

    @property
    def input_shapes(self) -> Mapping[str, tuple[Dim, ...] | None]:
        """Declared shapes of the inputs."""
        return frontend.input_shapes(self.file.model)

    def runners(self, spec: str | None) -> Sequence[Engine]:
        """OpenVINO, on the device asked for."""
        return [engine_of(spec, _ENGINE, "OpenVINO")]

    def reference(self) -> Session:
        """In OpenVINO, in the types that it states."""
        return exact_session(self.file.model)

    def truth(self) -> tuple[None, tuple[str, ...]]:
        """None is more exact."""
        return None, ()

    def taken(self, from_type: str) -> OvModel:
        """Refused: models are converted in fp32."""
        raise UsageError(
            f"--from-type {from_type} does not apply to OpenVINO models",
            where=self.name,
            fix="convert the model in fp32",
        )

    def planned(self, plan: Plan) -> OvModel:
        """The model: it is planned as it is."""
        del plan
        return self

    def roundable(self, policy: str) -> Roundable:
        """A copy that rounds by arithmetic, without a conversion to another policy."""
        return frontend.roundable(self.file, policy)

    def program(self, emulation: Emulation) -> Program:
        """The model as it is, rounded by arithmetic."""
        return NativeProgram(source=self, emulation=emulation)

    def prepare_once(self, *, own: bool) -> OvPrepared:
        """A graph holds no copy of the model: nothing is used up."""
        del own
        return self.prepare(Policy(scope=Scope.NONE))

    def _prepare(self, policy: Policy) -> OvPrepared:
        return frontend.prepare(self.file, policy)

    def _apply(self, plan: Plan, prepared: PreparedModel | None) -> OvApplied:
        """On a copy; constants that stay are shared with it."""
        del prepared
        return frontend.apply(self.file, plan)

    def _size_of(self, model: Any) -> int:
        return frontend.size_bytes(model)

    def kept(self, graph: Graph, policy: Policy) -> list[str]:
        """Which ops keep their types, and why."""
        return [
            f"{text}: convert the model in fp32" for text in kept_types(graph, policy).values()
        ]

    def earlier(self, policy: Policy) -> list[str]:
        """What becomes of a conversion that the model came with."""
        return earlier_conversion(self.file.converted, policy)

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
        return write(self, built, output, engines, feeds)

    def handed(self, built: EngineBuilt) -> openvino.Model:
        """The ``ov.Model``."""
        return built.model

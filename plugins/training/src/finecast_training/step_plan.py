"""How a training step is computed: by plans of its graphs, under autocast, or in fp32."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch

from finecast import Format, Plan, Policy
from finecast.errors import UsageError
from finecast.files import check_writable, read_text, write_text
from finecast.frontends.torch import DTYPES
from finecast.naming import member_of
from finecast.planning import Decision
from finecast.terminal import one_line
from finecast_training.backend import Backend, JointGraph, Memory, compiled, compiled_apart
from finecast_training.step import LossOf
from finecast_training.training_rules import as_autocast

_VERSION: Final = 1
_KIND: Final = "finecast.step"
_LARGEST_BYTES: Final = 1 << 30
# The share of a graph's ops that a plan may leave out without a warning.
_FEW: Final = 0.2
_FIX: Final = "give a file that `save` of a tuned step wrote, unchanged"


class Way(Enum):
    """What decides the formats of a training step's ops."""

    PLANNED = "planned"
    AUTOCAST = "autocast"
    FP32 = "fp32"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepPlan:
    """A training step's formats, op by op, and what is kept between its passes.

    Attributes:
        name: How it was found.
        policy: The policy that it was made under.
        way: What decides formats.
        plans: The plans of the step's graphs, where these decide.
        memory: What the forward pass saves for the backward pass.
        scale: What the loss is multiplied with before the backward pass; 1 without fp16.
        states: What optimizers call those of their states that are held in the low format
            from one of their steps to the next; ``gradients`` if these are, too.
    """

    name: str
    policy: str
    way: Way = Way.PLANNED
    plans: tuple[Plan, ...] = ()
    memory: Memory = Memory.AUTOCAST
    scale: float = 1.0
    states: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Its name, and what is low."""
        return f"<StepPlan {one_line(self.name)}: {one_line(self.words)}>"

    @property
    def digest(self) -> str:
        """Equal for plans that do the same."""
        of_plans = ",".join(plan.digest for plan in self.plans)
        states = "".join(f":{name}" for name in self.states)
        return f"{self.way.value}:{of_plans}:{self.memory.value}{states}"

    @property
    def counts(self) -> dict[str, int]:
        """Number of ops per format, most frequent first."""
        total = Counter[str]()
        for plan in self.plans:
            total.update(plan.counts)
        return dict(total.most_common())

    @property
    def words(self) -> str:
        """What is low, in a few words."""
        if self.way is not Way.PLANNED:
            return self.way.value
        ops = ", ".join(f"{count} {label}" for label, count in self.counts.items())
        least = "; as little as possible is kept for the backward pass"
        return f"{ops or 'no op'}{least if self.memory is Memory.LEAST else ''}"

    @property
    def format(self) -> Format:
        """The low format that the policy prefers, of those that values are stored in.

        That is autocast's, too: bf16 where the policy names formats of products alone.
        """
        stored = Policy.parse(self.policy).stored
        return Format.BF16 if stored is Format.FP32 else stored

    @property
    def dtype(self) -> torch.dtype:
        """That format as PyTorch has it."""
        return DTYPES[self.format]

    def compile(self, module: LossOf, *, kernels: bool = True) -> Callable[..., Any]:
        """The loss of a batch, compiled so; op by op without ``kernels``."""
        dtype, device = self.dtype, next(module.parameters()).device.type
        if self.way is Way.AUTOCAST:
            call = _under_autocast(module, device, dtype)
            return compiled_apart(call, "inductor") if kernels else call
        # A compiled module would write what is set on it to the module itself.
        if self.way is Way.FP32:
            return compiled_apart(module.forward, "inductor") if kernels else module.forward
        backend = Backend(
            self.policy,
            memory=self.memory.value,
            chooser=Chosen(self.plans).plan if self.plans else None,
            kernels=kernels,
        )
        return compiled(module.forward, backend)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        return {
            "name": self.name,
            "policy": self.policy,
            "way": self.way.value,
            "memory": self.memory.value,
            "scale": self.scale,
            "states": list(self.states),
            "plans": [json.loads(plan.to_json()) for plan in self.plans],
        }

    def to_json(self) -> str:
        """Text that ``from_json`` reads back to an equal plan."""
        content = {"version": _VERSION, "kind": _KIND, **self.to_dict()}
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str = "plan") -> StepPlan:
        """Read a plan.

        Raises:
            UsageError: If the text is no plan of a training step that this release reads.
        """
        try:
            content = json.loads(text)
        except ValueError:
            content = None
        if not isinstance(content, dict) or content.get("kind") != _KIND:
            raise UsageError("not the plan of a training step", where=where, fix=_FIX)
        if content.get("version") != _VERSION:
            version = content.get("version")
            raise UsageError(
                f"a plan of version {version!r}, not {_VERSION}", where=where, fix=_FIX
            )
        try:
            return cls(
                name=str(content["name"]),
                policy=Policy.parse(content["policy"]).label,
                way=member_of(Way, content["way"], what="way"),
                memory=member_of(Memory, content["memory"], what="memory"),
                scale=float(content["scale"]),
                states=tuple(map(str, content.get("states", ()))),
                plans=tuple(
                    Plan.from_json(json.dumps(plan), where=f"{where}, plans[{number}]")
                    for number, plan in enumerate(content["plans"])
                ),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"not the plan of a training step: {error!r}"
            raise UsageError(what, where=where, fix=_FIX) from error

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write it to a file.

        Raises:
            UsageError: If the file exists and ``force`` is not given, or cannot be written.
        """
        check_writable(Path(path), force=force)
        write_text(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> StepPlan:
        """Read a file that ``save`` wrote.

        Raises:
            UsageError: If it is missing or something else.
        """
        text = read_text(Path(path), what="plan", most_bytes=_LARGEST_BYTES, fix=_FIX)
        return cls.from_json(text, where=str(path))


class Chosen:
    """Chooses the formats of plans that were made before.

    An op is found by its name and kind: a graph of other sizes, without dropout, without a
    backward pass or of a module that is wrapped in another one has most of the ops of the one
    that a plan was made for. What no plan decides has the format of the policy's plan; if that
    is much, a warning says so.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = plans
        self.formats = {_key(d): d.format for plan in plans for d in plan.decisions}
        self.warned = False

    def plan(self, joint: JointGraph) -> Plan:
        """The plan of one graph."""
        for plan in self.plans:
            if plan.model == joint.graph.digest:
                return plan
        base = joint.fastest(as_autocast(joint.planner))
        known = {d.node: self.formats.get(_key(d)) for d in base.decisions}
        missed = sum(fmt is None for fmt in known.values())
        if missed > _FEW * len(known) and not self.warned:
            self.warned = True
            warnings.warn(
                f"the plan of the training step names {len(known) - missed} of {len(known)}"
                " ops of a graph: the others follow the policy. It was made for another module"
                " or loss: tune the step again",
                stacklevel=3,
            )
        planner, formats = joint.planner, dict[int, Format]()
        for node in (n for n in joint.graph.float_nodes if n.id in planner.permissions):
            wanted = known.get(node.name) or base.formats.get(node.name, Format.FP32)
            permitted = planner.permissions[node.id].formats
            formats[node.id] = wanted if wanted in permitted else min(permitted, key=_bits)
        return planner.plan(formats, "an earlier plan of this step, or else the policy")


def _key(decision: Decision) -> tuple[str, str, str]:
    """The module of an op, its name and its kind; wrappers call what they hold ``module``."""
    path, _, name = decision.node.rpartition("/")
    parts = path.split(".")
    while parts and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts), name, decision.op


def _bits(fmt: Format) -> int:
    return -fmt.bits


def _under_autocast(
    module: LossOf, device: str, dtype: torch.dtype
) -> Callable[..., torch.Tensor]:
    def call(*batch: Any) -> torch.Tensor:
        with torch.autocast(device, dtype):
            return module(*batch)

    return call

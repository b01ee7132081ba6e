"""What plans are chosen by: the rules' permissions, profiles of kernels, measured costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

from finecast import rules
from finecast.data.decoding import state_of
from finecast.devices.emulation import check_formats
from finecast.engines.base import Engine
from finecast.engines.faults import faults
from finecast.engines.integers import FUSIONS, codes_results, engines_for, fuses
from finecast.engines.probe import speed_of
from finecast.errors import UsageError
from finecast.frontends.prepared import PreparedModel
from finecast.graph import Node
from finecast.naming import close_names
from finecast.native.gains import no_adjustments
from finecast.native.hint import check_by_hint
from finecast.numbers.formats import BLOCKS, DYNAMIC, Format
from finecast.planning.carried import Carried
from finecast.planning.planner import Planner
from finecast.rules import Context
from finecast.rules.draws import check_depends
from finecast.rules.facts import ValueFacts
from finecast.rules.override import Overrides, active, check_overrides
from finecast.rules.policy import Policy, Scope

AUTOCASTS: Final = "torch"
"""The engine beside whose own mixed precision the scope ``like-autocast`` is held."""

_LIKE: Final[Mapping[Scope, tuple[str, str]]] = {
    Scope.LIKE_AUTOCAST: ("torch.autocast", "PyTorch"),
    Scope.LIKE_GRAPPLER: ("Grappler", "TensorFlow"),
}
"""The tool whose mixed precision a scope follows, and the library whose models it is for."""
_MODULES: Final = "PyTorch"
"""The library of the models that plans are made for in formats that no engine fuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judging:
    """How ops are judged.

    Attributes:
        user_rules: The user's rule functions by name.
        measured: Whether errors will be measured.
        overrides: Overrides, some of which may be for other graphs; None for those that are
            active around the caller, which have to be for ops of this graph.
    """

    facts: Mapping[int, ValueFacts] = field(default_factory=dict[int, ValueFacts])
    user_rules: Sequence[tuple[str, rules.UserRule]] = ()
    measured: bool = False
    judges: Sequence[rules.Rule] = rules.RULES
    overrides: Overrides | None = None


USUAL: Final = Judging()


def make_planner(
    prepared: PreparedModel, policy: Policy, engine: Engine, how: Judging = USUAL
) -> Planner:
    """Let the rules judge every op.

    Raises:
        ModelError: If no output depends on an input.
        RuleConflictError: If they leave an op no format.
        UsageError: If the model cannot state a format, or an override names no op of it.
    """
    graph = prepared.graph
    check_depends(graph)
    if how.overrides is None:
        check_overrides(graph)
    check_stated(policy, engine, prepared)

    signed = engine.emulates is not None and engine.emulates.signed_codes

    def kernels(node: Node, fmt: Format) -> bool | None:
        stated = prepared.states_op(node, fmt, signed=signed)
        return engine.has_kernel(node, fmt) if stated else False

    known = faults(engine.name, engine.device, graph, policy.formats)
    context = Context(
        graph=graph,
        policy=policy,
        facts=how.facts,
        kernels=kernels,
        engine=engine.title,
        faults=known,
        user_rules=(*how.user_rules, *active(how.overrides)),
        measured=how.measured,
        casts_around=frozenset(f for f in policy.formats if prepared.can_cast(f)),
        coded_results=frozenset(f for f in policy.formats if codes_results(engine.name, f)),
        signed_codes=signed,
    )
    return Planner(
        graph=graph,
        policy=policy,
        permissions=rules.permit(context, how.judges),
        engine=engine.name,
        opset=prepared.minimal_opset,
        from_type=prepared.from_type,
        frozen=prepared.frozen,
        carried=Carried.of(graph, state_of(graph, policy)),
    )


def check_stated(policy: Policy, engine: Engine, prepared: PreparedModel) -> None:
    """Raise UsageError for a format that the engine lacks or the model cannot state.

    The same for adjustments of operands if the model has no such operands.
    """
    for kind in policy.adjust or ():
        if kind not in prepared.adjusts:
            raise no_adjustments(kind, f"one of {prepared.library}")
    if policy.by_hint:
        check_by_hint(policy, engine, prepared)
    device = engine.emulates
    tool, library = _LIKE.get(policy.scope, ("", prepared.library))
    autocasts = policy.scope is Scope.LIKE_AUTOCAST
    if library != prepared.library or (autocasts and engine.name != AUTOCASTS):
        model = f"one of {prepared.library}" + ("" if device is None else " on a device")
        raise UsageError(
            f"scope {policy.scope.value} follows {tool}, for models of {library}, and this is"
            f" {model}",
            where="--auto-cast",
            fix="use auto or all",
        )
    if device is not None:
        check_formats(device, policy)
    for fmt in policy.formats:
        trained = prepared.library == _MODULES and fmt in prepared.states
        emulated = fmt is Format.TF32 or fmt.blocks is not None
        if device is None and emulated and not trained:
            raise UsageError(
                f"no engine here computes in {fmt.label}",
                fix="name the device with --target (target=...), or use bf16 or fp16",
            )
        of_others = _stated_by_modules(fmt) and prepared.library != _MODULES
        if of_others or fmt not in prepared.states:
            _refuse(fmt, engine, prepared)
        if fmt.has_scales and device is None and not engine.capability(fmt).runs:
            needs = " on a CPU with integer products (VNNI)" if fmt.runs_on_codes else ""
            there = f"--engine {' or '.join(FUSIONS.get(fmt) or ('torch',))}{needs}"
            raise UsageError(
                speed_of(engine, fmt).text,
                where=f"--auto-cast-type {fmt.label}",
                fix=f"use {_in_place_of(fmt, engine, prepared)}{there}",
            )


def _stated_by_modules(fmt: Format) -> bool:
    """Whether only graphs of modules state products in ``fmt``."""
    return fmt in FUSIONS and not FUSIONS[fmt]


def _in_place_of(fmt: Format, engine: Engine, prepared: PreparedModel) -> str:
    """Formats that ``engine`` runs in place of one of codes, as advice: ``bf16, or ``."""
    stated = (f for f in Format if f in prepared.states and f.blocks is None)
    codes = (
        f for f in stated if f.has_scales and f.bits == fmt.bits and not _stated_by_modules(f)
    )
    alike = close_names(fmt.label, [f.label for f in codes if f is not fmt])
    floats = [f.label for f in (Format.BF16, Format.FP16) if f in prepared.states]
    capabilities = {
        label: engine.capability(Format.parse(label)) for label in (*alike, *floats)
    }
    running = [label for label, one in capabilities.items() if one.runs and not one.in_fp32]
    return f"{' or '.join(running)}, or " if running else ""


def _refuse(fmt: Format, engine: Engine, prepared: PreparedModel) -> NoReturn:
    """Raise the error for a format that a model of this library cannot state."""
    if _stated_by_modules(fmt):
        raise UsageError(
            f"plans in {fmt.label} are made for {engines_for(fmt)} alone",
            where=f"--auto-cast-type {fmt.label}",
            fix=f"use {_in_place_of(fmt, engine, prepared)}PyTorch's module",
        )
    if fmt.blocks is not None:
        held = [f.label for f in (*BLOCKS, Format.BF16) if f in prepared.states]
        there = f"{'one of ' if len(held) > 1 else ''}{', '.join(held)}"
        raise UsageError(
            f"{prepared.library} models cannot hold constants in {fmt.label}",
            where=f"--auto-cast-type {fmt.label}",
            fix=f"see what it does with finecast emulate, or use {there}",
        )
    if fmt.has_scales:
        ir = ", or of TensorFlow OpenVINO's IR (-o NAME.xml)" if fuses("openvino", fmt) else ""
        rounds = [f.label for f in DYNAMIC if fmt in DYNAMIC and f in prepared.states]
        alike = "".join(f"{label}, " for label in rounds)
        onnx = f"make it ONNX for {engines_for(fmt)}{ir}, or " if FUSIONS.get(fmt) else ""
        raise UsageError(
            f"{fmt.label} is planned for models of ONNX and OpenVINO, and this is one of"
            f" {prepared.library}",
            where=f"--auto-cast-type {fmt.label}",
            fix=f"{onnx}use {alike}bf16 or fp16",
        )
    raise UsageError(
        f"ops of {prepared.library} do not compute in {fmt.label}: a model cannot express it",
        fix="use bf16 or fp16",
    )

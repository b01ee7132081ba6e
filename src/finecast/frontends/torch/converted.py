"""``ConvertedModule``: a module whose types are those of a plan; it is copied and saved."""

from __future__ import annotations

import copy
import importlib
import json
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Self

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode
from torch.fx.graph import PythonCode
from torch.fx.node import map_aggregate
from torch.utils._pytree import TreeSpec, treespec_leaf

from finecast.errors import ModelError, UsageError
from finecast.frontends.torch.capture import quiet
from finecast.frontends.torch.codes import OPS_MODULE
from finecast.frontends.torch.input_check import InputCheck
from finecast.frontends.torch.reader import attribute
from finecast.planning.plan import Plan
from finecast.planning.provenance import Provenance

_KEPT: Final = (
    "modules around it did change, and give it another type than it takes: change types"
    " before converting"
)


NOTES: Final = "finecast_notes"
"""The buffer of a converted module, and of programs exported of it, with its provenance."""


def provenance_in(program: ExportedProgram) -> Provenance | None:
    """The conversion of the module that a program was exported of; None if there was none.

    Without an effect on programs of other tools, whatever they have under that name.
    """
    notes: object = program.constants.get(NOTES)
    if not isinstance(notes, torch.Tensor) or notes.dtype is not torch.uint8:
        return None
    with suppress(ValueError, AttributeError):
        stated: Any = json.loads(bytes(notes.flatten().tolist()))
        return Provenance.read({str(key): str(value) for key, value in stated.items()})
    return None


class ConvertedModule(GraphModule):
    """A graph of ATen ops whose types are those of a plan.

    Laws: copies and what ``torch.load`` reads compute the same, check their inputs, and have
    the plan. The types of parameters and buffers stay those of the plan, for the casts of the
    graph are made for them. What ``load_state_dict`` reads is the state of a module that was
    converted alike.

    Attributes:
        finecast_plan: The plan, with the reasons of every op; None until it is attached.
        finecast_original: The name of the module or file that the plan was made for.
    """

    finecast_plan: Plan | None = None
    finecast_original: str = ""
    finecast_notes: torch.Tensor
    _input_check: InputCheck

    @classmethod
    def of(cls, module: GraphModule, check: InputCheck) -> Self:
        """``module`` with its inputs checked at each call; tensors and graph are shared."""
        made = cls(module, module.graph)
        made.meta = module.meta
        made._input_check = check
        made.register_forward_pre_hook(check, with_kwargs=True)
        _start_compiling_at_forward()
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph.

        Raises:
            UsageError: If it does not hold for these inputs, or fails for another size.
        """
        try:
            return super().__call__(*args, **kwargs)
        except RuntimeError as error:
            failure = self._input_check.failed(error, args, kwargs)
            if failure is error:
                raise
            raise failure from error

    def recompile(self) -> PythonCode:
        """Generate ``forward`` anew; ``__call__`` stays the one above.

        Torch's own wrapper around it prints generated code where a call fails, and hides
        errors of a compiled module behind one of its own.
        """
        code = super().recompile()
        del type(self).__call__
        return code

    def attach(self, plan: Plan | None, original: str) -> None:
        """Attach the plan, and the name of what it was made for.

        Programs that are exported of the module state its conversion, too: by a buffer that no
        op reads and that is not in its state.
        """
        self.finecast_plan, self.finecast_original = plan, original
        made_by = self.provenance
        if made_by is not None:
            text = json.dumps(made_by.notes).encode()
            notes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            self.register_buffer(NOTES, notes, persistent=False)

    @property
    def provenance(self) -> Provenance | None:
        """The conversion that made it; None if its plan lowers nothing."""
        plan = self.finecast_plan
        if plan is None or not plan.lowers:
            return None
        return Provenance.of(plan, self.finecast_original)

    def __copy__(self) -> ConvertedModule:
        """Another module of the same tensors and graph."""
        return self._completed(super().__copy__())

    def __deepcopy__(self, memo: dict[int, Any]) -> ConvertedModule:
        """A module of its own; the plan never changes, and is shared."""
        memo[id(self.finecast_plan)] = self.finecast_plan
        with quiet():
            made = self._completed(super().__deepcopy__(memo))
        memo[id(self)] = made
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """What a pickle holds: the graph and its tensors, the check and the plan."""
        stored = StoredModule.of(self)
        known = self.finecast_plan, self.finecast_original
        return _restored, (stored, self.training, self._input_check, *known)

    def _completed(self, made: GraphModule) -> ConvertedModule:
        """``made`` with what torch leaves out of copies."""
        converted = ConvertedModule.of(made, replace(self._input_check, told=False))
        converted.attach(self.finecast_plan, self.finecast_original)
        return converted

    def train(self, mode: bool = True) -> Self:
        """Set the mode, which changes nothing that the graph does: a warning says so."""
        if mode and not self.training:
            warnings.warn(
                "a converted module computes as in evaluation mode, in train() too: dropout"
                " and batch norms stay as they were captured; to train in reduced precision,"
                " use"
                " finecast.torch.compile",
                stacklevel=2,
            )
        return super().train(mode)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the module.

        Raises:
            UsageError: Before anything is changed, if it would change types.
        """
        given = (*args, *kwargs.values())
        named = [x.dtype if isinstance(x, torch.Tensor) else x for x in given]
        for dtype in (x for x in named if isinstance(x, torch.dtype)):
            check_types_stay(self, partial(_floats_to, dtype))
        return super().to(*args, **kwargs)

    def half(self) -> Self:
        """As ``to(torch.float16)``: an error, unless no type changes."""
        return self.to(torch.float16)

    def bfloat16(self) -> Self:
        """As ``to(torch.bfloat16)``: an error, unless no type changes."""
        return self.to(torch.bfloat16)

    def float(self) -> Self:
        """As ``to(torch.float32)``: an error, unless no type changes."""
        return self.to(torch.float32)

    def double(self) -> Self:
        """As ``to(torch.float64)``: an error, unless no type changes."""
        return self.to(torch.float64)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move the tensors, as ``to(device)`` does, and what the graph makes beside them.

        Types stay, with a warning where ``fn`` would change them: then a module around this
        one is changed, which has changed other parts already and cannot be held back.
        """
        before = self._devices()
        super()._apply(_keeping_types(self, fn), recurse)
        after = self._devices()
        if len(before) == len(after) == 1 and before != after:
            _make_on(self, before.pop(), after.pop())
        return self

    def __prepare_scriptable__(self) -> None:
        """Refuse ``torch.jit.script``, which reads Python's code: the graph has none.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "torch.jit.script reads Python's code, and a converted module is a graph",
            where="the converted module",
            fix="torch.jit.trace(low, example_inputs), or torch.export.export",
        )

    def _load_from_state_dict(
        self,
        state_dict: MutableMapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load the state; an error where it is that of a module that was not converted alike.

        Nothing is loaded then, whatever ``strict`` says: parts that keep fp32 have the names
        of before, and would have new weights beside old ones.
        """
        own = {f"{prefix}{name}": tensor for name, tensor in self.state_dict().items()}
        given = {name for name in state_dict if name.startswith(prefix)}
        if own.keys() - given and given - own.keys():
            unknown, missing = min(given - own.keys()), min(own.keys() - given)
            error_msgs.append(
                f"this is the state of another module ({unknown!r} and no {missing!r}): a"
                " converted module stores its weights as the plan has them. Load the state"
                " into the module that it was converted from, and convert that again."
            )
            for name in given:
                del state_dict[name]
            state_dict.update(own)
            return
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )

    def _devices(self) -> set[torch.device]:
        return {t.device for t in (*self.parameters(), *self.buffers())}


def _start_compiling_at_forward() -> None:
    """Let ``torch.compile(module)`` compile the module's ``forward``, and nothing around it.

    Dynamo keeps what it compiled by code object, eight entries at most, and runs the code as
    it is from then on. Each module has a ``forward`` of its own, but one ``__call__`` and one
    check of inputs serve all modules: the ninth module would not be compiled. In a compiled
    function that calls the module they are still traced, as parts of that function.
    """
    # Imported here because it takes over a second, and torch.export has imported it already.
    from torch._dynamo import eval_frame, types

    # Neither module lists these names as its own.
    set_strategy: Callable[..., None] = vars(eval_frame)["set_code_exec_strategy"]
    action, strategy = vars(types)["FrameAction"], vars(types)["FrameExecStrategy"]
    forward_only = strategy(action.SKIP, action.DEFAULT)
    set_strategy(ConvertedModule.__call__.__code__, forward_only)
    nothing = strategy(action.SKIP, action.SKIP)
    for check in (InputCheck.__call__, InputCheck.failed):
        set_strategy(check.__code__, nothing)


def _floats_to(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def own_tensors(module: torch.nn.Module) -> None:
    """Give ``module`` copies of its parameters and buffers.

    What is tied stays tied, and views of one memory stay views of one.
    """
    made: dict[int, torch.Tensor] = {}
    memo: dict[int, Any] = {}
    for part in module.modules():
        named = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        for name, tensor in named:
            if id(tensor) not in made:
                made[id(tensor)] = _copy_of(tensor, memo)
            setattr(part, name, made[id(tensor)])


def _copy_of(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    with torch.no_grad():
        # torch has no deep copies of compressed layouts; those of dense ones keep the strides.
        dense = tensor.layout is torch.strided
        copied = copy.deepcopy(tensor.detach(), memo) if dense else tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied


def _keeping_types(
    module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """``fn``, or what it does besides changing types, of which a warning tells."""
    try:
        check_types_stay(module, fn)
    except UsageError as error:
        warnings.warn(f"{error.what}: it keeps them; {_KEPT}", stacklevel=4)
        return lambda t: t.to(fn(t.new_empty(0)).device)
    return fn


def check_types_stay(
    module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Raise UsageError if ``fn``, applied to the tensors of ``module``, changes types."""
    kinds = {(t.device, t.dtype) for t in (*module.parameters(), *module.buffers())}
    for device, dtype in kinds:
        other = fn(torch.empty(0, device=device, dtype=dtype)).dtype
        if other is not dtype:
            raise UsageError(
                f"a converted module's weights in {dtype} cannot become {other}: its types"
                " are those of its plan",
                where="the converted module",
                fix="convert the fp32 module by another policy, or change types before"
                " converting",
            )


def _make_on(module: GraphModule, old: torch.device, new: torch.device) -> None:
    """Let ops that make tensors on ``old`` make them on ``new``, in bodies, too."""
    for one in module.modules():
        if not isinstance(one, GraphModule):
            continue
        for node in one.graph.nodes:
            if node.kwargs.get("device") == old:
                node.kwargs = {**node.kwargs, "device": new}
        one.recompile()


def _restored(
    stored: StoredModule,
    training: bool,
    check: InputCheck,
    plan: Plan | None,
    original: str = "",
) -> ConvertedModule:
    """The module of a pickle."""
    made = ConvertedModule.of(stored.module(), replace(check, told=False))
    made.training = training
    made.attach(plan, original)
    return made


# ----------------------------------------------- graphs of ATen ops as plain data, for pickles
#
# Pickles of torch's own keep the generated code and trace it where they are read. Tensors of
# the module are no proxies there: what is computed of them alone is computed while tracing and
# stays a constant, weights that are decoded from int8 and counts that a call adds to among
# them.

_REGISTERED_BY: Final = {"quantized_decomposed": OPS_MODULE}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredOp:
    """An op by its name, as ``aten``, ``add``, ``Tensor``; ``cond`` has no ``overload``."""

    namespace: str
    name: str
    overload: str = ""

    def found(self) -> Any:
        """The op of this name.

        Raises:
            ModelError: If it is not registered in this process.
        """
        if self.namespace in _REGISTERED_BY:
            importlib.import_module(_REGISTERED_BY[self.namespace])
        try:
            op = getattr(getattr(torch.ops, self.namespace), self.name)
            return getattr(op, self.overload) if self.overload else op
        except AttributeError as error:
            raise ModelError(
                f"the module calls {self.namespace}::{self.name}, which is not known here",
                fix=f"import the package that defines the ops of {self.namespace} first",
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The result of the node of this name."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredConstant:
    """A memory format or layout by its name in ``torch``; neither can be pickled."""

    name: str

    def found(self) -> Any:
        """The constant of this name."""
        return getattr(torch, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSpec:
    """How tensors are nested in arguments or results; a leaf has no ``type``.

    Torch's own class for a leaf warns of itself where it is read from a pickle.
    """

    type: Any
    context: Any
    children: tuple[StoredSpec, ...]

    @classmethod
    def of(cls, spec: TreeSpec) -> Self:
        """Describe ``spec``."""
        children = tuple(cls.of(child) for child in spec.children())
        return cls(type=spec.type, context=spec.context, children=children)

    def found(self) -> TreeSpec:
        """The specification described."""
        if self.type is None:
            return treespec_leaf()
        return TreeSpec(self.type, self.context, [c.found() for c in self.children])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNode:
    """A node of the graph; other nodes in its arguments are references."""

    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModule:
    """A module of a graph; ``attributes`` are its tensors, and its bodies as this class."""

    nodes: tuple[StoredNode, ...]
    codegen: Any
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, module: GraphModule) -> Self:
        """Describe ``module``; its tensors are shared."""
        nodes = tuple(
            StoredNode(
                op=node.op,
                name=node.name,
                target=_named(node.target),
                args=map_aggregate(node.args, _named),
                kwargs=map_aggregate(node.kwargs, _named),
            )
            for node in module.graph.nodes
        )
        codegen = module.graph._codegen  # pyright: ignore[reportPrivateUsage] - no public name
        paths = {str(n.target) for n in module.graph.nodes if n.op == "get_attr"}
        attributes = {path: attribute(module, path) for path in sorted(paths)}
        return cls(
            nodes=nodes,
            codegen=_with_specs(codegen, StoredSpec.of, TreeSpec),
            attributes={
                path: cls.of(one) if isinstance(one, GraphModule) else one
                for path, one in attributes.items()
            },
        )

    def module(self) -> GraphModule:
        """The module described.

        Raises:
            ModelError: If an op is not registered in this process.
        """
        graph = Graph()
        made: dict[str, FxNode] = {}

        def found(one: Any) -> Any:
            if isinstance(one, Reference):
                return made[one.name]
            return one.found() if isinstance(one, StoredOp | StoredConstant) else one

        for node in self.nodes:
            args, kwargs = map_aggregate((node.args, node.kwargs), found)  # type: ignore[misc]
            target = found(node.target)
            made[node.name] = graph.create_node(node.op, target, args, kwargs, node.name)
        graph.set_codegen(_with_specs(self.codegen, StoredSpec.found, StoredSpec))
        attributes = {
            path: one.module() if isinstance(one, StoredModule) else one
            for path, one in self.attributes.items()
        }
        return GraphModule(attributes, graph)


def _with_specs(codegen: Any, changed: Callable[[Any], Any], kind: type) -> Any:
    """A copy of ``codegen`` whose specifications of that ``kind`` are ``changed``."""
    info = getattr(codegen, "pytree_info", None)
    if info is None:
        return codegen
    specs = {n: changed(s) for n, s in info._asdict().items() if isinstance(s, kind)}
    result = copy.copy(codegen)
    result.pytree_info = info._replace(**specs)
    return result


def _named(one: Any) -> Any:
    """What stands for a node, an op or a constant; other things are themselves."""
    if isinstance(one, FxNode):
        return Reference(name=one.name)
    if isinstance(one, OpOverload):
        namespace, _, name = one.name().partition("::")
        overload = one._overloadname  # pyright: ignore[reportPrivateUsage]
        return StoredOp(namespace=namespace, name=name.partition(".")[0], overload=overload)
    if isinstance(one, HigherOrderOperator):
        return StoredOp(namespace="higher_order", name=one.name())
    if isinstance(one, torch.memory_format | torch.layout):
        return StoredConstant(name=str(one).removeprefix("torch."))
    return one

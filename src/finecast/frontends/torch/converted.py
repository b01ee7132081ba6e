"""``ConvertedModule``: a module whose types are those of a plan; it is copied and saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch
from torch.fx import GraphModule

from finecast.errors import UsageError
from finecast.frontends.torch.capture import quiet
from finecast.frontends.torch.input_check import InputCheck
from finecast.frontends.torch.pickling import StoredModule
from finecast.planning.plan import Plan


class ConvertedModule(GraphModule):
    """A graph of ATen ops whose types are those of a plan.

    Laws: copies and what ``torch.load`` reads compute the same, check their inputs, and have
    the plan. The types of parameters and buffers stay those of the plan, for the casts of the
    graph are made for them.

    Attributes:
        finecast_plan: The plan, with the reasons of every op; None until it is attached.
    """

    finecast_plan: Plan | None = None
    _input_check: InputCheck

    @classmethod
    def of(cls, module: GraphModule, check: InputCheck) -> Self:
        """``module`` with its inputs checked at each call; tensors and graph are shared."""
        made = cls(module, module.graph)
        made.meta = module.meta
        made._input_check = check
        made.register_forward_pre_hook(check, with_kwargs=True)
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
        return _restored, (stored, self.training, self._input_check, self.finecast_plan)

    def _completed(self, made: GraphModule) -> ConvertedModule:
        """``made`` with what torch leaves out of copies."""
        converted = ConvertedModule.of(made, replace(self._input_check, told=False))
        converted.finecast_plan = self.finecast_plan
        return converted

    def train(self, mode: bool = True) -> Self:
        """Set the mode, which changes nothing that the graph does: a warning says so."""
        if mode and not self.training:
            warnings.warn(
                "a converted module computes as in evaluation mode, in train() too: dropout"
                " and batch norms stay as they were captured; to train with low formats, use"
                " finecast.torch.compile",
                stacklevel=2,
            )
        return super().train(mode)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move the tensors, as ``to(device)`` does, and what the graph makes beside them.

        Raises:
            UsageError: Before anything is changed, if it would change types.
        """
        check_types_stay(self, fn)
        before = self._devices()
        super()._apply(fn, recurse)
        after = self._devices()
        if len(before) == len(after) == 1 and before != after:
            _make_on(self, before.pop(), after.pop())
        return self

    def _devices(self) -> set[torch.device]:
        return {t.device for t in (*self.parameters(), *self.buffers())}


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
    stored: StoredModule, training: bool, check: InputCheck, plan: Plan | None
) -> ConvertedModule:
    """The module of a pickle."""
    made = ConvertedModule.of(stored.module(), replace(check, told=False))
    made.training = training
    made.finecast_plan = plan
    return made

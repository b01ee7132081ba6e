"""``compile`` and the backend ``finecast``: mixed precision for training graphs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule

from finecast.frontends.torch.joint import WHOLE, lower
from finecast.graph import Graph
from finecast.plan import Plan
from finecast.policy import Policy, Scope
from finecast.rules import UserRule
from finecast.rules.override import active
from finecast.torch.planning import RuleSet, look_before_leaping, make_torch_planner
from finecast.torch.weights import WeightCache, hoist_casts


def compile(  # noqa: A001 - the name that torch gives the same thing
    function: Callable[..., Any],
    policy: str | Policy = "auto:bf16",
    *,
    cache_weights: bool = False,
    user_rules: Mapping[str, UserRule] | None = None,
    rule_set: str = "finecast",
    **options: Any,
) -> Callable[..., Any]:
    """``torch.compile`` with mixed precision planned over forward and backward together.

    Laws: inputs, outputs and gradients of parameters keep their types; parameters stay
    fp32, low copies of them are made as needed. The plans of what has been compiled so far
    are ``result.finecast_plans``.

    Args:
        function: A module, or a function such as a whole training step.
        policy: ``SCOPE:FORMAT`` or a Policy.
        cache_weights: Keep the low copies of parameters until these change, so that several
            microbatches between two optimizer steps cast them once. A change is noticed by
            autograd's version counter: writing through ``parameter.data`` escapes it.
        user_rules: Rules by name.
        rule_set: ``finecast``, or ``raf`` for RAF's lists.
        options: What else ``torch.compile`` takes (``dynamic``, ``fullgraph``, ...).
    """
    backend = Backend(
        policy, cache_weights=cache_weights, user_rules=user_rules, rule_set=rule_set
    )
    compiled = torch.compile(function, backend=backend, **options)
    compiled.finecast_plans = backend.plans  # type: ignore[attr-defined]
    return compiled


class Backend:
    """A ``torch.compile`` backend: Inductor, with finecast's pass on the joint graph."""

    def __init__(
        self,
        policy: str | Policy = "auto:bf16",
        *,
        cache_weights: bool = False,
        user_rules: Mapping[str, UserRule] | None = None,
        rule_set: str = "finecast",
    ) -> None:
        self.policy = Policy.parse(policy) if isinstance(policy, str) else policy
        self.cache = WeightCache() if cache_weights else None
        self.user_rules = tuple((user_rules or {}).items())
        self.rule_set = RuleSet.parse(rule_set)
        self.plans: list[Plan] = []

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Compile one graph that Dynamo captured."""
        patches: dict[str, Any] = {"joint_custom_pre_pass": _Pass(self)}
        inner: Callable[..., Any] = _compile_inner
        if self.cache is not None:
            patches["fx_graph_cache"] = False
            inner = self._compile_with_cache
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(
                module,
                example_inputs,
                inner_compile=inner,
                config_patches=patches,
                decompositions=WHOLE,
            )

    def plan(self, graph: Graph, shapes: Mapping[int, tuple[int, ...]], device: str) -> Plan:
        """The plan of one graph; costs alone decide among what the rules permit."""
        obstacle = look_before_leaping(self.policy, device)
        # RAF's set asks for overrides itself: its rules are of another kind.
        overrides = () if self.rule_set is RuleSet.RAF else active()
        planner = make_torch_planner(
            graph,
            self.policy,
            device,
            user_rules=(*self.user_rules, *overrides),
            measured=False,
            rule_set=self.rule_set,
            shapes=shapes,
        )
        if obstacle:
            plan = planner.highest(obstacle)
        elif self.policy.scope is not Scope.AUTO or self.rule_set is RuleSet.RAF:
            plan = planner.lowest()
        else:
            units, _ = planner.units()
            fastest = planner.steps(units, (), np.zeros(0))[-1]
            plan = planner.proposal(units, fastest).plan
        self.plans.append(plan)
        return plan

    def _compile_with_cache(
        self, module: GraphModule, example_inputs: Sequence[Any], **options: Any
    ) -> Any:
        assert self.cache is not None
        casts = hoist_casts(module)
        if not casts:
            return _compile_inner(module, example_inputs, **options)
        fakes = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
        compiled = _compile_inner(
            module, [*example_inputs, *fakes[len(example_inputs) :]], **options
        )
        return self.cache.feed(compiled, casts)


class _Pass(CustomGraphPass):
    """Finecast's pass as Inductor calls it; equal uuids give equal results."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def __call__(self, graph: torch.fx.Graph) -> None:
        module = graph.owning_module
        assert isinstance(module, GraphModule)
        device = _device(module)
        lower(
            module,
            lambda g, shapes: self.backend.plan(g, shapes, device),
            select_decomp_table(),
        )

    def uuid(self) -> Any:
        """None, which keeps the result out of caches, where rules are functions."""
        if self.backend.user_rules or active() or self.backend.rule_set is RuleSet.RAF:
            return None
        return hashlib.sha256(repr(self.backend.policy).encode()).hexdigest()


def _compile_inner(
    module: GraphModule, example_inputs: Sequence[Any], **options: Any
) -> Any:
    # Inside, Inductor asks for its own decompositions again; only capturing keeps ops whole.
    return compile_fx_inner(
        module, example_inputs, **{**options, "get_decomp_fn": select_decomp_table}
    )


def _device(module: GraphModule) -> str:
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return str(value.device.type)
    return "cpu"


finecast = Backend()
"""What ``torch.compile(model, backend="finecast")`` finds: the policy ``auto:bf16``."""

"""Compilation by Inductor, with finecast's pass on the joint graph and cached weight casts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule

from finecast.frontends.torch.expand import BIASES, expand
from finecast.frontends.torch.reader import device_kind
from finecast.rules.override import names_biases
from finecast.training.gradients import add_gradients, feed, mark_gradients
from finecast.training.joint import WHOLE, cast_parameters_again, lower
from finecast.training.weights import WeightCache, hoist_casts

if TYPE_CHECKING:
    from finecast.training.backend import Backend


def compile_graph(backend: Backend, module: GraphModule, inputs: Sequence[Any]) -> Any:
    """Compile one graph that Dynamo captured, with the backend's pass in between."""
    # With a cache, low copies are kept anyway, so the forward pass need not save them.
    cast_again = backend.least_memory or backend.cache is not None
    patches: dict[str, Any] = {
        "joint_custom_pre_pass": _Pass(backend),
        "custom_partitioner_fn": _Partition(cast_again=cast_again),
        # Inductor's estimate assumes that the backward pass frees parameters. By it, all
        # parameters would be cast first of all, and all low gradients be widened at the end,
        # where their fp32 copies are alive at once.
        "reorder_for_peak_memory": False,
    }
    inner: Callable[..., Any] = compile_inner
    if backend.cache is not None:
        patches["fx_graph_cache"] = False
        inner = partial(_with_cache, backend.cache)

    # With the least memory values are also recomputed where a product of the backward pass
    # needs them in memory: an activation's output in the kernel of its gradient.
    with functorch_config.patch(
        enable_autograd_cache=False,
        ban_recompute_materialized_backward=not backend.least_memory,
    ):
        return compile_fx(
            module,
            inputs,
            inner_compile=inner,
            config_patches=patches,
            decompositions=WHOLE,
        )


class _Pass(CustomGraphPass):
    """Finecast's pass in Inductor's interface; passes of equal uuids give equal results."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def __call__(self, graph: torch.fx.Graph) -> None:
        module = graph.owning_module
        assert isinstance(module, GraphModule)
        device = device_kind(module)
        if names_biases(self.backend.overrides_held()):
            expand(module, BIASES)
        lower(
            module,
            lambda g, shapes: self.backend.plan(g, shapes, device),
            select_decomp_table(),
        )

    def uuid(self) -> Any:
        """None keeps the result out of Inductor's caches."""
        key = self.backend.key
        return None if key is None else hashlib.sha256(key.encode()).hexdigest()


class _Partition(CustomPartitionerFn):
    """Inductor's partitioner by minimum cut, with parameters marked to be cast again."""

    def __init__(self, *, cast_again: bool) -> None:
        self.cast_again = cast_again

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        parameters = options.get("static_lifetime_input_indices") or ()
        if self.cast_again:
            cast_parameters_again(gm.graph, parameters)
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **options)
        mark_gradients(gm.graph, backward, parameters)
        return forward, backward

    def uuid(self) -> Any:
        again = "again" if self.cast_again else "once"
        return f"finecast: parameters are cast {again}"


def compile_inner(module: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Inductor's inner compiler, with Inductor's own table of decompositions."""
    given: dict[str, Any] = {**options, "get_decomp_fn": select_decomp_table}
    return compile_fx_inner(module, inputs, **given)


def _with_cache(
    cache: WeightCache, module: GraphModule, inputs: Sequence[Any], **options: Any
) -> Any:
    static = options.get("static_input_idxs") or () if options.get("is_inference") else ()
    casts = hoist_casts(module, static)
    added = add_gradients(module) if options.get("is_backward") else ()
    if not casts and not added:
        return compile_inner(module, inputs, **options)
    fakes = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
    compiled = compile_inner(module, [*inputs, *fakes[len(inputs) :]], **options)
    return cache.feed(feed(compiled, added), casts)

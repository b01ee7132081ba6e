"""Products on integers in compiled modules: which ops can run so, and which did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch._inductor import config
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule

from finecast.frontends.torch.capture import quiet
from finecast.frontends.torch.codes import scales_of_products

# Wraps a module as it will be deployed: ``torch.compile``, or the module as it is.
Prepare = Callable[[torch.nn.Module], Callable[..., Any]]

_KERNELS: Final = ("onednn.qlinear_pointwise", "onednn.qconv_pointwise", "onednn.qconv2d_")
_SCALES: Final = 4
"""Index of the argument of those kernels that has the scales of the weights."""


@contextmanager
def frozen() -> Generator[None]:
    """Inside, modules are compiled with frozen weights; only then products run on integers.

    Freezing as an option of ``torch.compile`` would come too late, after tracing.
    """
    with torch.no_grad(), config.patch({"freezing": True}):
        yield


def compiled_frozen(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    prepare: Prepare = torch.compile,
) -> tuple[Callable[..., Any], frozenset[str]]:
    """Compile ``prepare(module)`` with frozen weights, by calling it.

    Gives the compiled module and the FX names of products on codes that it does not run on
    integers.

    Raises:
        RuntimeError: If it cannot be compiled.
    """
    ran: Counter[int] = Counter()

    def look(graph: FxGraph) -> None:
        for node in graph.nodes:
            if str(node.target).startswith(_KERNELS):
                held = getattr(graph.owning_module, str(node.args[_SCALES].target))
                ran[held.data_ptr()] += 1

    # ``look`` gets the graph after freezing and fusion; for a cached graph it is not called.
    seen = {"fx_graph_cache": False, "post_grad_custom_pre_pass": look}
    with quiet(), frozen(), config.patch(seen):
        run = prepare(module)
        run(*args, **kwargs)
    scales = scales_of_products(module) if isinstance(module, GraphModule) else {}
    by = {path: module.get_buffer(path).data_ptr() for path in scales.values()}
    # Products that share a weight cannot be told apart: either all ran on integers or none.
    wanted = Counter(by[path] for path in scales.values())
    return run, frozenset(n for n, p in scales.items() if ran[by[p]] < wanted[by[p]])


def relative_error(got: Sequence[Any], want: Sequence[Any]) -> float:
    """Relative error of the worst output of ``got``."""
    outputs = zip(got, want, strict=True)
    pairs = [(a.double(), b.double()) for a, b in outputs if isinstance(b, torch.Tensor)]
    norms = ((float((a - b).norm()), float(b.norm())) for a, b in pairs)
    return max((off / size if size else off for off, size in norms), default=0.0)

"""Copies of a model that show its values, or that round them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from finecast.frontends import rounding
from finecast.frontends.tensorflow.library import DTYPES, dtype_label, tf
from finecast.frontends.tensorflow.model import FrozenModel, SignaturePort
from finecast.frontends.tensorflow.reader import GraphBinding
from finecast.frontends.tensorflow.writer import Rewriter, plain, tensor_of
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounder
from finecast.planning.edits import Use
from finecast.planning.switches import SWITCH


def observable(graph: Graph, binding: GraphBinding) -> dict[str, int]:
    """Tensors and ids of the float values that can be shown: those that an op computes."""
    return {
        binding.values[value.id]: value.id
        for value in graph.values
        if value.format is not None and value.constant is None and value.producer is not None
    }


def with_outputs(model: FrozenModel, tensors: Sequence[str]) -> FrozenModel:
    """``model`` with some of its tensors as its outputs, each called by its own name."""
    graph, _ = replace(model, outputs=()).imported()
    shown = tuple(
        SignaturePort(
            name=name,
            tensor=name,
            dtype=dtype_label(graph.get_tensor_by_name(name).dtype),
            shape=None,
        )
        for name in tensors
    )
    return replace(model, outputs=shown)


@final
class TensorFlowRoundable:
    """A ``Roundable`` copy of a graph of TensorFlow's; its tensors are ``NODE:INDEX``.

    What is rounded goes to a type of TensorFlow's and back, or is rounded by arithmetic.
    """

    def __init__(self, graph: Graph, binding: GraphBinding) -> None:
        self._rewriter = Rewriter.of(graph, binding)
        self._elements: dict[int, str] = {}
        self._made: dict[Any, Any] = {}
        self._grafts = 0

    @property
    def library(self) -> str:
        """What messages call the kind of the model."""
        return "TensorFlow"

    @property
    def graph(self) -> Graph:
        """The graph of the model as it was copied."""
        return self._rewriter.graph

    def tensor(self, value: int) -> str:
        """The tensor's name."""
        return self._rewriter.binding.values[value]

    def read_at(self, node: int, index: int) -> str:
        """The tensor that an input names."""
        name = self._rewriter.binding.nodes[node]
        return tensor_of(self._rewriter.nodes[name].input[index])

    def give(self, value: int, uses: Iterable[Use], tensor: str) -> None:
        """Inputs, and outputs of the signature, name ``tensor``."""
        self._rewriter.rewire(value, uses, tensor)

    def constant(self, array: NDArray[np.float32]) -> str:
        """A constant of its own."""
        return self._rewriter.add_constant("finecast_constant", array, tf.float32)

    def rounded(self, tensor: str, how: Rounder) -> str:
        """To a type and back; by arithmetic what no type or Cast does."""
        plain_cast = not how.saturate and not how.flush_subnormals
        if plain_cast and how.format in DTYPES:
            return self._graft(how.format, _there_and_back(how.format), tensor)
        return self._graft(how, lambda x: rounding.converted(_Ops, x, how), tensor)

    def without_infinities(self, tensor: str, top: float | None) -> str:
        """Inf as ``top`` of its sign; None for NaN."""
        return self._graft(
            ("infinities", top), lambda x: rounding.without_infinities(_Ops, x, top), tensor
        )

    def switched(self, k: int, on: str, off: str) -> str:
        """A SelectV2 by an element of the extra input."""
        if k not in self._elements:
            self._elements[k] = self._graft(
                ("element", k), lambda given: given[k], f"{SWITCH}:0", kinds=[tf.bool]
            )
        kinds = [tf.bool, tf.float32, tf.float32]
        return self._graft("switched", tf.where, self._elements[k], on, off, kinds=kinds)

    def finish(self, switches: int = 0) -> FrozenModel:
        """The copy, with its extra input behind the others."""
        if not switches:
            return self._rewriter.finish()
        node = tf.compat.v1.NodeDef(name=SWITCH, op="Placeholder")
        node.attr["dtype"].type = tf.bool.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(tf.TensorShape([switches]).as_proto())
        self._rewriter.nodes[SWITCH] = node
        port = SignaturePort(
            name=SWITCH, tensor=f"{SWITCH}:0", dtype="bool", shape=(switches,)
        )
        return self._rewriter.finish(port)

    def _graft(
        self, key: Any, make: Callable[..., Any], *tensors: str, kinds: Sequence[Any] = ()
    ) -> str:
        """The tensor that ops of ``make``, which ``key`` tells apart, give of ``tensors``."""
        if key not in self._made:
            self._made[key] = _traced(make, kinds or [tf.float32] * len(tensors))
        nodes, end = self._made[key]
        self._grafts += 1
        prefix = f"{plain(tensors[0])}/finecast_{self._grafts}"
        return self._rewriter.graft(prefix, nodes, end, tensors)


def _there_and_back(fmt: Format) -> Callable[[Any], Any]:
    return lambda x: tf.cast(tf.cast(x, DTYPES[fmt]), tf.float32)


def _traced(make: Callable[..., Any], kinds: Sequence[Any]) -> tuple[list[Any], str]:
    """The nodes that ``make`` adds to placeholders ``0``, ``1``...; the tensor it gives."""
    graph = tf.Graph()
    with graph.as_default():
        given = [tf.compat.v1.placeholder(k, None, name=f"p{i}") for i, k in enumerate(kinds)]
        end: str = make(*given).name
    return [n for n in graph.as_graph_def().node if n.op != "Placeholder"], end


class _Ops:
    """TensorFlow's functions by the names that ``rounding`` calls them by."""

    abs: Final = staticmethod(tf.abs)
    add: Final = staticmethod(tf.add)
    constant: Final = staticmethod(tf.constant)
    divide: Final = staticmethod(tf.divide)
    greater: Final = staticmethod(tf.greater)
    is_finite: Final = staticmethod(tf.math.is_finite)
    is_inf: Final = staticmethod(tf.math.is_inf)
    is_nan: Final = staticmethod(tf.math.is_nan)
    less: Final = staticmethod(tf.less)
    less_equal: Final = staticmethod(tf.less_equal)
    multiply: Final = staticmethod(tf.multiply)
    select: Final = staticmethod(tf.where)
    sign: Final = staticmethod(tf.sign)
    subtract: Final = staticmethod(tf.subtract)

    @staticmethod
    def clamp(x: Any, low: float, high: float) -> Any:
        return tf.minimum(tf.maximum(x, low), high)

    @staticmethod
    def round(x: Any, mode: str) -> Any:
        """To the nearest whole number, of two the even one: there is no other mode."""
        del mode
        return tf.round(x)

    @staticmethod
    def reduce_sum(x: Any, axes: Any, *, keep_dims: bool) -> Any:
        return tf.reduce_sum(x, axes, keepdims=keep_dims)

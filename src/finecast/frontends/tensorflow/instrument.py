"""Copies of a model whose outputs are its inner values, or whose values are rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from finecast.frontends import rounding
from finecast.frontends.tensorflow.library import DTYPES, dtype_label, tf
from finecast.frontends.tensorflow.model import (
    FrozenModel,
    SignaturePort,
    base_name,
    imported_graph,
)
from finecast.frontends.tensorflow.reader import GraphBinding
from finecast.frontends.tensorflow.writer import At, Rewriter
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounder
from finecast.planning.edits import Use
from finecast.planning.points import SWITCH


def observable(graph: Graph, binding: GraphBinding) -> dict[str, int]:
    """Tensors and ids of the float values that can be shown: those made outside of bodies."""
    return {
        binding.values[value.id]: value.id
        for value in graph.values
        if value.format is not None
        and value.constant is None
        and value.producer is not None
        and not binding.value_regions[value.id]
    }


def with_outputs(model: FrozenModel, tensors: Sequence[str]) -> FrozenModel:
    """``model`` with the given tensors as outputs, each under its own name."""
    graph = imported_graph(model.graph)
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
    """A ``Roundable`` copy of a TensorFlow graph; its tensors are ``At``s, or ``_Constant``s.

    Roundings are casts to a type and back, or arithmetic. A constant becomes a node in the
    region that reads it.
    """

    def __init__(self, graph: Graph, binding: GraphBinding) -> None:
        self._rewriter = Rewriter(graph, binding)
        self._switches: dict[int, str] = {}
        self._elements: dict[tuple[int, int], At] = {}
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

    def tensor(self, value: int) -> At:
        """The tensor that a value is, and its region."""
        return self._rewriter.at(value)

    def read_at(self, node: int, index: int) -> At:
        """The tensor that input ``index`` of ``node`` names."""
        return self._rewriter.read_at(node, index)

    def give(self, value: int, uses: Iterable[Use], tensor: At | _Constant) -> None:
        """Let ``uses`` of a value, inputs of nodes or outputs, read ``tensor``."""
        region = self._rewriter.at(value).region
        self._rewriter.rewire(value, uses, self._placed(tensor, region))

    def constant(self, array: NDArray[np.float32]) -> _Constant:
        """A new constant; its node is made where it is read."""
        return _Constant(array=array)

    def rounded(self, tensor: At, how: Rounder) -> At:
        """``tensor`` cast to a type and back; by arithmetic where a Cast would not do."""
        plain_cast = not how.saturate and not how.flush_subnormals
        if plain_cast and how.format in DTYPES:
            return self._graft(how.format, _there_and_back(how.format), tensor)
        return self._graft(how, lambda x: rounding.converted(_Ops, x, how), tensor)

    def without_infinities(self, tensor: At, top: float | None) -> At:
        """``tensor`` with Inf as ``top`` of its sign; as NaN if ``top`` is None."""
        return self._graft(
            ("infinities", top), lambda x: rounding.without_infinities(_Ops, x, top), tensor
        )

    def switched(self, k: int, on: At | _Constant, off: At) -> At:
        """``on`` or ``off``, selected by element ``k`` of the extra input."""
        region = off.region
        if (k, region) not in self._elements:
            self._elements[k, region] = self._graft(
                ("element", k), lambda given: given[k], At(region, self._switch(region)),
                kinds=[tf.bool],
            )  # fmt: skip
        kinds = [tf.bool, tf.float32, tf.float32]
        element = self._elements[k, region]
        low = At(region, self._placed(on, region))
        return self._graft("switched", tf.where, element, low, off, kinds=kinds)

    def _switch(self, region: int) -> str:
        """The extra input in a region; a body gets that of its parent."""
        if region not in self._switches:
            if region == 0:
                node = self._rewriter.add_node(0, SWITCH, "Placeholder")
                node.attr["dtype"].type = tf.bool.as_datatype_enum
                node.attr["shape"].shape.CopyFrom(tf.TensorShape([None]).as_proto())
                self._switches[0] = f"{SWITCH}:0"
            else:
                parent = self._switch(self._rewriter.binding.regions[region].parent)
                self._switches |= self._rewriter.hand_in(region, SWITCH, parent)
        return self._switches[region]

    def finish(self, switches: int = 0) -> FrozenModel:
        """The copy; with switches their input is the last."""
        if not switches:
            return self._rewriter.finish()
        port = SignaturePort(
            name=SWITCH, tensor=self._switch(0), dtype="bool", shape=(switches,)
        )
        return self._rewriter.finish(port)

    def _placed(self, tensor: At | _Constant, region: int) -> str:
        """The name of a tensor in a region; a constant's node is added there."""
        if isinstance(tensor, At):
            return tensor.tensor
        name = "finecast_constant"
        return self._rewriter.add_constant(region, name, tensor.array, tf.float32).tensor

    def _graft(
        self, key: Any, make: Callable[..., Any], *tensors: At, kinds: Sequence[Any] = ()
    ) -> At:
        """The result of new nodes that compute ``make`` of ``tensors``.

        ``make`` is traced once for each ``key``; ``kinds`` are the types of its arguments, by
        default fp32.
        """
        if key not in self._made:
            self._made[key] = _traced(make, kinds or [tf.float32] * len(tensors))
        nodes, end = self._made[key]
        self._grafts += 1
        first = tensors[0]
        prefix = f"{base_name(first.tensor)}/finecast_{self._grafts}"
        names = [t.tensor for t in tensors]
        return self._rewriter.graft(first.region, prefix, nodes, end, names)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Constant:
    """Numbers that become a constant's node in the region that reads them."""

    array: NDArray[np.float32]


def _there_and_back(fmt: Format) -> Callable[[Any], Any]:
    return lambda x: tf.cast(tf.cast(x, DTYPES[fmt]), tf.float32)


def _traced(make: Callable[..., Any], kinds: Sequence[Any]) -> tuple[list[Any], str]:
    """The nodes that ``make`` adds to a graph, and the tensor it gives.

    Its arguments are placeholders ``p0``, ``p1``..., which are not among the nodes.
    """
    graph = tf.Graph()
    with graph.as_default():
        given = [tf.compat.v1.placeholder(k, None, name=f"p{i}") for i, k in enumerate(kinds)]
        end: str = make(*given).name
    return [n for n in graph.as_graph_def().node if n.op != "Placeholder"], end


class _Ops:
    """TensorFlow's functions under the names of OpenVINO's, which ``rounding`` calls."""

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
        """To the nearest integer, ties to even, which is the only ``mode`` asked for."""
        del mode
        return tf.round(x)

    @staticmethod
    def reduce_sum(x: Any, axes: Any, *, keep_dims: bool) -> Any:
        return tf.reduce_sum(x, axes, keepdims=keep_dims)

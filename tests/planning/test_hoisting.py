"""Values are encoded in front of ops that only move numbers, once for all readers."""

from __future__ import annotations

import pytest

from finecast.graph import Graph
from finecast.numbers.encodings import Encodings, Scaled
from finecast.numbers.formats import Format
from finecast.planning.edits import RoundTrip, edits
from finecast.planning.units import make_units
from finecast.rules import Permission
from tests.graph.text import from_text

INT8, FP32, BF16 = Format.INT8, Format.FP32, Format.BF16
ONE = Scaled(format=INT8, grid=INT8.grid(constant=False), scale=(0.5,), zero_point=3)
OTHER = Scaled(format=INT8, grid=INT8.grid(constant=False), scale=(0.25,), zero_point=3)
# act's result is pooled, then transposed, for two products; `side` reads it directly.
NET = """\
input %0 x fp32[n, 4]
constant %1 w fp32[4, 4] size=16 largest=1.0 smallest_nonzero=0.1
node act relu onnx::Relu fp32 (%0) -> (%2 a fp32)
node pool max_pool onnx::MaxPool fp32 (%2) -> (%3 b fp32)
node turn transpose onnx::Transpose fp32 (%3) -> (%4 c fp32)
node one matmul onnx::MatMul fp32 (%4, %1) -> (%5 d fp32)
node two matmul onnx::MatMul fp32 (%4, %1) -> (%6 e fp32)
node side matmul onnx::MatMul fp32 (%2, %1) -> (%7 f fp32)
output %5
output %6
output %7
"""


def coded_at(net: str, encodings: dict[str, Scaled]) -> dict[str, set[str]]:
    """The names of the ops that read codes, by name of the encoded value."""
    graph = from_text(net)
    ids = {n.name: n.id for n in graph.nodes}
    formats = {i: INT8 if n in encodings else FP32 for n, i in ids.items()}
    operands = {ids[n]: Encodings(operands={0: e}) for n, e in encodings.items()}
    found: dict[str, set[str]] = {}
    for edit in edits(graph, formats, encodings=operands):
        assert isinstance(edit, RoundTrip)
        readers = {graph.nodes[u.node].name for u in edit.uses if u.node is not None}
        found.setdefault(graph.values[edit.value].name, set()).update(readers)
    return found


def test_codes_are_made_before_what_moves_them() -> None:
    both = {"one": ONE, "two": ONE}
    assert coded_at(NET, both) == {"a": {"pool"}}


def test_readers_of_unmoved_values_share_the_codes() -> None:
    assert coded_at(NET, {"one": ONE, "two": ONE, "side": ONE}) == {"a": {"pool", "side"}}


def test_codes_are_made_behind_a_move_with_another_reader_in_fp32() -> None:
    assert coded_at(NET, {"one": ONE}) == {"c": {"one"}}


def test_codes_are_made_behind_a_move_if_readers_have_different_scales() -> None:
    assert coded_at(NET, {"one": ONE, "two": OTHER}) == {"c": {"one", "two"}}


def test_codes_are_made_behind_a_move_whose_result_is_an_output() -> None:
    both = {"one": ONE, "two": ONE}
    assert coded_at(NET + "output %3\n", both) == {"b": {"turn"}}
    assert coded_at(NET + "output %4\n", both) == {"c": {"one", "two"}}


# A product's kernel, with the bias and the activation behind it.
KERNEL = """\
input %0 x fp32
constant %1 w fp32[4, 4] size=16 largest=1.0 smallest_nonzero=0.1
constant %2 b fp32[4] size=4 largest=1.0 smallest_nonzero=0.1
node product matmul onnx::MatMul fp32 (%0, %1) -> (%3 c fp32)
node bias add onnx::Add fp32 (%3, %2) -> (%4 d fp32)
node act relu onnx::Relu fp32 (%4) -> (%5 e fp32)
output %5
"""


def units(**formats: frozenset[Format]) -> set[frozenset[str]]:
    graph: Graph = from_text(KERNEL)
    allowed = {
        n.id: Permission(formats=formats[n.name], reasons=()) for n in graph.float_nodes
    }
    kernel = [n.id for n in graph.nodes]
    found = make_units(graph, allowed, (INT8, BF16), [kernel])
    return {frozenset(graph.nodes[i].name for i in members) for members in found.members}


KEEP, CODED = frozenset({FP32}), frozenset({FP32, INT8})
LOW, ANY = frozenset({FP32, BF16}), frozenset({FP32, BF16, INT8})
ALL = frozenset({"product", "bias", "act"})


def test_beside_an_op_on_codes_its_kernel_is_decided_with_it() -> None:
    """The bias and the activation stay fp32, and nothing is cast in front of them."""
    assert units(product=CODED, bias=KEEP, act=KEEP) == {ALL}


def test_those_that_store_otherwise_are_decided_by_themselves() -> None:
    """The activation's result may be stored in bf16, the product's may not."""
    assert units(product=CODED, bias=KEEP, act=LOW) == {
        frozenset({"product", "bias"}),
        frozenset({"act"}),
    }


@pytest.mark.parametrize("kept", ["bias", "act"])
def test_codes_and_bf16_are_one_decision_where_all_may_be_stored_low(kept: str) -> None:
    formats = dict.fromkeys(("bias", "act"), LOW) | {kept: KEEP}
    assert frozenset({kept}) not in units(product=ANY, **formats)  # it has no choice
    assert units(product=ANY, bias=LOW, act=LOW) == {ALL}


def test_without_codes_an_op_that_stays_is_no_unit() -> None:
    assert units(product=LOW, bias=KEEP, act=KEEP) == {frozenset({"product"})}

"""Values scaled into a format's range: equal bits, factors that are absorbed, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from finecast.engines.loading import exact_session
from finecast.frontends.onnx import Prepared
from finecast.native.observing import observe
from finecast.numbers.formats import Format
from finecast.planning.range_scaling import RangeScaling, range_scalings, scaled_facts
from finecast.rules.facts import ValueFacts
from tests.planning import nets

X = np.random.default_rng(5).standard_normal((4, 6, 8)).astype(np.float32)
W = np.random.default_rng(6).standard_normal((8, 8)).astype(np.float32)
HEADER = "net (float[4, 6, 8] x) => ({outputs})"


@dataclass(slots=True)
class Net:
    """A net that is written op by op; its results have one shape."""

    lines: list[str] = field(default_factory=list[str])
    constants: dict[str, NDArray[np.float32]] = field(
        default_factory=dict[str, "NDArray[np.float32]"]
    )

    def prepared(self, *outputs: str) -> Prepared:
        """With these values as outputs."""
        made = ", ".join(f"float[4, 6, 8] {name}" for name in outputs)
        header = HEADER.format(outputs=made)
        return nets.prepared(f"{header} {{ {' '.join(self.lines)} }}", self.constants)

    def op(self, text: str) -> str:
        """Adds an op, as ``Add (a, b)``; returns the name of its result."""
        name = f"v{len(self.lines)}"
        self.lines.append(f"[n{len(self.lines)}] {name} = {text}")
        return name

    def const(self, array: NDArray[np.float32] | float) -> str:
        """Adds a constant; the same number is one constant."""
        name = f"c{abs(float(array))}".replace(".", "_") if np.ndim(array) == 0 else ""
        name = (name or f"w{len(self.constants)}").replace("-", "m")
        self.constants[name] = np.asarray(array, np.float32)
        return name


def rms_norm(net: Net, x: str, inverse: bool) -> str:
    """As exporters write it out, with an epsilon that all norms share."""
    square = net.op(f"Pow ({x}, {net.const(2.0)})")
    mean = net.op(f"ReduceMean <axes = [-1]> ({square})")
    root = net.op(f"Sqrt ({net.op(f'Add ({mean}, {net.const(1e-6)})')})")
    if not inverse:
        return net.op(f"Div ({x}, {root})")
    return net.op(f"Mul ({x}, {net.op(f'Div ({net.const(1.0)}, {root})')})")


def scalings_of(
    model: Prepared, feeds: dict[str, NDArray[np.float32]]
) -> tuple[dict[int, ValueFacts], tuple[RangeScaling, ...]]:
    """Facts of the values, and the scalings if all ops were kept for their range."""
    facts = observe(model, lambda: [feeds])
    kept = [n.id for n in model.graph.float_nodes]
    return facts, range_scalings(model.graph, facts, Format.FP16, kept)


def values_of(model: Prepared, names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
    session = exact_session(model.with_outputs([*names]), optimizing=False)
    return {n: a.astype(np.float32) for n, a in session.run({"x": X}).items()}


def check(model: Prepared) -> tuple[RangeScaling, ...]:
    """The scalings, after checking that every value is its own times a power of two."""
    facts, found = scalings_of(model, {"x": X})
    if not found:
        return ()
    scaled = model.adjusted([a for one in found for a in one.adjustments])
    names = [n for n in model.observable() if n in scaled.observable()]
    before, after = values_of(model, names), values_of(scaled, names)
    exponents = {n: e for one in found for n, e in one.exponents.items()}
    for name in names:
        expected = np.ldexp(before[name], exponents.get(name, 0))
        np.testing.assert_array_equal(after[name], expected, err_msg=name)
    for value in model.graph.outputs:
        assert value.name not in exponents
    computed = scaled_facts(model.graph, facts, scaled.graph, found)
    seen = observe(scaled, lambda: [{"x": X}])
    assert computed == seen
    return found


EXPONENTS = st.integers(-2, 18)


def stays_normal(array: NDArray[np.float32]) -> bool:
    """Whether all are finite, and none loses bits by becoming subnormal as it is scaled."""
    least = np.abs(array[array != 0]).min(initial=np.inf)
    return bool(np.isfinite(array).all() and least >= 2.0**-90)


@pytest.mark.long
@given(st.data())
def test_values_are_theirs_times_powers_of_two(data: st.DataObject) -> None:
    """Nets of drawn ops, some of whose values are beyond fp16: no bit changes."""
    net, values = Net(), ["x"]

    def value() -> str:
        return data.draw(st.sampled_from(values[-4:]))

    def weights(*shape: int) -> str:
        seed, power = data.draw(st.integers(0, 99)), data.draw(EXPONENTS)
        array = np.random.default_rng(seed).standard_normal(shape)
        return net.const((array * 2.0**power).astype(np.float32))

    makers = {
        "matmul": lambda: net.op(f"MatMul ({value()}, {weights(8, 8)})"),
        "scale": lambda: net.op(f"Mul ({value()}, {weights(8)})"),
        "divide": lambda: net.op(f"Div ({value()}, {net.const(8.0)})"),
        "add": lambda: net.op(f"Add ({value()}, {value()})"),
        "bias": lambda: net.op(f"Add ({value()}, {weights(8)})"),
        "gate": lambda: net.op(f"Mul ({value()}, {value()})"),
        "relu": lambda: net.op(f"Relu ({value()})"),
        "tanh": lambda: net.op(f"Tanh ({value()})"),
        "softmax": lambda: net.op(f"Softmax ({value()})"),
        "rms": lambda: rms_norm(net, value(), data.draw(st.booleans())),
        "norm": lambda: net.op(
            f"LayerNormalization <epsilon = 0.001> ({value()}, {weights(8)}, {weights(8)})"
        ),
        "max": lambda: net.op(f"Max ({value()}, {value()})"),
        "neg": lambda: net.op(f"Neg ({value()})"),
    }
    for _ in range(data.draw(st.integers(2, 10))):
        made = makers[data.draw(st.sampled_from(sorted(makers)))]()
        values.append(made)
    outputs = {values[-1], data.draw(st.sampled_from(values[1:]))}
    model = net.prepared(*sorted(outputs))
    if all(map(stays_normal, values_of(model, [*model.observable()]).values())):
        check(model)


def large(net: Net, x: str, by: float = 2.0**15) -> str:
    return net.op(f"MatMul ({x}, {net.const(W * np.float32(by))})")


def adjusted(found: Sequence[RangeScaling]) -> dict[tuple[str, int | str], int]:
    """The exponents by op and operand."""
    return {
        (a.node, a.attribute or a.port): a.exponents[0]
        for one in found
        for a in one.adjustments
    }


def test_the_next_product_absorbs_it() -> None:
    net = Net()
    hidden = large(net, "x")
    net.op(f"MatMul ({net.op(f'Relu ({hidden})')}, {net.const(W)})")
    made = adjusted(check(net.prepared("v2")))
    assert made.keys() == {("n0", 1), ("n2", 1)}
    assert made["n0", 1] == -made["n2", 1] < 0


@pytest.mark.parametrize("inverse", [False, True])
def test_a_norm_absorbs_it_by_its_epsilon(inverse: bool) -> None:
    """The stream with all that is added to it is scaled; the epsilons of all norms are one."""
    net = Net()
    stream = large(net, "x")
    for _ in range(2):
        stream = net.op(f"Add ({stream}, {large(net, rms_norm(net, stream, inverse))})")
    end = net.op(f"MatMul ({rms_norm(net, stream, inverse)}, {net.const(W)})")
    model = net.prepared(end)
    found = check(model)
    epsilons = [
        n.name for n in model.graph.nodes if n.op == "add" and len(model.graph.constants(n))
    ]
    made = adjusted(found)
    assert len(epsilons) == 3
    assert {made[name, 1] for name in epsilons} == {2 * made["n0", 1]}
    assert all(exponent < 0 for exponent in made.values())


def test_a_fused_norm_absorbs_it_by_its_attribute() -> None:
    net = Net()
    gains = net.const(np.linspace(0.5, 2, 8, dtype=np.float32))
    norm = net.op(f"LayerNormalization <epsilon = 0.001> ({large(net, 'x')}, {gains})")
    made = adjusted(check(net.prepared(norm)))
    assert made == {("n0", 1): made["n0", 1], ("n1", "epsilon"): 2 * made["n0", 1]}


def test_a_gate_without_weights_is_scaled_by_what_it_multiplies() -> None:
    net = Net()
    gate = net.op(f"Tanh ({net.op(f'MatMul (x, {net.const(W)})')})")
    hidden = net.op(f"Mul ({gate}, {large(net, 'x')})")
    net.op(f"MatMul ({hidden}, {net.const(W)})")
    made = adjusted(check(net.prepared("v4")))
    assert made.keys() == {("n2", 1), ("n4", 1)}


def test_what_is_not_homogeneous_reads_its_own_numbers() -> None:
    """A multiplication is inserted in front of the softmax, for a product gains by it."""
    net = Net()
    net.op(f"Softmax ({large(net, 'x')})")
    made = adjusted(check(net.prepared("v1")))
    assert made == {("n0", 1): -made["n1", 0], ("n1", 0): -made["n0", 1]}


@pytest.mark.parametrize("logarithm", [False, True])
def test_an_exponential_is_shifted(logarithm: bool) -> None:
    """A softmax without its maximum, or a log-sum-exp: the sum fits, the end is the same."""
    net = Net()
    power = net.op(f"Exp ({net.op(f'MatMul (x, {net.const(W * np.float32(1.5))})')})")
    total = net.op(f"ReduceSum <keepdims = 1> ({power}, axes)")
    end = net.op(f"Log ({total})" if logarithm else f"Div ({power}, {total})")
    end = net.op(f"Add (x, {end})")
    last: Any = np.array([-1], np.int64)
    net.constants["axes"] = last
    model = net.prepared(end)
    facts, (one,) = scalings_of(model, {"x": X})
    (shift,) = (a for a in one.adjustments if a.add)
    exponent = one.exponents[total]
    assert (shift.node, shift.port) == ("n1", 0)
    assert shift.add == (pytest.approx(exponent * np.log(2)),)
    assert one.exponents == {power: exponent, total: exponent}
    rest = {(a.node, a.port): a.exponents for a in one.adjustments if not a.add}
    assert rest == ({("n3", 0): (-exponent,)} if logarithm else {})
    scaled = model.adjusted(one.adjustments)
    before, after = (values_of(m, [power, total, end]) for m in (model, scaled))
    for name, numbers in before.items():
        wanted = np.ldexp(numbers, one.exponents.get(name, 0))
        np.testing.assert_allclose(after[name], wanted, rtol=1e-4, atol=1e-5)
    assert all("shifted for that" in r.text for r in one.reasons.values())
    found = scaled_facts(model.graph, facts, scaled.graph, [one])
    assert found.keys() < observe(scaled, lambda: [{"x": X}]).keys()


def test_an_output_keeps_its_numbers() -> None:
    net = Net()
    assert check(net.prepared(large(net, "x"))) == ()


def test_what_fits_is_left_alone() -> None:
    net = Net()
    assert check(net.prepared(net.op(f"Relu ({large(net, 'x', 2.0)})"))) == ()


def test_what_is_added_to_its_own_square_has_a_bounded_exponent() -> None:
    """A square has twice the exponent: none serves both, and a multiplication is inserted."""
    net = Net()
    first = large(net, "x", 2.0**3)
    square = net.op(f"Mul ({net.op(f'Mul ({first}, {first})')}, {first})")
    net.op(f"Relu ({net.op(f'Add ({first}, {square})')})")
    for one in check(net.prepared("v4")):
        assert all(abs(e) <= 32 for e in one.exponents.values())


def test_a_large_constant_of_several_ops_is_not_copied() -> None:
    net = Net()
    shared = net.const(np.tile(W, (32, 32)))  # 65,536 numbers
    wide = net.op(f"Concat <axis = 2> ({', '.join(['x'] * 32)})")
    first = net.op(f"MatMul ({wide}, {shared})")
    second = net.op(f"MatMul ({first}, {shared})")
    for _ in range(2):
        second = net.op(f"MatMul ({second}, {shared})")
    end = net.op(f"Slice ({second}, starts, ends, last)")
    numbers = {"starts": 0, "ends": 8, "last": 2}
    integers: Any = {n: np.array([i], np.int64) for n, i in numbers.items()}
    net.constants |= integers
    for one in check(net.prepared(end)):
        assert all(a.port == 0 for a in one.adjustments)


def test_subnormal_numbers_are_told_of() -> None:
    """They lose digits when they are divided, and the reason says that bits change."""
    net = Net()
    array = W * np.float32(2.0**15)
    array[0, 0] = 2.0**-120
    hidden = net.op(f"MatMul (x, {net.const(array)})")
    net.op(f"MatMul ({hidden}, {net.const(W)})")
    _, found = scalings_of(net.prepared("v1"), {"x": X * np.float32(2.0**-2)})
    (one,) = found
    assert all("changes what is below 1.18e-38" in r.text for r in one.reasons.values())


def test_the_reason_names_value_and_power() -> None:
    net = Net()
    hidden = net.op(f"Relu ({large(net, 'x')})")
    net.op(f"MatMul ({hidden}, {net.const(W)})")
    (one,) = check(net.prepared("v2"))
    power = one.exponents["v0"]
    assert one.reasons.keys() == {"n0", "n1", "n2"}
    for reason in one.reasons.values():
        assert f"it is computed times 2^{power}" in reason.text
        assert reason.text.endswith("; no bit of a result in fp32 changes")
        assert reason.evidence["limit"] == Format.FP16.max / 2

"""PyTorch programs on emulated devices, held against the ONNX models exported from them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch: Any = pytest.importorskip("torch")

from finecast.devices.emulation import (  # noqa: E402
    Emulation,
    Setting,
    setting_of,
    setting_of_plan,
)
from finecast.devices.targets import load_target  # noqa: E402
from finecast.engines.base import Array  # noqa: E402
from finecast.engines.emulator import (  # noqa: E402
    EmulatorEngine,
    EmulatorSession,
    prepare,
)
from finecast.engines.torch.session import examples  # noqa: E402
from finecast.errors import ModelError  # noqa: E402
from finecast.frontends import onnx as onnx_frontend  # noqa: E402
from finecast.frontends.torch import Captured, capture  # noqa: E402
from finecast.frontends.torch.native import rounded_to  # noqa: E402
from finecast.native.torch.model import of_module  # noqa: E402
from finecast.native.torch.program import TorchProgram  # noqa: E402
from finecast.numbers.formats import FLOATS, Format  # noqa: E402
from finecast.numbers.rounding import round_to  # noqa: E402
from finecast.numbers.roundmodes import Rounder, Rounding, convert  # noqa: E402
from finecast.rules.policy import Scope  # noqa: E402
from finecast_neuron.compilers import ladder  # noqa: E402
from finecast_neuron.flags import Given  # noqa: E402
from tests.engines.emulator import exported_pairs as pairs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

Floats = NDArray[np.float32]
LOW = [f for f in FLOATS if f is not Format.FP32]
# The longest sum in the nets: 8 channels of 3 x 3.
TERMS = 72


@pytest.fixture(scope="module", params=list(pairs.NETS))
def pair(request: pytest.FixtureRequest) -> tuple[str, Captured]:
    return request.param, capture(pairs.program(request.param), ())


def program_of(captured: Captured, how: Emulation) -> TorchProgram:
    program = captured.program
    return TorchProgram(source=of_module(program, examples(program)), emulation=how)


def session_of(
    captured: Captured, how: Emulation, setting: Setting | None = None
) -> EmulatorSession:
    program = program_of(captured, how)
    return program.session(how, setting or setting_of(program.graph, how))


def torch_y(captured: Captured, how: Emulation, x: Floats) -> Floats:
    session = session_of(captured, how)
    (found,) = session.run({session.inputs[0].name: x}).values()
    return np.asarray(found, np.float32)


@cache
def exported(name: str) -> onnx_frontend.OnnxFile:
    return onnx_frontend.load(pairs.onnx_file(name))


def onnx_y(name: str, how: Emulation, x: Floats) -> Floats:
    prepared = prepare(exported(name), how)
    setting = setting_of(prepared.graph, how)
    session = EmulatorEngine(emulation=how).session(prepared, fixed=setting)
    (found,) = session.run({"x": x}).values()
    return np.asarray(found, np.float32)


def distance(a: Array, b: Array) -> float:
    x, y = (np.asarray(one, np.float32) for one in (a, b))
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def tolerance(fmt: Format) -> float:
    """How far two right emulations can be apart: libraries sum in different orders.

    A sum of n terms is off by up to n u32 of its size (Higham), and lies so near to the
    middle of two low numbers, 2 u apart, with a probability of n u32 / u. Where it does, they
    round to different sides: 2 u. The root mean square of that is 2 sqrt(n u32 u).
    """
    u32 = Format.FP32.unit_roundoff
    return TERMS * u32 + 2 * math.sqrt(TERMS * u32 * fmt.unit_roundoff)


NEURON = [
    (target, scope, fmt)
    for target, formats in {
        "trn1": (Format.BF16, Format.FP16, Format.TF32, Format.FP8_E4M3, Format.FP8_E5M2),
        "trn2": (Format.BF16, Format.FP8_E3M4),
        "inf2": (Format.FP16, Format.TF32),
        "inf1": (Format.BF16, Format.FP16),
    }.items()
    for scope in (Scope.MATMULT, Scope.ALL)
    for fmt in formats
]


@pytest.mark.parametrize(
    ("target", "scope", "fmt"),
    NEURON,
    ids=lambda p: getattr(p, "label", getattr(p, "value", p)),
)
def test_a_program_gives_what_its_onnx_export_gives(
    pair: tuple[str, Captured], target: str, scope: Scope, fmt: Format
) -> None:
    name, captured = pair
    how = Emulation(target=load_target(target), scope=scope, format=fmt)
    x = pairs.inputs(name)
    exact = pairs.net(name)(torch.from_numpy(x)).detach().numpy()
    got, expected = torch_y(captured, how, x), onnx_y(name, how, x)
    assert distance(got, expected) <= tolerance(fmt)
    # So a rounding that is left out, or one too many, shows.
    assert distance(got, exact) > 1.5 * tolerance(fmt)


def test_scope_none_changes_nothing(pair: tuple[str, Captured]) -> None:
    name, captured = pair
    how = Emulation(target=load_target("trn1"))
    x = pairs.inputs(name)
    exact = pairs.net(name)(torch.from_numpy(x)).detach().numpy()
    # Batch norms were folded, attention written out: the same sums in other orders.
    assert distance(torch_y(captured, how, x), exact) <= TERMS * Format.FP32.unit_roundoff


@pytest.mark.parametrize(
    ("target", "base"),
    [("inf1", Given()), ("trn1", Given(mixed_accumulation=False))],
    ids=["inf1", "trn1 in steps"],
)
def test_all_rungs_of_a_ladder_agree(
    pair: tuple[str, Captured], target: str, base: Given
) -> None:
    name, captured = pair
    x = pairs.inputs(name)
    for rung in ladder(target, base):
        how = rung.emulation
        got, expected = torch_y(captured, how, x), onnx_y(name, how, x)
        # inf1's fp32 products run in bf16; what nothing casts is fp32 elsewhere.
        fmt = Format.BF16 if target == "inf1" else how.format
        fmt = fmt if how.scope is not Scope.NONE or target == "inf1" else Format.FP32
        assert distance(got, expected) <= tolerance(fmt), rung.name


@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_accumulation_in_steps_rounds_more(name: str) -> None:
    captured = capture(pairs.program(name), ())
    how = Emulation(target=load_target("trn1"), scope=Scope.ALL)
    x = pairs.inputs(name)
    steps = torch_y(captured, replace(how, mixed_accumulation=False), x)
    assert distance(steps, torch_y(captured, how, x)) > 2 * tolerance(how.format)


class Product(torch.nn.Module):
    """x @ 1, without the transpose of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Parameter(torch.eye(8))

    def forward(self, x: Any) -> Any:
        return x @ self.one


class Sum(torch.nn.Module):
    """x + 0: a vector op."""

    def forward(self, x: Any) -> Any:
        return x + 0.0


def wide(rows: int = 64) -> Floats:
    """Numbers over the exponents of fp16 and a bit beyond, both signs."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((rows, 8)) * np.exp2(rng.integers(-20, 15, (rows, 8)))
    return x.astype(np.float32)


def captured_of(module: Any, *args: Any) -> Captured:
    batch = torch.export.Dim("batch", min=2, max=1024)
    shapes = tuple({0: batch} for _ in args)
    return capture(torch.export.export(module.eval(), args, dynamic_shapes=shapes), ())


@cache
def single(name: str) -> Captured:
    module = {"product": Product, "sum": Sum}[name]()
    return captured_of(module, torch.from_numpy(wide()))


@pytest.mark.parametrize("rounding", [Rounding.NEAREST_EVEN, Rounding.TOWARD_ZERO])
@pytest.mark.parametrize(
    ("module", "scope", "fmt"),
    [("product", Scope.MATMULT, fmt) for fmt in LOW]
    + [("sum", Scope.ALL, fmt) for fmt in LOW if fmt is not Format.FP8_E4M3],
    ids=lambda p: getattr(p, "label", getattr(p, "value", str(p))),
)
def test_one_rounding_is_the_numbers_own_bit_for_bit(
    module: str, scope: Scope, fmt: Format, rounding: Rounding
) -> None:
    # Finite where added up with zeros, so that nothing but the rounding is seen.
    x = np.clip(wide(), -fmt.max, fmt.max).astype(np.float32)
    how = Emulation(
        target=load_target("trn1" if fmt is not Format.FP8_E4M3 else "sm90"),
        scope=scope,
        format=fmt,
        rounding=rounding,
    )
    got = torch_y(single(module), how, x)
    assert np.array_equal(got, convert(x, how.conversion(fmt)))
    assert not np.array_equal(got, x)


@pytest.mark.parametrize("fmt", [Format.BF16, Format.FP8_E5M2], ids=lambda f: f.label)
def test_stochastic_rounding_is_the_numbers_own(fmt: Format) -> None:
    x = np.clip(wide(256), -fmt.max, fmt.max).astype(np.float32)
    captured = single("sum")
    how = Emulation(
        target=load_target("trn1"),
        scope=Scope.ALL,
        format=fmt,
        rounding=Rounding.STOCHASTIC,
    )
    session = session_of(captured, how)
    (whole,) = session.run({"x": x}).values()
    low = np.asarray(whole, np.float32)
    assert np.array_equal(round_to(low, fmt), low)
    below = convert(x, Rounder(format=fmt, rounding=Rounding.TOWARD_ZERO))
    # Two steps: of the operand, and of the sum that is stored, which is exact already.
    step = np.maximum(np.abs(below) * fmt.epsilon, fmt.smallest_subnormal)
    assert np.all(np.abs(low - below) <= step)
    # Each goes up with the probability of what it is beyond the lower one, in steps.
    exponent = np.maximum(np.floor(np.log2(np.abs(x))), 1 - fmt.bias)
    share = np.abs(x - below) / np.exp2(exponent - fmt.mantissa_bits)
    # A draw of deviation 1/2 at most, for each of the numbers.
    assert abs(float(np.mean(low != below) - share.mean())) < 4 * 0.5 / math.sqrt(x.size)
    session.restart()
    parts = [next(iter(session.run({"x": x[k : k + 64]}).values())) for k in range(0, 256, 64)]
    assert np.array_equal(np.concatenate(parts), whole)
    other = session_of(captured, replace(how, seed=1))
    assert not np.array_equal(next(iter(other.run({"x": x}).values())), whole)


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("fmt", list(FLOATS), ids=lambda f: f.label)
def test_tensors_convert_as_arrays_do(
    fmt: Format, rounding: Rounding, saturate: bool, flush: bool
) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 20_000, dtype=np.uint64).astype(np.uint32)
    near = np.minimum(fmt.max * np.linspace(0.9, 1.2, 999), Format.FP32.max)
    small = fmt.smallest_normal * np.exp2(rng.uniform(-14, 2, 4000))
    edges = np.array([0, -0.0, np.inf, -np.inf, np.nan], np.float32)
    x = np.concatenate([bits.view(np.float32), near, small, edges], dtype=np.float32)
    how = Rounder(
        format=fmt, rounding=rounding, saturate=saturate, flush_subnormals=flush, seed=3
    )
    expected = convert(x, how, offset=5, stream=2)
    got = rounded_to(torch.from_numpy(x), how, offset=5, stream=2).numpy()
    assert np.array_equal(got, expected, equal_nan=True)
    zeros = got == 0
    assert np.array_equal(np.signbit(got[zeros]), np.signbit(expected[zeros]))


@pytest.mark.parametrize("clamped", [False, True])
def test_infinities_in_transposes(clamped: bool) -> None:
    class Transposed(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x.transpose(1, 2).sum(-1)

    how = Emulation(
        target=load_target("trn1"),
        scope=Scope.MATMULT,
        relayout=Format.FP32,
        saturate_infinity=clamped,
    )
    x = np.ones((2, 3, 3), np.float32)
    x[:, 0, 0] = -np.inf
    got = torch_y(captured_of(Transposed(), torch.from_numpy(x)), how, x)
    # The zeros of the identity meet each number of a row: one Inf makes NaN of all.
    expected = [-Format.BF16.max, 3, 3] if clamped else [np.nan, np.nan, np.nan]
    assert np.array_equal(got[0], np.array(expected, np.float32), equal_nan=True)


def test_a_switched_session_is_one_built_for_the_setting(pair: tuple[str, Captured]) -> None:
    name, captured = pair
    x = pairs.inputs(name)
    how = Emulation(target=load_target("trn1"), scope=Scope.ALL, format=Format.FP16)
    session = session_of(captured, how, Setting())
    feeds = {session.inputs[0].name: x}
    (exact,) = session.run(feeds).values()
    setting = setting_of(program_of(captured, how).graph, how)
    (low,) = session.apply(setting).run(feeds).values()
    assert np.array_equal(low, torch_y(captured, how, x))
    (again,) = session.apply(Setting()).run(feeds).values()
    assert np.array_equal(again, exact)
    assert not np.array_equal(low, exact)


def test_a_plan_keeps_the_scales_of_norms_in_fp32() -> None:
    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(8, elementwise_affine=True)
            torch.nn.init.constant_(self.norm.weight, 1.001)

        def forward(self, x: Any) -> Any:
            return self.norm(x)

    x = round_to(wide(), Format.BF16)
    captured = captured_of(Norm(), torch.from_numpy(x))
    how = Emulation(target=load_target("trn1"), scope=Scope.ALL)
    prepared = program_of(captured, how)
    formats = dict.fromkeys((n.id for n in prepared.graph.float_nodes), Format.BF16)
    plan = setting_of_plan(formats, how, fp32_parameters=prepared.fp32_parameters)
    module = captured.module
    stated = round_to(module(torch.from_numpy(x)).detach().numpy(), Format.BF16)
    feeds = {"x": x}
    (planned,) = session_of(captured, how, plan).run(feeds).values()
    assert np.array_equal(planned, stated)
    assert not np.array_equal(torch_y(captured, how, x), stated), "a compiler casts them"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"enable_gqa": True},
        {"mask": "bool"},
        {"mask": "fp32"},
    ],
    ids=str,
)
def test_attention_in_steps_is_attention(options: dict[str, Any]) -> None:
    kind = options.get("mask")
    more = {k: v for k, v in options.items() if k != "mask"}
    allowed = torch.tril(torch.ones(5, 5)).bool()
    mask = None if kind is None else allowed if kind == "bool" else (~allowed).float() * -9.0

    class Attends(torch.nn.Module):
        def forward(self, q: Any, k: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, k.flip(-1), attn_mask=mask, **more
            )

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 5, 8, generator=generator)
    k = torch.randn(3, 2 if more.get("enable_gqa") else 4, 5, 8, generator=generator)
    captured = captured_of(Attends(), q, k)
    how = Emulation(target=load_target("trn1"))
    feeds = {"q": q.numpy(), "k": k.numpy()}
    session = session_of(captured, how)
    (got,) = session.run(feeds).values()
    assert distance(got, Attends()(q, k).numpy()) <= TERMS * Format.FP32.unit_roundoff
    # What the softmax gives is an operand of the second product: it rounds, too.
    low = session_of(captured, replace(how, scope=Scope.MATMULT))
    seen = {n.op for n in program_of(captured, how).graph.nodes}
    assert "matmul" in seen
    assert "attention" not in seen
    assert distance(next(iter(low.run(feeds).values())), got) > 1e-4


def test_what_the_program_writes_to_is_not_changed() -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x: Any) -> Any:
            self.seen.add_(x.sum(0))
            return x + self.seen

    x = np.ones((4, 8), np.float32)
    captured = captured_of(Counts(), torch.from_numpy(x))
    session = session_of(captured, Emulation(target=load_target("trn1"), scope=Scope.ALL))
    first, second = (next(iter(session.run({"x": x}).values())) for _ in range(2))
    assert np.array_equal(first, second)
    assert np.array_equal(first, np.full((4, 8), 5, np.float32))


def test_control_flow_is_refused() -> None:
    class Branches(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))

    program = torch.export.export(Branches(), (torch.ones(3, 8),))
    with pytest.raises(ModelError, match="control flow"):
        program_of(capture(program, ()), Emulation(target=load_target("trn1")))


def test_facts_are_those_of_the_fp32_program(pair: tuple[str, Captured]) -> None:
    name, captured = pair
    x = pairs.inputs(name)
    prepared = program_of(captured, Emulation(target=load_target("trn1")))
    feed = prepared.graph.inputs[0].name
    facts = prepared.observe([{feed: x[:2]}, {feed: x[2:]}])
    graph = prepared.graph
    (given,) = graph.inputs
    assert facts[given.id].largest == np.abs(x).max()
    assert facts[given.id].count == x.size
    made = {v.id for v in graph.values if v.format and v.constant is None}
    assert set(facts) == made

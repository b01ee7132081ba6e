"""Plans in the words of other tools: run by the tool where it is installed, and read back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper, parser

from finecast import Format, Plan, api
from finecast.errors import UsageError
from finecast_export.exporting import TOOLS, Exported, export

FP32: Final = Format.FP32
NET: Final = """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 256] x) => (float[n, 64] y) {
  [first] a = MatMul (x, w0)
  [act] r = Relu (a)
  [second] g = Gemm <transB = 1> (r, w1, b1)
  [third] c = MatMul (g, w2)
  [end] y = Softmax <axis = -1> (c)
}"""
SHAPES: Final = {"w0": (256, 256), "w1": (256, 256), "b1": (256,), "w2": (256, 64)}
# Of all types that ONNX models have here.
TYPES: Final = {1: "fp32", 10: "fp16", 16: "bf16"}


@pytest.fixture
def net(tmp_path: Path) -> Path:
    draw, made = np.random.default_rng(0), parser.parse_model(NET)
    made.graph.node[0].name = "first.0"  # a mark in patterns
    for name, shape in SHAPES.items():
        array = (draw.standard_normal(shape) / 16).astype(np.float32)
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(made, tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = torch.nn.Sequential(
            torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128)
        )
        self.head = torch.nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.softmax(self.enc(x), -1))


@pytest.fixture
def program(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    made = torch.export.export(Layers().eval(), (torch.zeros(4, 128),))
    torch.export.save(made, tmp_path / "net.pt2")
    return tmp_path / "net.pt2"


def with_formats(plan: Plan, **labels: str) -> Plan:
    """The plan with these formats, by the ends of names without marks; else fp32."""

    def label(node: str) -> str:
        (found,) = [v for k, v in labels.items() if node.replace(".", "_").endswith(k)] or [
            FP32.label
        ]
        return found

    decisions = (replace(d, format=Format.parse(label(d.node))) for d in plan.decisions)
    return replace(plan, decisions=tuple(decisions))


def planned(model: Path, **labels: str) -> Plan:
    """A plan with these formats for ops."""
    return with_formats(api.convert(model, None, "all:fp16", target="sm80").plan, **labels)


def functions(exported: Exported) -> Mapping[str, Any]:
    """What the exported module defines."""
    defined: dict[str, Any] = {}
    exec(exported.text, defined)
    return defined


def labels(plan: Plan) -> dict[str, str]:
    return {d.node: d.format.label for d in plan.counted}


def types_of(model: onnx.ModelProto) -> dict[str, str]:
    """The type of each node's result, by the node's name."""
    typed = onnx.shape_inference.infer_shapes(model).graph
    ports = (*typed.value_info, *typed.input, *typed.output)
    types = {v.name: v.type.tensor_type.elem_type for v in ports}
    return {n.name: TYPES[types[n.output[0]]] for n in typed.node if n.op_type != "Cast"}


MIXED: Final = {"first_0": "fp16", "act": "fp16", "third": "fp16"}


@pytest.mark.parametrize(
    ("tool", "package"),
    [("onnxconverter-common", "onnxconverter_common"), ("modelopt-autocast", "modelopt")],
)
def test_types_of_nodes_are_the_plan_s(tool: str, package: str, net: Path) -> None:
    pytest.importorskip(package, exc_type=ImportError)
    plan = planned(net, **MIXED)
    exported = export(plan, tool)
    assert exported.stated == {"fp16": 3}
    given = onnx.load(net) if package == "onnxconverter_common" else net
    found = types_of(functions(exported)["convert"](given))
    assert {name: found[name] for name in labels(plan)} == labels(plan)


def test_the_lists_are_what_the_plan_keeps(net: Path) -> None:
    plan = planned(net, second="fp16", third="bf16")
    exported = export(plan, "onnxconverter-common")
    text = exported.text.replace("from onnxconverter_common import float16", "")
    defined: dict[str, Any] = {"float16": SimpleNamespace(convert_float_to_float16=_words)}
    exec(text, defined)
    words = defined["convert"]("model")
    assert words["node_block_list"] == ["first.0", "act", "third", "end"]
    assert words["op_block_list"] == []
    (left,) = exported.left_out
    assert (left.node, left.format) == ("third", "bf16")
    assert "onnxconverter-common has fp16 alone" in left.text


def _words(*given: object, **words: object) -> dict[str, object]:
    return {"given": given, **words}


def test_autocast_reads_names_as_patterns(net: Path) -> None:
    exported = export(
        planned(net, second="bf16", third="bf16", act="fp16"), "modelopt-autocast"
    )
    assert exported.stated == {"bf16": 2}
    assert "    '^first\\\\.0$',\n" in exported.text
    assert "low_precision_type='bf16'" in exported.text
    assert [one.node for one in exported.left_out] == ["act"]


def test_figures_of_the_plan_stand_beside_what_is_left_out(net: Path) -> None:
    plan = api.convert(net, None, "auto:bf16,fp16", target="sm80").plan
    low = with_formats(plan, first_0="bf16", second="fp16")
    from finecast.rules.base import Reason

    reason = Reason(
        rule="decision",
        text="",
        permits=("bf16",),
        evidence={"fp32 us": 9.0, "bf16 us": 4.0, "error if bf16": 0.25},
    )
    decisions = tuple(
        replace(d, reasons=(reason,)) if d.format is Format.BF16 else d for d in low.decisions
    )
    exported = export(replace(low, decisions=decisions), "onnxconverter-common")
    (left,) = exported.left_out
    assert (left.saved_us, left.error) == (5.0, 0.25)
    assert left.text.endswith("in FP32 it takes 5 us more")


def batches(count: int = 4) -> Iterator[dict[str, NDArray[np.float32]]]:
    draw = np.random.default_rng(1)
    return iter([{"x": draw.standard_normal((8, 256), np.float32)} for _ in range(count)])


def test_onnx_runtime_quantizes_the_nodes_of_the_plan(net: Path, tmp_path: Path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    held = batches()

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> Any:
            return next(held, None)

    plan = planned(net, first_0="int8", third="int8")
    exported = export(plan, "onnxruntime")
    functions(exported)["quantize"](net, tmp_path / "low.onnx", Reader())
    graph = onnx.load(tmp_path / "low.onnx").graph
    makers = {name: node.op_type for node in graph.node for name in node.output}
    products = [n for n in graph.node if n.op_type in ("MatMul", "Gemm")]
    quantized = {
        n.name: all(makers.get(i) == "DequantizeLinear" for i in n.input[:2]) for n in products
    }
    assert quantized == {"first.0": True, "second": False, "third": True}
    assert exported.stated == {"int8": 2}
    assert "rounded for all that read it" in exported.notes[0]
    readers = {name: node.op_type for node in graph.node for name in node.input}
    assert [readers[n.output[0]] for n in products] == ["Relu", "QuantizeLinear", "Softmax"]


def test_onnx_runtime_rounds_results_where_the_plan_does(gated: Path) -> None:
    pytest.importorskip("onnxruntime.quantization")
    x = np.random.default_rng(1).standard_normal((2, 16, 8, 8), np.float32)
    np.savez(gated.with_name("x.npz"), x=x)

    def told(engine: str) -> tuple[list[str], str]:
        data = gated.with_name("x.npz")
        plan = api.convert(
            gated, None, "all:int8", engine=engine, data=data, verify=False
        ).plan
        exported = export(plan, "onnxruntime")
        return functions(exported)["RESULTS_IN_FP32"], " ".join(exported.notes)

    types, notes = told("onnxruntime")
    assert "Conv" not in types
    assert "results of all Conv nodes that are quantized are rounded" in notes
    types, notes = told("openvino")
    assert "Conv" in types
    assert "ONNX Runtime computes such convolutions in FP32" in notes


def test_nncf_compresses_the_weights_of_the_plan(net: Path) -> None:
    pytest.importorskip("nncf", exc_type=ImportError)
    plan = planned(net, first_0="int8_weights", third="int4_weights", second="int8_weights")
    # Groups are those of the plan's encodings.
    made = api.convert(net, None, "all:int4_weights", engine="openvino", verify=False).plan
    known = {d.node: d.encodings for d in made.decisions}
    decisions = tuple(
        replace(d, encodings=known[d.node]) if d.format is Format.INT4_WEIGHTS else d
        for d in plan.decisions
    )
    exported = export(replace(plan, decisions=decisions), "nncf")
    graph = functions(exported)["compress"](onnx.load(net)).graph
    bits = {n.name.removesuffix("_compressed_matmul"): _bits(n, graph) for n in graph.node}
    products = {n: bits[n] for n in ("first.0", "second", "third")}
    assert products == {"first.0": 8, "second": 8, "third": 4}


def _bits(node: onnx.NodeProto, graph: onnx.GraphProto) -> int:
    """The bits of the weights that a product reads."""
    if node.op_type == "MatMulNBits":
        return next(a.i for a in node.attribute if a.name == "bits")
    makers = {name: made for made in graph.node for name in made.output}
    made = makers.get(node.input[1]) if len(node.input) > 1 else None
    return 8 if made is not None and made.op_type == "DequantizeLinear" else 32


def test_nncf_quantizes_or_compresses(net: Path) -> None:
    exported = export(planned(net, first_0="int8", third="int8_weights"), "nncf")
    assert exported.stated == {"int8": 1}
    assert "no other format" in exported.left_out[0].text
    assert "'third'" in exported.text


GATED: Final = """<ir_version: 8, opset_import: ["" : 17]>
net (float[2, 16, 8, 8] x) => (float[2, 16, 64] y) {
  [stem] a = Conv <pads = [0, 0, 0, 0]> (x, w0)
  [pool] p = GlobalAveragePool (a)
  [squeeze] s = Conv (p, w1)
  [act] r = Relu (s)
  [excite] e = Conv (r, w2)
  [gate] g = Sigmoid (e)
  [scaled] m = Mul (a, g)
  [flat] f = Reshape (m, shape)
  [turned] t = Transpose <perm = [0, 2, 1]> (f)
  [scores] q = MatMul (f, t)
  [chances] c = Softmax (q)
  [mixed] y = MatMul (c, f)
}"""


@pytest.fixture
def gated(tmp_path: Path) -> Path:
    draw, made = np.random.default_rng(0), parser.parse_model(GATED)
    for name in ("w0", "w1", "w2"):
        array = draw.standard_normal((16, 16, 1, 1)).astype(np.float32) / 4
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    made.graph.initializer.append(numpy_helper.from_array(np.array([2, 16, 64]), "shape"))
    onnx.save(made, tmp_path / "gated.onnx")
    return tmp_path / "gated.onnx"


def test_nncf_quantizes_no_gates_and_no_products_of_a_softmax(gated: Path) -> None:
    products = ("stem", "squeeze", "excite", "scores", "mixed")
    plan = planned(gated, **dict.fromkeys(products, "int8"))
    exported = export(plan, "nncf")
    left = {one.node: one.why for one in exported.left_out}
    assert set(left) == {"squeeze", "excite", "mixed"}
    assert "of a gate" in left["squeeze"]
    assert "by a softmax" in left["mixed"]
    assert exported.stated == {"int8": 2}
    nncf = pytest.importorskip("nncf", exc_type=ImportError)
    x = np.random.default_rng(1).standard_normal((2, 16, 8, 8), np.float32)
    made = functions(exported)["compress"](onnx.load(gated), nncf.Dataset([{"x": x}] * 4))
    makers = {name: node.op_type for node in made.graph.node for name in node.output}
    read = {n.name: [makers.get(i) for i in n.input[:2]] for n in made.graph.node}
    quantized = {name: "DequantizeLinear" in read[name] for name in products}
    assert quantized == {name: name not in left for name in products}


TORCH: Final = {"enc_0/linear": "int8_weights", "head/linear_2": "int8_dynamic_row"}


def test_torchao_quantizes_the_layers_of_the_plan(program: Path) -> None:
    pytest.importorskip("torchao", exc_type=ImportError)
    module = Layers().eval()
    functions(export(planned(program, **TORCH), "torchao"))["quantize"](module)
    layers: list[torch.nn.Module] = [module.enc[0], module.enc[2], module.head]
    kinds = [type(layer.weight).__name__ for layer in layers]
    assert kinds == ["Int8Tensor", "Parameter", "Int8Tensor"]
    rounds = [getattr(layer.weight, "act_quant_kwargs", None) is not None for layer in layers]
    assert rounds == [False, False, True]


def test_torchao_has_blocks(program: Path) -> None:
    pytest.importorskip("torchao", exc_type=ImportError)
    plan = planned(program, **{"enc_0/linear": "mxfp8_e4m3", "head/linear_2": "mxfp4"})
    exported = export(plan, "torchao")
    module: Any = Layers().to(torch.bfloat16)
    exact = module.enc[0].weight.detach().float().numpy()
    functions(exported)["quantize"](module)
    blocks = Format.MXFP8_E4M3.blocks
    assert blocks is not None
    got = module.enc[0].weight.dequantize(torch.float32).detach().numpy()
    assert np.array_equal(got, blocks.round(exact, axis=1))
    assert type(module.head.weight).__name__ == "MXTensor"
    assert any("on a GPU" in note for note in exported.notes)


def test_recipes_name_modules(program: Path) -> None:
    plan = planned(program, **TORCH, **{"enc_2/linear_1": "nvfp4", "softmax": "bf16"})
    exported = export(plan, "llm-compressor")
    content = json.loads(exported.text.partition("\n")[2])["quantization_stage"]
    modifier = content["quantization_modifiers"]["QuantizationModifier"]
    groups = modifier["config_groups"].values()
    found = {
        t: (g["weights"]["num_bits"], g["input_activations"])
        for g in groups
        for t in g["targets"]
    }
    assert {name: bits for name, (bits, _) in found.items()} == {
        "re:^enc\\.0$": 8,
        "re:^enc\\.2$": 4,
        "re:^head$": 8,
    }
    assert found["re:^enc\\.0$"][1] is None
    assert [one.node for one in exported.left_out] == ["softmax"]
    compressed = pytest.importorskip("compressed_tensors.quantization", exc_type=ImportError)
    module: Any = Layers()
    compressed.apply_quantization_config(module, compressed.QuantizationConfig(**modifier))
    schemes = [
        layer.quantization_scheme for layer in (module.enc[0], module.enc[2], module.head)
    ]
    assert [s.weights.num_bits for s in schemes] == [8, 4, 8]
    assert [s.input_activations is None for s in schemes] == [True, False, False]


def test_fp8_is_by_row_in_both(program: Path) -> None:
    plan = planned(program, **{"head/linear_2": "fp8_dynamic_row"})
    recipe = json.loads(export(plan, "llm-compressor").text.partition("\n")[2])
    modifier = recipe["quantization_stage"]["quantization_modifiers"]["QuantizationModifier"]
    (group,) = modifier["config_groups"].values()
    assert group["targets"] == ["re:^head$"]
    kinds = [group[k] for k in ("weights", "input_activations")]
    assert [(k["type"], k["strategy"], k["dynamic"]) for k in kinds] == [
        ("float", "channel", False),
        ("float", "token", True),
    ]
    exported = export(plan, "torchao")
    assert "from torchao.quantization import PerRow\n" in exported.text
    assert exported.stated == {"fp8_dynamic_row": 1}
    torchao = pytest.importorskip("torchao.quantization", exc_type=ImportError)
    config = functions(exported)["CONFIG"].fqn_to_config["head"]
    assert isinstance(config, torchao.Float8DynamicActivationFloat8WeightConfig)


def test_core_ml_selects_the_ops_of_the_plan(program: Path) -> None:
    coreml = pytest.importorskip("coremltools", exc_type=ImportError)
    plan = planned(
        program, **{"enc_0/linear": "fp16", "softmax": "fp16", "head/linear_2": "fp16"}
    )
    traced = torch.export.load(program).run_decompositions({})
    options = {"minimum_deployment_target": coreml.target.iOS16, "skip_model_load": True}
    model = functions(export(plan, "coremltools"))["convert"](traced, **options)
    seen: Counter[str] = Counter()
    found: dict[tuple[str, int], str] = {}
    for op in model._mil_program.functions["main"].operations:
        found[op.op_type, seen[op.op_type]] = "fp16" if op.name.endswith("fp16") else "fp32"
        seen[op.op_type] += 1
    kinds: Counter[str] = Counter()
    for decision in plan.counted:
        place = decision.op, kinds[decision.op]
        kinds[decision.op] += 1
        assert found[place] == decision.format.label, decision.node


def test_core_ml_s_selector_counts_ops(program: Path) -> None:
    text = export(planned(program, softmax="fp16"), "coremltools").text
    defined: dict[str, Any] = {}
    exec(text.replace("import coremltools as ct", ""), defined)
    selector: Any = defined["Selector"]()

    def low(kind: str, name: str) -> Any:
        return selector(SimpleNamespace(op_type=kind, name=name))

    assert low("softmax", "s") is low("softmax", "s") is True
    assert low("linear", "a") is False
    with pytest.raises(ValueError, match=r"other numbers of ops.*linear"):
        selector.check()


@pytest.mark.parametrize(
    ("labels_by_op", "flags", "left", "more"),
    [
        (dict.fromkeys(("first_0", "second", "third"), "bf16"), "matmult", [], []),
        (dict.fromkeys(("first_0", "second", "third", "act", "end"), "bf16"), "all", [], []),
        ({"first_0": "bf16", "second": "bf16"}, "matmult", [], ["third"]),
        ({"first_0": "bf16"}, "none", ["first.0"], []),
        ({"first_0": "bf16", "second": "bf16", "third": "mxfp4"}, "matmult", [], ["third"]),
    ],
)
def test_neuron_gets_the_nearest_rung(
    labels_by_op: dict[str, str], flags: str, left: list[str], more: list[str], net: Path
) -> None:
    exported = export(planned(net, **labels_by_op), "neuron")
    assert exported.text.split()[:2] == ["--auto-cast", flags]
    assert [one.node for one in exported.left_out] == left
    assert [note.partition(" ")[0] for note in exported.notes] == more
    assert all(note.endswith("casts it to bf16") for note in exported.notes)


def test_models_of_other_libraries_are_refused(net: Path, program: Path) -> None:
    with pytest.raises(UsageError, match=r"torchao reads models of PyTorch"):
        export(planned(net, third="int8_weights"), "torchao")
    with pytest.raises(UsageError, match=r"nncf reads models of ONNX"):
        export(planned(program, softmax="int8"), "nncf")
    with pytest.raises(UsageError, match=r"onnxruntime can express nothing.*third is fp16"):
        export(planned(net, third="fp16"), "onnxruntime")
    with pytest.raises(UsageError, match="the plan has no op in reduced precision"):
        export(planned(net), "neuron")
    with pytest.raises(UsageError, match=r"unknown tool 'torch-ao'"):
        export(planned(net), "torch-ao")


def test_the_verb_writes_a_module(finecast: Any, net: Path, tmp_path: Path) -> None:
    plan, out = tmp_path / "low.plan.json", tmp_path / "to_fp16.py"
    plan.write_text(planned(net, third="fp16", second="bf16").to_json())
    words = ["export", plan, "--to", "onnxconverter-common"]
    done = finecast(*words, "-o", out)
    assert done.code == 0, done.err
    assert "second is bf16 in the plan: onnxconverter-common has fp16 alone" in done.err
    compile(out.read_text(), str(out), "exec")
    assert finecast(*words, "-o", out).code != 0
    printed = finecast(*words)
    assert '"""Converts an ONNX model to fp16, node by node.\n' in printed.out
    content = finecast(*words, "--json").json
    assert content["stated"] == {"fp16": 1}
    assert content["left_out"][0]["node"] == "second"


def test_each_tool_has_a_module() -> None:
    folder = Path(__file__).parents[1] / "src/finecast_export/tools"
    modules = {path.stem for path in folder.glob("[!_]*.py")}
    assert modules == set(TOOLS.values())

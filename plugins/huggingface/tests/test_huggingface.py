"""Causal language models of transformers: exported with their cache, tuned, generating.

They run in the environment of the zoo, which has transformers: ``make zoo-sample``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import finecast
from finecast import get_engine
from finecast.engines.base import Session
from finecast.errors import UsageError, UserCodeError
from tests import decoder

pytest.importorskip("transformers")
torch: Any = pytest.importorskip("torch")

from zoo.libraries import prepare  # noqa: E402  # torchvision is made importable first

prepare()

import transformers  # noqa: E402  # pyright: ignore[reportMissingImports]

from finecast_huggingface import language_models as huggingface  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and the exporter

_SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
IDS = torch.arange(10).reshape(2, 5)


def llama(**config: Any) -> Any:
    """Random weights, large enough that its choices are not nearly equal."""
    torch.manual_seed(0)
    of: Any = transformers
    sizes = {
        **_SIZES,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": None,
    }
    made = of.LlamaConfig(
        **sizes, num_hidden_layers=2, eos_token_id=None, initializer_range=0.2, **config
    )
    return of.LlamaForCausalLM(made).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.fixture(scope="module")
def exported(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return huggingface.export(model, tmp_path_factory.mktemp("export") / "model.onnx")


def generated(model: Any, **options: Any) -> list[list[int]]:
    stated = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(
        input_ids=IDS, attention_mask=torch.ones_like(IDS), **stated
    ).tolist()


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_generate_gives_the_models_own_tokens(model: Any, exported: Path, engine: str) -> None:
    made = huggingface.generator(model, get_engine(engine).load(exported))
    assert generated(made) == generated(model)
    assert generated(made, num_beams=2) == generated(model, num_beams=2)
    assert "forward" not in vars(model)


def test_a_cache_in_bf16_is_handed_from_call_to_call(model: Any, exported: Path) -> None:
    policy = finecast.Policy("all:bf16", io_state=True)
    low = finecast.convert(exported, exported.with_name("low.onnx"), policy=policy)
    session = get_engine("openvino").load(exported.with_name("low.onnx"))
    caches = [*session.inputs[3:], *session.outputs[1:]]
    assert {spec.dtype for spec in caches} == {"bf16"}
    assert low.plan.io.keys() == {spec.name for spec in caches}
    made = huggingface.generator(model, session)
    agree = np.equal(generated(made), generated(model)).mean()
    assert agree > 0.8


def test_padding_on_the_left_moves_no_position(model: Any, exported: Path) -> None:
    made = huggingface.generator(model, get_engine("onnxruntime").load(exported))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    asked = {"input_ids": IDS, "attention_mask": mask, "max_new_tokens": 4, "pad_token_id": 0}
    mine, own = (one.generate(**asked, do_sample=False) for one in (made, model))
    assert mine.tolist() == own.tolist()


def test_inputs_have_the_names_and_sizes_that_others_expect(exported: Path) -> None:
    graph = onnx.load(exported).graph
    shapes = {
        value.name: [
            dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim
        ]
        for value in graph.input
    }
    assert shapes["input_ids"] == shapes["position_ids"] == ["batch", "length"]
    assert shapes["attention_mask"] == ["batch", "past + length"]
    assert shapes["past_key_values.1.value"] == ["batch", 2, "past", 16]
    assert [value.name for value in graph.output][:2] == ["logits", "present.0.key"]


def test_a_call_gives_what_the_models_own_gives(model: Any, exported: Path) -> None:
    made = huggingface.generator(model, get_engine("onnxruntime").load(exported))
    with torch.no_grad():
        for asked in (
            {"labels": IDS},
            {"logits_to_keep": 1},
            {"logits_to_keep": torch.tensor([0, 2])},
            {"use_cache": False, "output_attentions": False},
        ):
            mine, own = made(IDS, **asked), model(IDS, **asked)
            assert mine.keys() == own.keys()
            assert mine.logits.shape == own.logits.shape
            torch.testing.assert_close(mine.logits, own.logits, rtol=1e-3, atol=1e-3)
            if own.loss is not None:
                torch.testing.assert_close(mine.loss, own.loss, rtol=1e-3, atol=1e-3)
        assert len(made(IDS, labels=IDS, return_dict=False)) == 3


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (
            {"input_ids": IDS, "output_hidden_states": True},
            "does not take output_hidden_states",
        ),
        ({"inputs_embeds": torch.zeros((1, 2, 64))}, "take inputs_embeds"),
        ({}, "none are given.*give input_ids"),
    ],
)
def test_a_call_for_more_is_refused_by_name(
    model: Any, exported: Path, asked: dict[str, Any], named: str
) -> None:
    made = huggingface.generator(model, get_engine("onnxruntime").load(exported))
    with pytest.raises(UsageError, match=named):
        made(**asked)


def test_a_tuned_model_generates(model: Any, tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 64, (4, 65))
    result = huggingface.tune(
        model,
        tmp_path / "tuned.onnx",
        data=data,
        length=16,
        decode_steps=2,
        engine="onnxruntime",
        tolerance=0.5,
        min_speedup=1.0,
        progress=False,
    )
    assert result.metric == "kld"
    assert isinstance(result.model, type(model))
    assert (result.model is model) == (not result.improved)
    assert len(generated(result.model)[0]) == 13


def test_a_tuned_model_is_saved_and_loaded_as_a_folder(model: Any, tmp_path: Path) -> None:
    """The weights of fp32 were written, without a word."""
    result = huggingface.tune(
        model,
        data=np.random.default_rng(0).integers(0, 64, (4, 65)),
        length=16,
        decode_steps=2,
        engine="onnxruntime",
        policy="all:int8_dynamic",
        objective="size",
        tolerance=0.5,
        progress=False,
    )
    assert result.improved
    result.model.save_pretrained(tmp_path / "saved")
    files = {"config.json", "generation_config.json", "model.onnx", "model.plan.json"}
    assert {file.name for file in (tmp_path / "saved").iterdir()} == files
    with pytest.raises(UsageError, match="output exists"):
        result.model.save_pretrained(tmp_path / "saved")
    again = huggingface.from_pretrained(tmp_path / "saved")
    assert isinstance(again, type(model))
    assert generated(again) == generated(result.model)
    with pytest.raises(UsageError, match="is not written from there"):
        again.save_pretrained(tmp_path / "again")
    with pytest.raises(UsageError, match=r"model\.onnx is missing"):
        huggingface.from_pretrained(tmp_path)


def test_generate_is_tried_before_the_search(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise UsageError("the tuned model does not take cache")

    monkeypatch.setattr(huggingface, "_forward", refuse)
    monkeypatch.setattr(huggingface.api, "tune", None)
    with pytest.raises(UsageError, match="does not take cache"):
        huggingface.tune(model, data=np.ones((2, 9), int), length=4, engine="onnxruntime")


def test_a_generate_that_fails_names_the_versions_that_are_tested(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise TypeError("an unexpected argument")

    monkeypatch.setattr(huggingface, "_forward", fail)
    monkeypatch.setattr(huggingface.api, "tune", None)
    monkeypatch.setattr(huggingface.importlib.metadata, "version", lambda _: "9.1.0")
    with pytest.raises(UserCodeError, match=r"transformers 9\.1\.0 cannot run") as caught:
        huggingface.tune(model, data=np.ones((2, 9), int), length=4, engine="onnxruntime")
    assert "install transformers 5.23 and 5.24, which are tested" in str(caught.value)


def mixture() -> Any:
    torch.manual_seed(0)
    of: Any = transformers
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    ends = {"bos_token_id": None, "eos_token_id": None}
    return of.MixtralForCausalLM(of.MixtralConfig(**_SIZES, **experts, **heads, **ends)).eval()


def test_a_mixture_of_experts_is_exported_by_its_batched_products(tmp_path: Path) -> None:
    """PyTorch's exporter has no operator for transformers' grouped ones."""
    model = mixture()
    own = model.config._experts_implementation
    path = huggingface.export(model, tmp_path / "model.onnx")
    assert model.config._experts_implementation == own
    made = huggingface.generator(model, get_engine("onnxruntime").load(path))
    assert generated(made) == generated(model)


def test_what_the_exporter_cannot_write_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "_EXPERTS", "grouped_mm")
    with pytest.raises(UsageError, match="exporter does not write the model as ONNX: No ONNX"):
        huggingface.export(mixture(), tmp_path / "model.onnx")


class Letters:
    """A tokenizer of lower-case letters."""

    eos_token_id = 26

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("a") for letter in text]}


def test_texts_are_joined_and_cut() -> None:
    found = huggingface.tokens(["abc", "de"], Letters(), 3)
    assert found["input_ids"].tolist() == [[0, 1, 2], [26, 3, 4]]
    assert found["label"].tolist() == [[1, 2, 26], [3, 4, 26]]
    rows = [{"text": "abc"}, {"text": "de"}]  # of a table
    again = huggingface.tokens(rows, Letters(), 3)
    assert again["label"].tolist() == found["label"].tolist()
    assert found["position_ids"].tolist() == [[0, 1, 2]] * 2
    assert found["attention_mask"].all()


@pytest.mark.parametrize(
    "data",
    [
        np.arange(7)[None],
        torch.arange(7)[None],
        torch.arange(7),
        [[0, 1, 2, 3], np.array([4, 5, 6], np.uint8)],
        iter([torch.tensor([0, 1, 2]), (3, 4, 5, 6)]),
        {"input_ids": [[0, 1, 2, 3], [4, 5, 6]], "attention_mask": [[1] * 4, [1] * 3]},
        [
            {"input_ids": torch.arange(4)[None], "attention_mask": torch.ones(1, 4)},
            {"input_ids": [0, 4, 5, 6], "attention_mask": [0, 1, 1, 1]},
        ],
    ],
)
def test_tokens_are_taken_in_any_form(data: Any) -> None:
    found = huggingface.tokens(data, length=3)
    assert found["input_ids"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["label"].tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"data": "abc"}, r"a str is given.*as \[text\]"),
        ({"data": None}, "a NoneType is given"),
        ({"data": {"input": [[1, 2]]}}, "a dict is given"),
        ({"data": [{"input": [1, 2]}]}, "the tokens of a text are object"),
        ({"data": np.full((2, 9), 1.7)}, "the tokens of a text are float64"),
        ({"data": np.full(9, np.nan)}, "the tokens of a text are float64"),
        ({"data": np.array(["abc"])}, "texts are given.*give tokenizer="),
        ({"data": [b"abc"]}, "the tokens of a text are bytes"),
        ({"data": np.zeros((0, 0), int)}, "the texts have 0 tokens"),
        ({"data": ["abc"], "tokenizer": "gpt2"}, "a str makes no tokens"),
        *(
            ({"data": [[1] * 9], "length": length}, f"a piece of text of {length!r} tokens")
            for length in (0, -1)
        ),
        *(
            ({"data": [[1] * 9], "length": length}, "a whole number is expected for length")
            for length in (1.5, "128", True)
        ),
    ],
)
def test_what_is_no_text_is_refused(asked: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        huggingface.tokens(**asked)


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"model": "gpt2"}, r"a str is no causal.*from_pretrained"),
        ({"length": 1}, "of 1 tokens.*from 2 on"),
        ({"metric": "kldd"}, "unknown metric 'kldd'.*did you mean kld"),
        ({"formats": "int8"}, "unknown argument of tune 'formats'"),
        ({"output": "nowhere/x.onnx"}, "folder does not exist"),
    ],
)
def test_what_is_cheap_is_checked_before_an_export(
    model: Any, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], match: str
) -> None:
    monkeypatch.setattr(huggingface, "export", None)
    data = np.ones((2, 9), int)
    stated: dict[str, Any] = {"model": model, "data": data, "length": 4, **asked}
    with pytest.raises(UsageError, match=match):
        huggingface.tune(**stated)


def test_refusals_say_what_to_give(model: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give tokenizer="):
        huggingface.tokens(["abc"])
    with pytest.raises(UsageError, match="5 tokens, and a piece takes 128"):
        huggingface.tokens(np.zeros((1, 5), int))
    with pytest.raises(UsageError, match="folder does not exist"):
        huggingface.export(model, tmp_path / "nowhere" / "m.onnx")
    with pytest.raises(UsageError, match="a str is no causal"):
        huggingface.export("gpt2", tmp_path / "m.onnx")
    with pytest.raises(UsageError, match="training mode"):
        huggingface.export(llama().train(), tmp_path / "m.onnx")
    of: Any = transformers
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    windowed = of.MistralConfig(**_SIZES, **heads, num_hidden_layers=1, sliding_window=4)
    with pytest.raises(UsageError, match=r"DynamicSlidingWindowLayer.*Optimum"):
        huggingface.export(of.MistralForCausalLM(windowed).eval(), tmp_path / "m.onnx")


# Loops of other packages: tokens equal those of a loop of ours. They run where the packages
# are installed: pip install openvino-genai onnxruntime-genai optimum-intel

PROMPT, NEW, END = [0, 1, 2, 3, 4], 12, 62


def own_tokens(session: Session) -> list[int]:
    """The tokens that a session chooses after ``PROMPT``, one a call."""
    tokens, made, past = PROMPT, list[int](), 0
    state = {s.name: np.zeros((1, 2, 0, 16), np.float32) for s in session.inputs}
    state = {name: held for name, held in state.items() if name.startswith("past")}
    session.reset()
    for _ in range(NEW):
        end = past + len(tokens)
        feeds = {
            "input_ids": np.array([tokens]),
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(past, end)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        taken = {s.name for s in session.inputs}
        found = session.step({n: a for n, a in (feeds | state).items() if n in taken})
        state = {n: found[n.replace("past_key_values", "present")] for n in state}
        tokens, past = [int(found["logits"][0, -1].argmax())], end
        made += tokens
    return made


@pytest.fixture(scope="module")
def stateful(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A low model as IR that keeps its cache, in a folder of its own."""
    import openvino

    folder = tmp_path_factory.mktemp("stateful")
    model = openvino.Core().read_model(exported)
    decoder.example("make_stateful").keep_cache(model)
    openvino.save_model(model, folder / "fp32.xml", compress_to_fp16=False)
    path = folder / "openvino_model.xml"
    finecast.convert(folder / "fp32.xml", path, policy="all:int8_weights,bf16")
    return path


def test_optimum_intel_generates_our_tokens(model: Any, stateful: Path) -> None:
    intel = pytest.importorskip("optimum.intel")
    model.config.save_pretrained(stateful.parent)
    loaded = intel.OVModelForCausalLM.from_pretrained(stateful.parent)
    ids = torch.tensor([PROMPT])
    found = loaded.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    own = own_tokens(get_engine("openvino").load(stateful))
    assert found[0, len(PROMPT) :].tolist() == own


def test_openvino_genai_generates_our_tokens(stateful: Path, tmp_path: Path) -> None:
    genai = pytest.importorskip("openvino_genai")
    tokenizers = pytest.importorskip("openvino_tokenizers")
    import openvino
    from tokenizers import Tokenizer, models  # pyright: ignore[reportMissingImports]

    words = {chr(97 + n // 26) + chr(97 + n % 26): n for n in range(63)} | {"[UNK]": 63}
    made: Any = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")
    parts = tokenizers.convert_tokenizer(fast, with_detokenizer=True)
    for name, part in zip(("tokenizer", "detokenizer"), parts, strict=True):
        openvino.save_model(part, tmp_path / f"openvino_{name}.xml")
    for suffix in (".xml", ".bin"):
        shutil.copy(stateful.with_suffix(suffix), tmp_path)
    asked = genai.GenerationConfig(max_new_tokens=NEW, ignore_eos=True, do_sample=False)
    asked.set_eos_token_id(END)
    given = (openvino.Tensor(np.array(of, np.int64)) for of in ([PROMPT], [[1] * len(PROMPT)]))
    pipeline = genai.LLMPipeline(tmp_path, "CPU")
    found = pipeline.generate(genai.TokenizedInputs(*given), asked)
    assert list(found.tokens[0]) == own_tokens(get_engine("openvino").load(stateful))


@pytest.mark.parametrize("policy", ["all:int8_dynamic", "all:fp16"])
def test_onnxruntime_genai_generates_our_tokens(
    exported: Path, tmp_path: Path, policy: str
) -> None:
    genai = pytest.importorskip("onnxruntime_genai")
    path, end = tmp_path / "model.onnx", len(PROMPT) + NEW
    asked = finecast.Policy(policy, io_state=True)
    finecast.convert(exported, path, policy=asked, engine="onnxruntime")
    described = {
        "filename": path.name,
        "session_options": {"provider_options": []},
        "head_size": 16,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "inputs": {
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    model = {"type": "llama", "vocab_size": 64, "context_length": end, "decoder": described}
    model |= {"bos_token_id": 61, "eos_token_id": END, "pad_token_id": 63}
    search = {"max_length": end, "min_length": end, "past_present_share_buffer": False}
    config = json.dumps({"model": model, "search": search})
    (tmp_path / "genai_config.json").write_text(config)
    loaded = genai.Model(str(tmp_path))
    generator = genai.Generator(loaded, genai.GeneratorParams(loaded))
    generator.append_tokens(np.array([PROMPT], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    found = [int(token) for token in generator.get_sequence(0)]
    assert found[len(PROMPT) :] == own_tokens(get_engine("onnxruntime").load(path))

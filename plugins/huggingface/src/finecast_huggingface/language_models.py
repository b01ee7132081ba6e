"""finecast for causal language models of Hugging Face's transformers: ``export`` and ``tune``.

For example::

    result = finecast.huggingface.tune(model, "tuned.onnx", data=texts, tokenizer=tokenizer)
    result.model.generate(**tokenizer("To be", return_tensors="pt"))

A model is exported to ONNX with its cache as inputs and outputs, in the names that Optimum and
ONNX Runtime's generate API have: ``input_ids``, ``attention_mask``, ``position_ids``,
``past_key_values.N.key`` to ``logits``, ``present.N.key``. That file is tuned as any other, on
texts that are decoded token by token.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
import inspect
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Final, TypeAlias, Unpack, cast

import numpy as np

from finecast import Plan, Policy, Result, api, get_engine
from finecast.arguments import checked
from finecast.calls import checks
from finecast.data import to_array
from finecast.engines import DTYPES, Array, Session, candidates
from finecast.errors import EngineError, UsageError, first_line
from finecast.files import check_writable, write_text, writing
from finecast.keywords import NamedKeywords, TuneKeywords
from finecast.naming import kind_of
from finecast.rules import DEFAULT_POLICY
from finecast.usercode import guarded

if (
    importlib.util.find_spec("transformers") is None
    or importlib.util.find_spec("torch") is None
):
    raise EngineError(
        "finecast.huggingface needs transformers and PyTorch",
        fix="pip install transformers torch onnxscript",
    )

__all__ = ["export", "from_pretrained", "generator", "tokens", "tune"]

Data: TypeAlias = (
    "Array | Iterable[str] | Iterable[Sequence[int]] | Iterable[Mapping[str, Any]]"
)
"""Texts, their tokens, or rows that have one of them as ``text`` or ``input_ids``."""

_CACHED: Final = ("key", "value")
_IDS: Final = "input_ids"
_OPSET: Final = 18
_LENGTH: Final = 128
"""Tokens of a piece of text, unless the user says another number."""
_STEPS: Final = 16
"""Of these, tokens that are decoded one by one."""
_TEXTS: Final = 8
"""Pieces of a call."""
_KNOWN: Final = ("5.23", "5.24")
"""Versions of transformers whose ``generate`` is tested with tuned models."""
_FILE: Final = "model.onnx"
"""The exported model in a folder, as Optimum names it."""
_EXPERTS: Final = "batched_mm"
"""Of transformers' forms of a mixture of experts, the one that ONNX has operators for."""
_NEEDLESS: Final = ("use_cache", "return_dict", "cache_position")
"""Arguments of a call that are no wish for more than it gives."""


class TuneTextKeywords(TuneKeywords, NamedKeywords, total=False):
    """Of ``tune``, beside its own."""

    policy: Policy | str


@checked(*api.OF_TUNING)
def tune(
    model: Any,
    output: str | Path | None = None,
    *,
    data: Data,
    tokenizer: Any = None,
    length: int = _LENGTH,
    **options: Unpack[TuneTextKeywords],
) -> Result:
    """Find the fastest mixed precision of a causal language model; its ``generate`` runs it.

    Laws: ``model`` is unchanged. The result's ``model`` is of the same class, with the same
    ``generate``; its calls run the tuned ONNX model. Where nothing helps it is ``model``.
    ``result.model.save_pretrained(FOLDER)`` writes the ONNX model beside ``config.json``. The
    type of the cache is decided like those of ops, unless ``policy`` is a ``Policy``.

    Args:
        model: A causal language model of transformers, in fp32, of up to 2 GB. To tune a
            larger one, ``export`` it, and tune the file.
        output: Where the tuned ONNX model goes; None for nowhere.
        data: Texts, or their tokens; see ``tokens``.
        tokenizer: What makes tokens of texts.
        length: Tokens of a piece of text, 2 or more.
        options: Those of ``finecast.tune``. By default the metric is ``kld``, the mean
            divergence from fp32's choices, of which ``tolerance`` is the most that may be lost
            in nats a token; the last 16 tokens of each piece are decoded one by one.

    Raises:
        FinecastError: As ``finecast.tune``; or if there are too few tokens, or the model's
            cache is of a kind that is no plain pair of keys and values for each layer.
    """
    onnx: Any = importlib.import_module("onnx")
    _check_model(model)
    _check_length(length, least=2)  # one token is given before one is decoded
    pieces = tokens(data, tokenizer, length)
    steps = min(_STEPS, length - 1)
    stated: dict[str, Any] = {"metric": "kld", "decode_steps": steps, "batch": _TEXTS}
    stated |= options
    policy = stated.get("policy", DEFAULT_POLICY)
    if isinstance(policy, str) or policy is DEFAULT_POLICY:
        stated["policy"] = replace(Policy.of(policy), io_state=True)
    if stated.get("evaluate") is not None:
        del stated["metric"], stated["decode_steps"]
    written, _, _ = api.asked(output, data=pieces, **stated)  # an export takes long
    if written.path is not None:
        check_writable(written.path, force=written.force)
    with tempfile.TemporaryDirectory() as folder:
        given = onnx.load(export(model, Path(folder) / "model.onnx"))
    _check_generation(model, given, pieces["input_ids"], stated.get("engine"))
    result = api.tune(given, output, data=pieces, **stated)
    if not result.improved:
        return replace(result, model=model)
    session = get_engine(result.plan.engine).load(result.model.SerializeToString())
    return replace(result, model=generator(model, session, partial(_write, result)))


def _write(result: Result, path: Path) -> None:
    """Write the tuned model and its plan, which has the engine."""
    result.save(path)
    write_text(path.with_suffix(".plan.json"), result.plan.to_json())


def _check_generation(model: Any, exported: Any, ids: Array, engine: str | None) -> None:
    """Raise UserCodeError unless ``generate`` runs the exported model: a search takes long.

    Args:
        model: The model of transformers.
        exported: Its ModelProto.
        ids: Tokens, of which the first two are continued.
        engine: The engine that was asked for.
    """
    import torch

    session = candidates(engine)[0].load(exported.SerializeToString())
    start = torch.from_numpy(ids[:1, :2].copy())
    version, known = importlib.metadata.version("transformers"), " and ".join(_KNOWN)
    install = f"install transformers {known}, which are tested, or "
    tested = ".".join(version.split(".")[:2]) in _KNOWN
    with guarded(
        f"generate of transformers {version} cannot run the exported model",
        where=type(model).__name__,
        fix=f"{'' if tested else install}export() the model, and tune the file",
    ):
        made = generator(model, session)
        made.generate(
            input_ids=start,
            attention_mask=torch.ones_like(start),
            max_new_tokens=2,
            do_sample=False,
        )


@checks
def tokens(data: Data, tokenizer: Any = None, length: int = _LENGTH) -> dict[str, Array]:
    """Inputs and labels of pieces of text that are ``length`` tokens long.

    Texts are joined, with the end-of-text token between them, and then cut. So no position is
    padding; what is left at the end is dropped.

    Args:
        data: Texts, or the tokens of each: lists, arrays or tensors of whole numbers; or rows
            with ``text`` or ``input_ids``, as of a table, a ``DataLoader`` or a tokenizer.
        tokenizer: Makes tokens of texts: ``tokenizer(text)["input_ids"]``.
        length: Tokens of a piece.

    Raises:
        UsageError: If the data are neither, if texts are given without a tokenizer, or if
            they have fewer tokens than a piece.
    """
    _check_length(length)
    joined = np.concatenate([np.empty(0, np.int64), *_tokenized(data, tokenizer)])
    count = (len(joined) - 1) // length
    if count < 1:
        raise UsageError(
            f"the texts have {len(joined)} tokens, and a piece takes {length} and one more",
            fix="give more text, or a smaller length=",
        )
    shape = (count, length)
    return {
        "input_ids": joined[: count * length].reshape(shape),
        "attention_mask": np.ones(shape, np.int64),
        "position_ids": np.broadcast_to(np.arange(length), shape).copy(),
        "label": joined[1 : count * length + 1].reshape(shape),
    }


def _check_length(length: Any, least: int = 1) -> None:
    """Raise UsageError unless it is a whole number of tokens."""
    if isinstance(length, bool) or not isinstance(length, Integral) or length < least:
        raise UsageError(
            f"a piece of text of {length!r} tokens is none to tune on",
            where="length",
            fix=f"give a whole number from {least} on, as {_LENGTH}",
        )


def _tokenized(data: Any, tokenizer: Any) -> Iterator[Array]:
    """The tokens of each text of ``data``; raises UsageError as ``tokens``."""
    if isinstance(data, Mapping) and _IDS in data:  # what a tokenizer gives for many texts
        kinds = [_IDS, *({"attention_mask"} & {*data})]
        columns = zip(*(data[kind] for kind in kinds), strict=True)
        data = [dict(zip(kinds, row, strict=True)) for row in columns]
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable):
        raise UsageError(
            f"{kind_of(data)} is given, and no texts",
            where="data",
            fix="give a list of texts, as [text], or of the tokens of each",
        )
    if tokenizer is not None and not callable(tokenizer):
        raise UsageError(
            f"{kind_of(tokenizer)} makes no tokens of a text",
            where="tokenizer",
            fix="give an object: transformers.AutoTokenizer.from_pretrained(NAME)",
        )
    end = getattr(tokenizer, "eos_token_id", None)
    for item in cast("Iterable[Any]", data):
        text = _of_row(item)
        if not isinstance(text, str):
            yield _whole(text)
            continue
        if tokenizer is None:
            raise UsageError(
                "texts are given, and nothing that makes tokens of them",
                where="data",
                fix="give tokenizer=",
            )
        made: Any = tokenizer(text)
        yield _whole(made["input_ids"])
        if end is not None:
            yield np.array([end])


def _of_row(item: Any) -> Any:
    """The text or the tokens of a row of a table, or of what a tokenizer gives, or ``item``.

    Tokens that the mask leaves out fill up a batch, and are no text.
    """
    if not isinstance(item, Mapping):
        return item
    row = cast("Mapping[str, Any]", item)
    if _IDS not in row:
        return row.get("text", row)
    given, mask = row[_IDS], row.get("attention_mask")
    return given if mask is None else to_array(given)[to_array(mask).astype(bool)]


def _whole(given: Any) -> Array:
    """The tokens of a text, in one row; raises UsageError if they are no whole numbers."""
    token_ids = to_array(given)
    if token_ids.size and token_ids.dtype.kind not in "iu":
        raise UsageError(
            f"the tokens of a text are {token_ids.dtype.name}, and no whole numbers",
            where="data",
            fix="give texts and tokenizer=, or the tokens that it makes of them",
        )
    return token_ids.astype(np.int64).ravel()


@checks
def export(model: Any, path: str | Path) -> Path:
    """Write a causal language model as ONNX, with its cache as inputs and outputs.

    Texts, new tokens and cached tokens may be of any number, of cached ones none too.

    Args:
        model: The model, in evaluation mode.
        path: Where the file goes; it is replaced. Weights are in the file.

    Raises:
        UsageError: If it is no such model or in training mode, if its cache is of a kind that
            is no plain pair of keys and values for each layer, or if no file can be put there.
    """
    import torch

    _check_model(model)
    given: Any = path
    if not isinstance(given, str | Path):
        raise UsageError(f"{kind_of(path)} is no path", where="path", fix="name a file")
    check_writable(Path(path), force=True)
    flat, past = _flattened(model)
    ids = torch.zeros((2, 3), dtype=torch.int64)  # no size is that of another axis
    cached = past[0].shape[2]
    mask = torch.ones((2, 3 + cached), dtype=torch.int64)
    positions = torch.arange(cached, cached + 3)[None].expand(2, 3).contiguous()
    free = torch.export.Dim.DYNAMIC
    layers = range(len(past) // 2)
    names = [
        [f"{of}.{i}.{kind}" for i in layers for kind in _CACHED]
        for of in ("past_key_values", "present")
    ]
    text = {0: free, 1: free}
    with (
        torch.no_grad(),
        warnings.catch_warnings(),
        _exportable_experts(model),
        _explained(type(model).__name__),
    ):
        warnings.simplefilter("ignore")  # of the exporter's own modules
        program = torch.onnx.export(
            flat,
            (ids, mask, positions, past),
            input_names=["input_ids", "attention_mask", "position_ids", *names[0]],
            output_names=["logits", *names[1]],
            opset_version=_OPSET,
            dynamo=True,
            dynamic_shapes=(text, text, text, [{0: free, 2: free}] * len(past)),
            verbose=False,
        )
        assert program is not None
    for value in program.model.graph.inputs:
        shape: Any = value.shape
        shape[0] = "batch"
        shape[-2 if len(shape) > 2 else 1] = _positions(value.name or "")
    with writing(path):
        program.save(str(path))
    return Path(path)


@contextmanager
def _exportable_experts(model: Any) -> Generator[None]:
    """Have a mixture of experts compute as ``_EXPERTS`` meanwhile; other models stay as is."""
    own = getattr(model.config, "_experts_implementation", None)
    if own is None or not hasattr(model, "set_experts_implementation"):
        yield
        return
    model.set_experts_implementation(_EXPERTS)
    try:
        yield
    finally:
        model.set_experts_implementation(own)


@contextmanager
def _explained(where: str) -> Generator[None]:
    """Turn errors of PyTorch's exporter, of many lines, into one that has the cause."""
    import torch

    try:
        yield
    except torch.onnx.OnnxExporterError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise UsageError(
            f"PyTorch's exporter does not write the model as ONNX: {first_line(cause)}",
            where=where,
            fix="export the model by Optimum, and tune the file",
        ) from error


def _positions(name: str) -> str:
    """What the number of an input's positions is called."""
    if name == "attention_mask":
        return "past + length"
    return "past" if name.startswith("past") else "length"


@checks
def generator(
    model: Any, session: Session, write: Callable[[Path], object] | None = None
) -> Any:
    """``model`` with another's computation: of a tuned model that it was exported to.

    Law: ``generate`` and every other method is the model's own; only ``forward`` runs
    ``session``, and ``save_pretrained`` writes what it runs. The weights of ``model`` are
    shared, and not read.

    Args:
        model: A causal language model of transformers.
        session: Its exported form, loaded in an engine.
        write: Writes the exported form to a path; without it nothing can be saved.
    """
    made, forward = copy.copy(model), cast("Any", partial(_forward, session, model))
    # transformers asks for the parameters of forward, to know what it may pass.
    forward.__signature__ = inspect.signature(_called)
    made.forward = forward
    made.save_pretrained = partial(_save_pretrained, model, write)
    return made


def _save_pretrained(
    model: Any, write: Callable[[Path], object] | None, save_directory: str | Path
) -> None:
    """Write a tuned model as a folder: configuration, ``model.onnx`` and its plan.

    Raises:
        UsageError: If the tuned model is not at hand.
    """
    if write is None:
        raise UsageError(
            "the tuned model is loaded in an engine, and is not written from there",
            where="save_pretrained",
            fix="copy the folder or the file that it was loaded from",
        )
    folder = Path(save_directory)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / _FILE)
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


@checks
def from_pretrained(folder: str | Path, engine: str | None = None) -> Any:
    """Load what ``save_pretrained`` of a tuned model wrote; its ``generate`` runs the file.

    Args:
        folder: A folder with ``config.json`` and ``model.onnx``.
        engine: ``NAME[:DEVICE]``; by default that of the plan beside the model, or the first
            one here that runs it.

    Raises:
        UsageError: If the folder has no such files.
    """
    import torch

    transformers: Any = importlib.import_module("transformers")
    path = Path(folder) / _FILE
    for file in (path, path.with_name("config.json")):
        if not file.is_file():
            raise UsageError(
                f"{file.name} is missing",
                where=str(folder),
                fix="give a folder that save_pretrained of a tuned model wrote",
            )
    plan = path.with_suffix(".plan.json")
    spec = Plan.load(plan).engine if engine is None and plan.is_file() else engine
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):  # without memory for weights, which are in the file
        model = transformers.AutoModelForCausalLM.from_config(config)
    for module in model.modules():
        for name in module._parameters:
            module._parameters[name] = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    if path.with_name("generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(
            folder, local_files_only=True
        )
    return generator(model.eval(), candidates(spec)[0].load(path))


def _called(
    input_ids: Any = None,
    attention_mask: Any = None,
    position_ids: Any = None,
    past_key_values: Any = None,
    cache: Any = None,  # its name from transformers 5.24 on
    labels: Any = None,
    logits_to_keep: Any = 0,
    **kwargs: Any,
) -> Any:
    """What ``forward`` takes."""


def _forward(session: Session, model: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of a causal language model, by the session of its exported form.

    Raises:
        UsageError: If it is asked for what the exported form does not have.
    """
    import torch

    transformers: Any = importlib.import_module("transformers")
    outputs: Any = importlib.import_module("transformers.modeling_outputs")
    given = inspect.signature(_called).bind(*args, **kwargs).arguments
    asked, config = given.get("kwargs", {}), model.config
    ids, cache = given.get("input_ids"), given.get("cache", given.get("past_key_values"))
    other = [
        n for n, v in asked.items() if n not in _NEEDLESS and v is not None and v is not False
    ]
    if other or ids is None:
        raise UsageError(
            f"the tuned model is run on tokens, and does not take {', '.join(other)}"
            if other
            else "the tuned model is run on tokens, and none are given",
            where=f"a call of {type(model).__name__}",
            fix="give input_ids, and for all else call the model that was tuned",
        )
    cache = transformers.DynamicCache(config=config) if cache is None else cache
    rows, new = ids.shape
    past = cache.get_seq_length()
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is None:
        mask = torch.ones((rows, past + new), dtype=torch.int64)
    if positions is None:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -new:]
    feeds = {
        "input_ids": ids.numpy(),
        "attention_mask": mask.to(torch.int64).numpy(),
        "position_ids": np.broadcast_to(positions.numpy(), (rows, new)).copy(),
    }
    caches = [spec for spec in session.inputs if spec.name not in feeds]
    for number, spec in enumerate(caches):
        if past:
            held = _array(getattr(cache.layers[number // 2], f"{_CACHED[number % 2]}s"))
        else:
            sizes = [dim if isinstance(dim, int) else 0 for dim in spec.shape or ()]
            held = np.zeros([rows, *sizes[1:]], DTYPES[spec.dtype])
        feeds[spec.name] = held
    arrays = session.run(feeds)
    logits, *present = map(_tensor, arrays.values())
    for layer in range(len(present) // 2):
        key, value = (one[:, :, past:] for one in present[2 * layer : 2 * layer + 2])
        cache.update(key, value, layer)
    kept = given.get("logits_to_keep", 0)
    logits = logits[:, slice(-kept, None) if isinstance(kept, int) else kept, :]
    labels, loss = given.get("labels"), None
    if labels is not None:
        loss = model.loss_function(logits=logits, labels=labels, vocab_size=config.vocab_size)
    kind = outputs.CausalLMOutputWithPast
    named = {_cache_name(kind): None if asked.get("use_cache") is False else cache}
    made = kind(loss=loss, logits=logits, **named)
    return made.to_tuple() if asked.get("return_dict") is False else made


def _array(tensor: Any) -> Array:
    """The tensor's numbers, not copied; PyTorch gives no array of bf16."""
    import torch

    if tensor.dtype is not torch.bfloat16:
        return tensor.numpy()
    return tensor.contiguous().view(torch.int16).numpy().view(DTYPES["bf16"])


def _tensor(array: Array) -> Any:
    """The inverse of ``_array``."""
    import torch

    if array.dtype != DTYPES["bf16"]:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def _cache_name(called: Any) -> str:
    """What a model's ``forward``, or the class of its outputs, calls the cache.

    transformers 5.24 renamed it, and its ``generate`` knows the new name alone.
    """
    return "cache" if "cache" in inspect.signature(called).parameters else "past_key_values"


def _check_model(model: Any) -> None:
    """Raise UsageError unless it may be a causal language model of transformers."""
    if hasattr(model, "generate") and hasattr(model, "config") and callable(model):
        return
    raise UsageError(
        f"{kind_of(model)} is no causal language model of transformers",
        where="model",
        fix="give an object: transformers.AutoModelForCausalLM.from_pretrained(NAME)",
    )


def _flattened(model: Any) -> tuple[Any, list[Any]]:
    """A module of tokens, mask, positions and caches, and example caches of four tokens.

    Raises:
        UsageError: As ``export``.
    """
    import torch

    transformers: Any = importlib.import_module("transformers")
    if model.training:
        raise UsageError("the model is in training mode", fix="call model.eval() first")
    with torch.no_grad():
        outputs = model(input_ids=torch.zeros((2, 4), dtype=torch.int64), use_cache=True)
    name = _cache_name(type(model).forward)
    cache = getattr(outputs, name, None)
    layers = getattr(cache, "layers", [])
    if not layers or any(type(one).__name__ != "DynamicLayer" for one in layers):
        kinds = ", ".join(sorted({type(one).__name__ for one in layers})) or "none"
        raise UsageError(
            f"{type(model).__name__} has a cache of another kind than keys and values of all"
            f" tokens: {kinds}",
            fix="export the model by Optimum, and tune the file",
        )

    class Flat(torch.nn.Module):
        """The model, of which every input and output is a tensor."""

        def __init__(self) -> None:
            super().__init__()
            self.model = copy.copy(model).eval()

        def forward(
            self, input_ids: Any, attention_mask: Any, position_ids: Any, past: Any
        ) -> Any:
            pairs = zip(past[::2], past[1::2], strict=True)
            outputs = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=True,
                **{name: transformers.DynamicCache(ddp_cache_data=[*pairs])},
            )
            made = getattr(outputs, name).layers
            return outputs.logits, *(array for one in made for array in (one.keys, one.values))

    return Flat(), [array for one in layers for array in (one.keys, one.values)]

"""Loads ``.pt2`` files, and refuses those that would run code unless the user trusts them.

Law: without ``trust``, loading executes nothing that the file brings. ``torch.export.load``
unpickles (example inputs, tensor subclasses, custom objects), evaluates strings (sizes, by
sympy), writes names into Python code, imports modules by name (pytrees), opens compiled
libraries (AOTInductor) and calls whatever torch function a node names. So all of these are
checked first, read by the same reader that torch loads with, and a file with anything that is
not plainly data is refused.
"""

from __future__ import annotations

import ast
import importlib
import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.export.pt2_archive._package import PT2ArchiveReader, load_pt2
from torch.utils import _pytree

from finecast.errors import ModelError, UsageError, first_line
from finecast.frontends.torch.codes import coded_ops

_TRUST: Final = "if you trust who made it, say so: --trust"
_MODEL: Final = "models/model.json"
_SAMPLES: Final = "data/sample_inputs/model.pt"
_MEMBERS: Final = re.compile(
    r"models/model\.json|data/(weights/weight|constants/tensor)_\d+|data/sample_inputs/model\.pt"
    r"|data/(weights|constants)/model_(weights|constants)_config\.json"
    r"|extra/.*|archive_format|archive_version|version|byteorder|\.data/\w+"
)
_PAYLOADS: Final = (
    "data/weights/model_weights_config.json",
    "data/constants/model_constants_config.json",
)
# PyTorch's own ops, those on codes among them, but for from_file: it opens or makes any file.
_OPS: Final = re.compile(r"torch\.ops\.(aten|prims|higher_order|quantized_decomposed)(\.\w+)+")
_FORBIDDEN: Final = frozenset({"aten::from_file"})
# Python functions that a graph may call: arithmetic on sizes.
_FUNCTIONS: Final = re.compile(
    r"_operator\.(getitem|add|sub|mul|truediv|floordiv|mod|pow|neg|pos"
    r"|eq|ne|lt|le|gt|ge|and_|or_|not_)"
    r"|math\.(ceil|floor|trunc|sqrt)|torch\._?sym_[a-z]+"
)
# Functions in the formulas of sizes: sympy's, and those of torch.utils._sympy.functions.
_SIZE_FUNCTIONS: Final = re.compile(
    r"Symbol|Integer|Abs|Add|Mul|Pow|Max|Min|Mod|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|Piecewise"
    r"|floor|ceiling|sqrt|log|FloorDiv|ModularIndexing|Where|PythonMod|CleanDiv|CeilToInt"
    r"|FloorToInt|CeilDiv|LShift|RShift|PowByNatural|FloatPow|FloatTrueDiv|IntTrueDiv"
    r"|TruncToFloat|TruncToInt|RoundToInt|RoundDecimal|ToFloat|Identity|Equality|Unequality"
    r"|IsNonOverlappingAndDenseIndicator"
    r"|(Strict)?(Less|Greater)Than"  # bounds of sizes that depend on numbers
)
_SIZE_NODES: Final = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.Name,
    ast.Constant, ast.keyword, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.Load,
    ast.Tuple,
)  # fmt: skip
# Names become a part of Python code, so they must hold none.
_NAME: Final = re.compile(r"[\w.:/-]*")


def load_program(path: Path, *, trust: bool = False) -> ExportedProgram:
    """The program that ``torch.export.save`` wrote to ``path``.

    Raises:
        UsageError: If there is no such file.
        ModelError: If it is no exported program, or would execute what it brings.
    """
    if not path.is_file():
        raise UsageError("no such file", where=str(path), fix="check the path")
    coded_ops()
    try:
        if trust:
            import_containers(path)
            return torch.export.load(path)
        content = path.read_bytes()
        _check_archive(PT2ArchiveReader(io.BytesIO(content)))
        program = load_pt2(io.BytesIO(content)).exported_programs["model"]
    except ModelError as error:
        raise ModelError(error.what, where=str(path), fix=error.fix) from error
    except Exception as error:
        # A damaged archive makes torch's reader raise errors of any kind.
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(
            f"not a program that this PyTorch can read: {reason}",
            where=str(path),
            fix=f"save it with torch.export.save of PyTorch {torch.__version__}",
        ) from error
    # Checks of the inputs' sizes are Python source, which module() would compile and run.
    program._guards_code = []  # pyright: ignore[reportPrivateUsage]
    return program


def _refusal(what: str, instead: str = "") -> ModelError:
    """The error that loading would do ``what``; ``instead`` is a way without ``--trust``."""
    fix = f"{_TRUST}; or {instead}" if instead else _TRUST
    return ModelError(f"loading this file would {what}", fix=fix)


def _check_archive(reader: PT2ArchiveReader) -> None:
    """Raise ModelError unless everything in the archive is plain data."""
    names = reader.get_file_names()
    if _MODEL not in names:
        raise ModelError("the file holds no exported program", fix="use torch.export.save")
    for name in names:
        if name.startswith("data/aotinductor/"):
            raise _refusal(f"run the compiled code in {name}")
        if not _MEMBERS.fullmatch(name):
            raise _refusal(f"unpickle {name}")
    for name in _PAYLOADS:
        _check_payloads(json.loads(reader.read_string(name)))
    samples = reader.read_bytes(_SAMPLES)
    if samples:
        try:
            # torch tries this first, and unpickles arbitrary objects only if it fails.
            torch.load(io.BytesIO(samples), weights_only=True)
        except Exception as error:
            raise _refusal("unpickle objects among its example inputs") from error
    _check_program(json.loads(reader.read_string(_MODEL)))


def _check_payloads(payloads: Mapping[str, Any]) -> None:
    for name, entry in payloads["config"].items():
        _check_name(name)
        plain = re.fullmatch(r"(weight|tensor)_\d+", str(entry["path_name"]))
        if entry.get("use_pickle") is not False or not plain:
            raise _refusal(f"unpickle {name}, which is no plain tensor")


def _check_program(program: Any) -> None:
    for key, text in texts(program):
        if key in ("target", "as_operator"):
            _check_target(text)
        elif key == "expr_str":
            _check_size(text)
        elif key in TREES:
            _check_tree(text)
        else:
            _check_name(text)


def _check_name(text: str) -> None:
    if not _NAME.fullmatch(text):
        raise _refusal(f"write the name {text[:40]!r} into Python code")


def _check_target(target: str) -> None:
    """Refuse a node that calls anything but arithmetic on sizes and PyTorch's ops."""
    if _FUNCTIONS.fullmatch(target):
        return
    function: Any = None
    if _OPS.fullmatch(target):
        function = torch
        for part in target.split(".")[1:]:
            function = getattr(function, part, None)
    plain = isinstance(function, OpOverload | HigherOrderOperator)
    if not plain or function.name().partition(".")[0] in _FORBIDDEN:
        raise _refusal(f"call {target}, which is no op of PyTorch's graphs")


def _check_size(text: str) -> None:
    """Refuse a formula that is not arithmetic on names and numbers with known functions."""
    for node in ast.walk(ast.parse(text.strip(), mode="eval")):
        plain = isinstance(node, _SIZE_NODES)
        if isinstance(node, ast.Call):
            plain = isinstance(node.func, ast.Name) and bool(
                _SIZE_FUNCTIONS.fullmatch(node.func.id)
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            plain = node.value.isidentifier()
        elif isinstance(node, ast.Name):
            plain = not node.id.startswith("_")
        if not plain:
            raise _refusal(f"evaluate the size {text!r}")


def _check_tree(text: str) -> None:
    """Refuse a description of nested arguments that names any but Python's own containers.

    It is JSON, and so is the text under ``context`` in it.
    """
    for key, value in texts(json.loads(text) if text else None):
        if key == "type" and value not in PLAIN:
            raise _refusal(f"import what a container of type {value} names", INSTEAD)
        inside = texts(json.loads(value)) if key == "context" else [("", value)]
        for _, name in inside:
            if name == "__enum__":
                raise _refusal("import what the key of a container names")
            _check_name(name)


PLAIN: Final = frozenset(
    {"builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"}
)
TREES: Final = ("in_spec", "out_spec")
"""Keys in a program's JSON of texts that are JSON, too: the nesting of inputs and outputs."""
INSTEAD: Final = "export it with plain results (transformers: return_dict=False)"
# Keys of text that is never run or imported, or that has a check of its own.
_FREE: Final = frozenset(
    {"metadata", "as_string", "as_strings", "guards_code", "torch_version"}
)
_NAMED_TUPLE: Final = "collections.namedtuple"


def containers_in(path: Path) -> frozenset[str]:
    """Names of the classes of containers, other than Python's, of the program at ``path``."""
    if not zipfile.is_zipfile(path):
        return frozenset()
    with zipfile.ZipFile(path) as archive:
        models = [n for n in archive.namelist() if n.endswith("/models/model.json")]
        programs = [json.loads(archive.read(name)) for name in models]
    trees = [json.loads(v)[1] for k, v in texts(programs) if k in TREES and v]
    return frozenset(name for tree in trees for name in _names(tree)) - PLAIN


def _names(tree: Mapping[str, Any]) -> Iterator[str]:
    kind = tree["type"]
    if kind is not None:
        yield str(tree["context"] if kind == _NAMED_TUPLE else kind)
    for child in tree["children_spec"]:
        yield from _names(child)


def import_containers(path: Path) -> None:
    """Import the modules of the containers of the program at ``path``, which registers them.

    Raises:
        ModelError: If a container is not registered even then.
    """
    for name in sorted(containers_in(path)):
        known = _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
        module = name.rpartition(".")[0]
        why = f"{module} does not register it"
        if name not in known and module:
            try:
                importlib.import_module(module)
            except ImportError as error:
                why = str(error)
        if name not in known:
            raise ModelError(
                f"the program takes or gives {name}, which is not known here: {why}",
                where=str(path),
                fix=f"install {module.partition('.')[0] or 'its package'}, load it from Python"
                f" after torch.export.register_dataclass, or {INSTEAD}",
            )


def texts(content: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every string in JSON but free text, with its key; keys are among them, under ``""``."""
    left = [(key, content)]
    while left:
        key, part = left.pop()
        if isinstance(part, str):
            yield key, part
        elif isinstance(part, dict):
            yield from (("", name) for name in part)
            left.extend((k, v) for k, v in part.items() if k not in _FREE)
        elif isinstance(part, list):
            left.extend((key, v) for v in part)

"""Reading a ``.pt2`` file: a program that is data, or one that the user vouches for.

Law: unless ``trust``, loading executes nothing that the file brings. ``torch.export.load``
unpickles (example inputs, tensor subclasses, custom objects), evaluates strings (sizes, by
sympy), writes names into Python code, imports modules by name (pytrees), opens compiled
libraries (AOTInductor) and calls whatever torch function a node names. So all of these are
looked at first, with the reader that torch then loads with, and what is not plainly data is
refused.
"""

from __future__ import annotations

import ast
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.export.pt2_archive._package import PT2ArchiveReader, load_pt2

from finecast.errors import ModelError, UsageError
from finecast.frontends.torch.codes import coded_ops
from finecast.frontends.torch.containers import INSTEAD, PLAIN, TREES, import_containers, texts

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
# Ops of PyTorch itself, and on codes; from_file maps, and makes, files of any name.
_OPS: Final = re.compile(r"torch\.ops\.(aten|prims|higher_order|quantized_decomposed)(\.\w+)+")
_FORBIDDEN: Final = frozenset({"aten::from_file"})
# Arithmetic on sizes.
_FUNCTIONS: Final = re.compile(
    r"_operator\.(getitem|add|sub|mul|truediv|floordiv|mod|pow|neg|pos"
    r"|eq|ne|lt|le|gt|ge|and_|or_|not_)"
    r"|math\.(ceil|floor|trunc|sqrt)|torch\._?sym_[a-z]+"
)
# What export writes sizes with: sympy's own and torch.utils._sympy.functions'.
_SIZE_FUNCTIONS: Final = re.compile(
    r"Symbol|Integer|Abs|Add|Mul|Pow|Max|Min|Mod|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|Piecewise"
    r"|floor|ceiling|sqrt|log|FloorDiv|ModularIndexing|Where|PythonMod|CleanDiv|CeilToInt"
    r"|FloorToInt|CeilDiv|LShift|RShift|PowByNatural|FloatPow|FloatTrueDiv|IntTrueDiv"
    r"|TruncToFloat|TruncToInt|RoundToInt|RoundDecimal|ToFloat|Identity|Equality|Unequality"
    r"|IsNonOverlappingAndDenseIndicator"
)
_SIZE_NODES: Final = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.Name,
    ast.Constant, ast.keyword, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.Load,
    ast.Tuple,
)  # fmt: skip
# Names become Python code.
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
        # Whatever a damaged archive makes torch's reader raise.
        first = (str(error).strip().splitlines() or [""])[0]
        raise ModelError(
            f"not a program that this PyTorch can read: {type(error).__name__}: {first}",
            where=str(path),
            fix=f"save it with torch.export.save of PyTorch {torch.__version__}",
        ) from error
    # Python source, which module() would compile: checks of the inputs' sizes.
    program._guards_code = []  # pyright: ignore[reportPrivateUsage]
    return program


def _refuse(what: str, instead: str = "") -> ModelError:
    fix = f"{_TRUST}; or {instead}" if instead else _TRUST
    return ModelError(f"loading this file would {what}", fix=fix)


def _check_archive(reader: PT2ArchiveReader) -> None:
    names = reader.get_file_names()
    if _MODEL not in names:
        raise ModelError("the file holds no exported program", fix="use torch.export.save")
    for name in names:
        if name.startswith("data/aotinductor/"):
            raise _refuse(f"run the compiled code in {name}")
        if not _MEMBERS.fullmatch(name):
            raise _refuse(f"unpickle {name}")
    for name in _PAYLOADS:
        _check_payloads(json.loads(reader.read_string(name)))
    samples = reader.read_bytes(_SAMPLES)
    if samples:
        try:
            # What torch tries first; only if it fails does it unpickle anything at all.
            torch.load(io.BytesIO(samples), weights_only=True)
        except Exception as error:
            raise _refuse("unpickle objects among its example inputs") from error
    _check_program(json.loads(reader.read_string(_MODEL)))


def _check_payloads(payloads: Mapping[str, Any]) -> None:
    for name, entry in payloads["config"].items():
        _check_name(name)
        plain = re.fullmatch(r"(weight|tensor)_\d+", str(entry["path_name"]))
        if entry.get("use_pickle") is not False or not plain:
            raise _refuse(f"unpickle {name}, which is no plain tensor")


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
        raise _refuse(f"write the name {text[:40]!r} into Python code")


def _check_target(target: str) -> None:
    if _FUNCTIONS.fullmatch(target):
        return
    found: Any = None
    if _OPS.fullmatch(target):
        found = torch
        for part in target.split(".")[1:]:
            found = getattr(found, part, None)
    plain = isinstance(found, OpOverload | HigherOrderOperator)
    if not plain or found.name().partition(".")[0] in _FORBIDDEN:
        raise _refuse(f"call {target}, which is no op of PyTorch's graphs")


def _check_size(text: str) -> None:
    """Sizes are evaluated: arithmetic on names and numbers, and the functions known."""
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
            raise _refuse(f"evaluate the size {text!r}")


def _check_tree(text: str) -> None:
    """How arguments are nested: JSON, in which ``context`` is JSON once more."""
    for key, value in texts(json.loads(text) if text else None):
        if key == "type" and value not in PLAIN:
            raise _refuse(f"import what a container of type {value} names", INSTEAD)
        inside = texts(json.loads(value)) if key == "context" else [("", value)]
        for _, name in inside:
            if name == "__enum__":
                raise _refuse("import what the key of a container names")
            _check_name(name)

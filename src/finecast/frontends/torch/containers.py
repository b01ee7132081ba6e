"""Containers of other packages among the inputs and outputs of a saved program.

torch saves a container by the name of its class, and loads it only if the class is registered
in this process. transformers, for one, registers its classes when their module is imported.
"""

from __future__ import annotations

import importlib
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from torch.utils import _pytree

from finecast.errors import ModelError

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
        key, one = left.pop()
        if isinstance(one, str):
            yield key, one
        elif isinstance(one, dict):
            yield from (("", name) for name in one)
            left.extend((k, v) for k, v in one.items() if k not in _FREE)
        elif isinstance(one, list):
            left.extend((key, v) for v in one)

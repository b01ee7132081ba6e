"""Containers of other packages among what a saved program takes and gives.

torch writes them by name, and reads those alone that code of this process has registered.
transformers registers its outputs where they are defined.
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
"""The keys of a program's JSON under which trees stand, as JSON once more."""
INSTEAD: Final = "export it with plain results (transformers: return_dict=False)"
# Free text stands where it is quoted, or looked at by its own check.
_FREE: Final = frozenset(
    {"metadata", "as_string", "as_strings", "guards_code", "torch_version"}
)
_NAMED_TUPLE: Final = "collections.namedtuple"


def containers_in(path: Path) -> frozenset[str]:
    """Names of the containers, other than Python's, of the program saved at ``path``."""
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
    """Import what registers the containers of the program at ``path``.

    Raises:
        ModelError: If a container is not registered for all that.
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
    """Every string in JSON but free text, with the key it is under; keys are strings too."""
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

"""What ``torch.export`` says of a module that it cannot capture, and what to do about it."""

from __future__ import annotations

import re
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from typing import Final

from finecast.errors import ModelError

_FIX: Final = "make torch.export.export(module, example_inputs) work first"
_FIXES: Final = (
    (
        "not a known type",
        (
            "give tensors in tuples and dicts, register the class"
            " (torch.export.register_dataclass), or leave it out: transformers' caches by"
            " use_cache=False"
        ),
    ),
    (
        "data-dependent expression",
        "state what depends on values by torch.where or torch.cond",
    ),
)
"""Parts of messages, and what to do."""
# Advice for those who work on torch.
_ASIDES: Final = re.compile(
    r" *(For more information, run with TORCH_LOGS=\S+|If you don't need to register.*"
    r"|(For more information about this error, )?[Ss]ee:? https?:\S+( for .*?\.(?= |$))?)"
)
_SUGGESTED: Final = re.compile(r"Suggested fixes:\n((?:  .*\n?)+)")
_PLACE: Final = re.compile(r'The following call raised this error:\n  File "(.+)", line (\d+)')


def not_captured(error: Exception, module: str) -> ModelError:
    """The error for a module, by name, on which ``torch.export`` raised ``error``."""
    text = str(error).strip()
    first = _ASIDES.sub("", (text.splitlines() or [""])[0]).strip()
    place = _PLACE.search(text)
    where = f"{module}, {place[1]}:{place[2]}" if place else module
    fix = next((fix for part, fix in _FIXES if part in text), _FIX)
    suggested = _SUGGESTED.search(text)
    if suggested:
        fix = "in dynamic_shapes, " + ", ".join(suggested[1].split("\n")).strip(", ")
        fix = re.sub(r"\s+", " ", fix)
    return ModelError(
        f"torch.export cannot capture the module: {type(error).__name__}: {first}",
        where=where,
        fix=fix,
    )


@contextmanager
def without_partial_graph() -> Generator[None]:
    """Without the graph so far, which ``torch.export`` prints before it raises an error."""
    written = StringIO()
    graph = ""
    try:
        with redirect_stderr(written):
            yield
    except Exception as error:
        graph = str(getattr(error, "partial_fx_graph", ""))
        raise
    finally:
        text = written.getvalue()
        sys.stderr.write(text.replace(f"{graph}\n", "") if graph else text)

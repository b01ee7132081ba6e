"""What is told of a plan: its content, sentences, tables; plugins draw it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from finecast.errors import UsageError
from finecast.plugin import imported_on_use, public_name

if TYPE_CHECKING:
    # Names of this room for others, as plugins: imported on first use.
    from finecast.reports.base import Report as Report
    from finecast.reports.base import TextTable as TextTable
    from finecast.reports.base import output_lines as output_lines
    from finecast.reports.summary import kept_here as kept_here
else:
    __getattr__ = imported_on_use(__name__)

DRAWN: Final = {".html": "page_of", ".svg": "picture"}
"""What draws a report, by the suffix of its file."""


def drawing(name: str) -> Any:
    """What a plugin draws a report with, such as ``page_of``; None if none here has it."""
    try:
        return public_name(f"{__name__}.{name}")
    except AttributeError:
        return None


def drawn(name: str) -> Any:
    """As ``drawing``.

    Raises:
        UsageError: If no plugin here has it.
    """
    function = drawing(name)
    if function is None:
        raise UsageError(
            "pages and pictures are drawn by the plugin 'report', which is not here",
            fix="write .json, or install finecast with its plugins",
        )
    return function

"""What engines and libraries are known to compute wrongly, as one table: ``faults.csv``.

Law: every row names the release that the fault was seen in, its report (an issue of the
engine's project, or a text for one in ``docs/upstream``), and the test that fails once a
release is right. Then ``mended`` says which release that is, and nothing is worked around
where that release or a later one is installed: plans may contain the op again.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.resources import files


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFault:
    """A row of the table.

    Attributes:
        name: What the code that works around the fault calls it.
        engine: The engine or library; the name of its package, too.
        seen: The last release that was seen to have the fault.
        mended: The first release that has not; empty if there is none yet.
        met: In how many of the nets that were counted it is met, as ``3 of 41``, by
            ``scripts/faults_met.py``; empty where nothing finds it in a graph.
        treated: What keeps users from it, and where a model is rewritten for a fault that few
            meet, why.
        upstream: The address of the report, or the file of a text for one.
        test: The test that shows the fault, or what is done about it.
        fault: What is wrong.
    """

    name: str
    engine: str
    seen: str
    mended: str
    met: str
    treated: str
    upstream: str
    test: str
    fault: str

    @property
    def is_here(self) -> bool:
        """Whether the installed release has the fault, as far as is known."""
        return not self.mended or _numbers(_installed(self.engine)) < _numbers(self.mended)


@cache
def known_faults() -> dict[str, KnownFault]:
    """All rows by name."""
    text = (files("finecast.devices") / "faults.csv").read_text(encoding="utf-8")
    return {row["name"]: KnownFault(**row) for row in csv.DictReader(text.splitlines())}


def is_here(name: str) -> bool:
    """Whether the installed release of an engine has the fault of that name."""
    return known_faults()[name].is_here


@cache
def _installed(package: str) -> str:
    """The installed release; empty, which comes before all others, if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _numbers(release: str) -> tuple[int, ...]:
    """The leading numbers of a release: ``2026.4.1`` of ``2026.4.1-21000-dev``."""
    match = re.match(r"\d+(\.\d+)*", release)
    return tuple(map(int, match[0].split("."))) if match else ()

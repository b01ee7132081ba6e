"""Write ``docs/faults.md``: the table of ``finecast.devices.faults`` for readers.

python scripts/faults.py
"""

from __future__ import annotations

from pathlib import Path

from finecast.devices.faults import KnownFault, known_faults
from finecast.plugin import title_of

DOCS = Path(__file__).parent.parent / "docs"
HEAD = """# Faults of engines

What engines and libraries are known to compute wrongly, and finecast keeps models from
meeting. Each row has the last release that was seen to have the fault, where it is reported,
and, in the table in the source, the test that fails once a release is right. Reports under
`upstream/` are texts for the engine's project, each with a script that shows the fault.
Written by `python scripts/faults.py` from `src/finecast/devices/faults.csv`. In how many nets
a fault is met is counted by `scripts/faults_met.py`: those of `shared/models`, onnx's own,
synthetic ones and the zoo's. Where less than one net in a hundred meets a fault, the op keeps
fp32, the model takes another engine, or it is refused by name; models are rewritten only where
none of these would do.

| fault | seen in | met in nets | what is wrong | what is done | report |
| --- | --- | --- | --- | --- | --- |
"""


def page() -> str:
    """The page's text."""
    return HEAD + "".join(map(_row, known_faults().values()))


def _row(fault: KnownFault) -> str:
    link = fault.upstream.removeprefix("docs/")
    label = link.partition("github.com/")[2] or link
    seen = f"{title_of(fault.engine)} {fault.seen}" + (
        f", mended in {fault.mended}" * bool(fault.mended)
    )
    met = fault.met or "not counted"
    cells = (f"`{fault.name}`", seen, met, fault.fault, fault.treated, f"[{label}]({link})")
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    (DOCS / "faults.md").write_text(page(), encoding="utf-8")

"""Draw ``docs/frontier.svg``: the frontier of the digits example, from a run of ``tune``.

The run is for a CPU with AVX512-VNNI, whatever this machine is, so that anyone can repeat it:
accuracy is emulated and times are modelled, as the title says. ``python scripts/frontier.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from finecast_report.frontier import picture

ROOT = Path(__file__).parent.parent
DIGITS = ROOT / "examples" / "digits"
TARGET = "avx512-vnni"


def main() -> None:
    """Tune, and draw what is printed."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["tune", str(DIGITS / "digits.onnx"), "-o", f"{folder}/tuned.onnx"]
        words += ["--data", str(DIGITS / "digits_eval.npz"), "--metric", "top1"]
        command = [sys.executable, "-m", "finecast", *words, "--target", TARGET, "--json"]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    title = f"A small convolutional net in int8 on {TARGET} (times modelled)"
    (ROOT / "docs" / "frontier.svg").write_text(picture(json.loads(printed), title))


if __name__ == "__main__":
    main()

"""Names of files that the locale, or UTF-8, cannot spell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from finecast.cli import VERBS
from finecast.errors import ExitCode

LATIN, CYRILLIC = b"mod\xe9l", "модель".encode()
POSIX = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
# Command lines are run in one process, as each would take seconds to start.
SCRIPT = """
import os, sys
from finecast.cli import main
for word in sys.argv[1:]:
    name, _, line = word.partition(" ")
    name = os.fsdecode(bytes.fromhex(name))
    code = main([word.replace("NAME", name) for word in line.split()])
    print(f"code {code}", file=sys.stderr, flush=True)
"""


def run(
    folder: Path, *lines: tuple[bytes, str], locale: dict[str, str]
) -> list[tuple[int, list[str]]]:
    """Run command lines in which NAME stands for a name; of each its code and its errors."""
    command = [sys.executable, "-c", SCRIPT, *(f"{name.hex()} {line}" for name, line in lines)]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, check=False, env={**os.environ, **locale}
    )
    said = done.stderr.decode().splitlines()
    found: list[tuple[int, list[str]]] = []
    errors: list[str] = []
    for line in said:
        if line.startswith("code "):
            found.append((int(line.removeprefix("code ")), errors))
            errors = []
        elif not line.startswith("warning: "):
            errors.append(line)
    assert len(found) == len(lines), said
    return found


@pytest.mark.parametrize(
    ("names", "locale"),
    [
        (
            {
                LATIN: "the path is not in UTF-8",
                CYRILLIC: "the path cannot be spelled in this locale",
            },
            POSIX,
        ),
        ({LATIN: "the path is not in UTF-8"}, {"PYTHONUTF8": "1"}),
    ],
    ids=["posix", "utf-8"],
)
def test_a_model_there_is_refused_in_one_line(
    names: dict[bytes, str], locale: dict[str, str], net: Path, data: Path, tmp_path: Path
) -> None:
    """Libraries take paths in UTF-8."""
    suffixes = (".onnx", ".xml", ".pt2")
    for name in names:
        for suffix in suffixes:
            odd = os.fsdecode(tmp_path).encode() + b"/" + name + suffix.encode()
            Path(os.fsdecode(odd)).write_bytes(net.read_bytes())
    before = sorted(os.listdir(tmp_path))
    lines = [
        *(f"inspect NAME{suffix}" for suffix in suffixes),
        "convert net.onnx -o NAMEo.onnx",
        "convert net.onnx -o NAMEo.xml",
        "explain NAME.onnx",
        "profile NAME.onnx",
        "profile net.onnx NAME.onnx",
        "tune net.onnx -o NAMEo.onnx --data data.npz --metric top1",
        "emulate NAME.onnx --target trn1 --data data.npz",
    ]
    if "ladder" in VERBS:
        lines.append("ladder NAME.onnx --target trn1 --data data.npz --metric top1")
    asked = [(name, line) for name in names for line in lines]
    for (name, _), (code, errors) in zip(
        asked, run(tmp_path, *asked, locale=locale), strict=True
    ):
        assert code == ExitCode.USAGE
        assert len(errors) == 1
        assert errors[0].startswith("error: ")
        assert names[name] in errors[0]
        assert "PYTHONUTF8=1" in errors[0] or "rename" in errors[0]
    assert sorted(os.listdir(tmp_path)) == before


def test_other_files_have_any_name(net: Path, data: Path, tmp_path: Path) -> None:
    """Plans, data, functions and studies are Python's to open."""
    function = "import numpy\ndef calib():\n    yield {'x': numpy.ones((4, 16), 'f')}\n"
    for name in (LATIN, CYRILLIC):
        odd = os.fsdecode(tmp_path).encode() + b"/" + name
        Path(os.fsdecode(odd + b".npz")).write_bytes(data.read_bytes())
        Path(os.fsdecode(odd + b".py")).write_text(function)
    tune = "tune net.onnx -o t.onnx --data NAME.npz --metric top1"
    lines = [
        "convert net.onnx -o low.onnx --auto-cast all --plan-out NAME.json --force",
        "apply NAME.json net.onnx -o again.onnx --force",
        "explain net.onnx --plan NAME.json",
        "emulate net.onnx --target trn1 --auto-cast all --data NAME.npz --calib NAME.py:calib",
        f"{tune} --start NAME.json --max-trials 1 --force",
    ]
    asked = [(name, line) for name in (LATIN, CYRILLIC) for line in lines]
    answers = run(tmp_path, *asked, locale=POSIX)
    for (_, line), (code, errors) in zip(asked, answers, strict=True):
        allowed = (ExitCode.DONE, ExitCode.NOT_IMPROVED) if line == lines[-1] else (0,)
        assert code in allowed, errors

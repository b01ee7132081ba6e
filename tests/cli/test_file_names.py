"""Names of files that the locale, or UTF-8, cannot spell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from finecast.errors import ExitCode

LATIN, CYRILLIC = b"mod\xe9l", "модель".encode()
POSIX = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
# Command lines are run in one process, as each would take seconds to start.
SCRIPT = """
import os, sys
from finecast.cli import main
name = os.fsdecode(bytes.fromhex(sys.argv[1]))
for line in sys.argv[2:]:
    code = main([word.replace("NAME", name) for word in line.split()])
    print(f"code {code}", file=sys.stderr, flush=True)
"""


def run(folder: Path, name: bytes, *lines: str, **locale: str) -> list[tuple[int, list[str]]]:
    """Run command lines in which NAME stands for ``name``; of each its code and its errors."""
    command = [sys.executable, "-c", SCRIPT, name.hex(), *lines]
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
    ("name", "locale", "said"),
    [
        (LATIN, POSIX, "the path is not in UTF-8"),
        (LATIN, {"PYTHONUTF8": "1"}, "the path is not in UTF-8"),
        (
            CYRILLIC,
            POSIX,
            "the path cannot be spelled in this locale",
        ),
    ],
)
def test_a_model_there_is_refused_in_one_line(
    name: bytes, locale: dict[str, str], said: str, net: Path, data: Path, tmp_path: Path
) -> None:
    """Libraries take paths in UTF-8."""
    odd = os.fsdecode(tmp_path).encode() + b"/" + name
    for suffix in (b".onnx", b".xml", b".pt2"):
        Path(os.fsdecode(odd + suffix)).write_bytes(net.read_bytes())
    before = sorted(os.listdir(tmp_path))
    answers = run(
        tmp_path,
        name,
        *(f"inspect NAME{suffix}" for suffix in (".onnx", ".xml", ".pt2")),
        "convert net.onnx -o NAMEo.onnx",
        "convert net.onnx -o NAMEo.xml",
        "explain NAME.onnx",
        "profile NAME.onnx",
        "profile net.onnx NAME.onnx",
        "tune net.onnx -o NAMEo.onnx --data data.npz --metric top1",
        "emulate NAME.onnx --target trn1 --data data.npz",
        "ladder NAME.onnx --target trn1 --data data.npz --metric top1",
        **locale,
    )
    for code, errors in answers:
        assert code == ExitCode.USAGE
        assert len(errors) == 1
        assert errors[0].startswith("error: ")
        assert said in errors[0]
        assert "PYTHONUTF8=1" in errors[0] or "rename" in errors[0]
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("name", [LATIN, CYRILLIC])
def test_other_files_have_any_name(name: bytes, net: Path, data: Path, tmp_path: Path) -> None:
    """Plans, data, functions and studies are Python's to open."""
    odd = os.fsdecode(tmp_path).encode() + b"/" + name
    Path(os.fsdecode(odd + b".npz")).write_bytes(data.read_bytes())
    function = "import numpy\ndef calib():\n    yield {'x': numpy.ones((4, 16), 'f')}\n"
    Path(os.fsdecode(odd + b".py")).write_text(function)
    answers = run(
        tmp_path,
        name,
        "convert net.onnx -o low.onnx --auto-cast all --plan-out NAME.json",
        "apply NAME.json net.onnx -o again.onnx",
        "explain net.onnx --plan NAME.json",
        "emulate net.onnx --target trn1 --auto-cast all --data NAME.npz --calib NAME.py:calib",
        "tune net.onnx -o t.onnx --data NAME.npz --metric top1 --study NAME.db --max-trials 1",
        **POSIX,
    )
    assert [code for code, _ in answers[:-1]] == [0] * 4, answers
    assert answers[-1][0] in (ExitCode.DONE, ExitCode.NOT_IMPROVED), answers

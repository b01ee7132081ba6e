"""Standard output has the results alone, whatever libraries print and whatever is closed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finecast.cli import main
from finecast.errors import ExitCode

DIGITS = Path(__file__).parent.parent / "examples" / "digits" / "digits.onnx"
# Libraries print in Python, to the descriptor, from C with a buffer of its own, which is
# emptied at the end, and from programs that they start.
NOISE = """
import ctypes, os, subprocess, sys
print("noise of Python")
os.write(1, b"noise of a descriptor\\n")
ctypes.CDLL(None).printf(b"noise of C\\n")
subprocess.run([sys.executable, "-c", "print('noise of a program')"], check=True)
def rule(node): return None
"""
SOURCES = ("Python", "a descriptor", "C", "a program")
FULL = Path("/dev/full")


def finecast(*args: object, **streams: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "finecast", *map(str, args)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.run(command, text=True, check=False, **streams)


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    """Rules whose file prints in all ways."""
    path = tmp_path / "noise.py"
    path.write_text(NOISE, encoding="utf-8")
    return path


@pytest.mark.skipif(os.name == "nt", reason="needs the C library by name")
def test_what_libraries_print_is_not_among_the_results(noise: Path, tmp_path: Path) -> None:
    out = tmp_path / "low.onnx"
    options = ["--auto-cast", "all", "--no-verify", "--rules", noise, "--json"]
    done = finecast("convert", DIGITS, "-o", out, *options)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert json.loads(done.stdout)["output"] == str(out)
    for source in SOURCES:
        assert f"noise of {source}\n" in done.stderr


def test_a_caller_in_python_keeps_its_descriptors(
    noise: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "low.onnx"
    line = f"convert {DIGITS} -o {out} --auto-cast all --no-verify --rules {noise}"
    before = os.fstat(1).st_ino, sys.stdout
    assert main(line.split()) == ExitCode.DONE
    assert (os.fstat(1).st_ino, sys.stdout) == before
    captured = capfd.readouterr()
    assert "noise of Python" in captured.err
    assert "noise of a descriptor" in captured.out  # whose process it is


COMMANDS = {
    "a result": (["formats"], ExitCode.USAGE),
    "a result in JSON": (["formats", "--json"], ExitCode.USAGE),
    "help": (["--help"], ExitCode.USAGE),
    "a verb's help": (["convert", "--help"], ExitCode.USAGE),
    "the version": (["--version"], ExitCode.USAGE),
    "an error": (["inspect", "none.onnx"], ExitCode.USAGE),
    "an error in JSON": (["inspect", "none.onnx", "--json"], ExitCode.USAGE),
}


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("name", COMMANDS)
def test_full_streams_end_a_command_by_its_code(name: str) -> None:
    command, code = COMMANDS[name]
    with FULL.open("w") as full:
        assert finecast(*command, stdout=full, stderr=full).returncode == code
        done = finecast(*command, stdout=full)
        assert done.returncode == code
        assert all(line.startswith("error: ") for line in done.stderr.splitlines())
        told = finecast(*command, stderr=full)
    assert told.returncode == (ExitCode.DONE if "error" not in name else code)
    assert bool(told.stdout) == (name != "an error")


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("name", ["a result", "help", "an error in JSON"])
def test_closed_streams_are_no_error(name: str, closed: tuple[int, ...]) -> None:
    def close() -> None:
        for descriptor in closed:
            os.close(descriptor)

    command, code = COMMANDS[name]
    close_them: Callable[[], None] = close
    done = finecast(*command, preexec_fn=close_them)
    assert done.returncode == (ExitCode.DONE if "error" not in name else code)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_has_read_enough_hears_nothing(name: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = finecast(*COMMANDS[name][0], stdout=pipe)
    prints_nothing = name == "an error"
    assert done.returncode == (ExitCode.USAGE if prints_nothing else 141)
    assert bool(done.stderr) == prints_nothing

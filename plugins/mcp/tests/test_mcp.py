"""``finecast mcp``: its tools, as the SDK's own client calls them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

mcp = pytest.importorskip("mcp")

import anyio  # noqa: E402 - comes with the SDK

from finecast.cli import VERBS  # noqa: E402
from finecast.errors import ExitCode, UsageError  # noqa: E402
from finecast_mcp.server import Tools, schema  # noqa: E402

DIGITS = Path(__file__).parents[3] / "examples" / "digits"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(DIGITS / "digits.onnx", tmp_path / "model.onnx")
    shutil.copy(DIGITS / "digits_eval.npz", tmp_path / "data.npz")
    return tmp_path


def called(folder: Path, verb: str, *options: str, **arguments: Any) -> tuple[Any, list[str]]:
    """The result of a tool, called over stdio as an assistant does, and its progress."""
    told: list[str] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        del done, total
        told.append(message or "")

    async def main() -> Any:
        server = mcp.StdioServerParameters(
            command=sys.executable,
            args=["-m", "finecast", "mcp", str(folder), *options],
            env=dict(os.environ),
        )
        async with mcp.Client(mcp.stdio_client(server)) as client:
            return await client.call_tool(verb, arguments, progress_callback=progress)

    return anyio.run(main), told


def test_every_verb_is_a_tool_with_a_description() -> None:
    tools = Tools(folder=Path.cwd()).listed()
    assert {tool.name for tool in tools} == set(VERBS) - {"mcp"}
    for tool in tools:
        properties = tool.input_schema["properties"]
        assert set(tool.input_schema["required"]) <= set(properties)
        assert all(p.get("description") for p in properties.values()), tool.name


def test_options_have_their_types() -> None:
    found = schema("tune")
    assert found["required"] == ["model", "output"]
    properties = found["properties"]
    assert properties["tolerance"]["type"] == "number"
    assert properties["batch"]["type"] == "integer"
    assert properties["force"]["type"] == "boolean"
    assert properties["exclude"] == {
        "type": "array",
        "items": {"type": "string"},
        "description": properties["exclude"]["description"],
    }
    assert "json" not in properties


def test_arguments_become_the_words_of_a_command_line(tmp_path: Path) -> None:
    words = Tools(folder=tmp_path).command_line(
        "convert",
        {
            "model": "-m.onnx",
            "output": "low.onnx",
            "auto_cast": "all",
            "exclude": ["a", "-b"],
            "force": True,
            "external_data": False,
        },
    )
    assert words == [
        "convert",
        "--json",
        "--output=low.onnx",
        "--auto-cast=all",
        "--exclude=a",
        "--exclude=-b",
        "--force",
        "--one-file",
        "--",
        "-m.onnx",
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"model": "../m.onnx"}, "out of the server's folder"),
        ({"model": "/etc/passwd"}, "out of the server's folder"),
        ({"model": "m.onnx", "data": "../../d.npz"}, "out of the server's folder"),
        ({"model": "m.onnx", "eval": "../e.py:f"}, "runs code"),
        ({"model": "m.onnx", "calib": "e.py:f"}, "runs code"),
        ({"model": "m.onnx", "calib": "e:f"}, "runs code"),  # a file of any name is Python
        ({"model": "m.onnx", "calib": "e.PY:f"}, "runs code"),
        ({"model": "m.onnx", "calib": "../c.npz"}, "out of the server's folder"),
        ({"model": "m.onnx", "trust": True}, "runs code"),
        ({"model": "m.onnx", "modle": "x"}, "modle"),
        ({"model": {"a": 1}}, "is no text"),
    ],
)
def test_what_leads_out_or_runs_code_is_refused(
    tmp_path: Path, arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        Tools(folder=tmp_path).command_line("tune", arguments)


def test_a_link_that_leads_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="out of the server's folder"):
        Tools(folder=tmp_path / "in").command_line("inspect", {"model": "link/m.onnx"})


def test_code_is_run_where_the_server_trusts_it_and_only_from_the_folder(
    tmp_path: Path,
) -> None:
    tools = Tools(folder=tmp_path, trust=True)
    assert "--eval=e.py:f" in tools.command_line("tune", {"model": "m", "eval": "e.py:f"})
    with pytest.raises(UsageError, match="out of the server's folder"):
        tools.command_line("tune", {"model": "m", "eval": "../e.py:f"})
    (tmp_path / "link").symlink_to("/etc/hosts")
    for value in ("link:f", "../e:f"):
        with pytest.raises(UsageError, match="out of the server's folder"):
            tools.command_line("tune", {"model": "m", "calib": value})


def test_a_result_is_the_json_of_the_verb(folder: Path) -> None:
    result, _ = called(folder, "inspect", model="model.onnx")
    assert not result.is_error
    assert result.structured_content == json.loads(result.content[0].text)
    assert result.structured_content["parameters"] > 0


def test_an_error_is_a_result_that_the_client_can_read(folder: Path) -> None:
    result, _ = called(folder, "inspect", model="modle.onnx")
    assert result.is_error
    assert result.structured_content["error"]["exit_code"] == 2
    assert not list(folder.glob("*.lock"))


def test_a_call_that_is_cancelled_leaves_nothing_behind(folder: Path) -> None:
    async def main() -> None:
        tools = Tools(folder=folder)
        async with mcp.Client(tools.server()) as client:
            with anyio.move_on_after(3) as scope:
                await client.call_tool(
                    "tune",
                    {"model": "model.onnx", "output": "t.onnx", "data": "data.npz"},
                )
            assert scope.cancelled_caught
            with anyio.fail_after(30):
                while [p for p in folder.iterdir() if p.name.startswith(".")]:
                    await anyio.sleep(0.1)

    anyio.run(main)
    assert not (folder / "t.onnx").exists()


def test_what_libraries_print_is_progress(folder: Path) -> None:
    """Standard output has the protocol alone; a call's has its result alone."""
    (folder / "noise.py").write_text(
        "import os\nprint('in Python')\nos.write(1, b'to a descriptor\\n')\n"
        "def rule(node): return None\n",
        encoding="utf-8",
    )
    given = {"model": "model.onnx", "output": "low.onnx", "rules": ["noise.py"]}
    result, told = called(folder, "convert", "--trust", **given, auto_cast="all")
    assert result.structured_content.get("output") == "low.onnx", result
    assert {"in Python", "to a descriptor"} <= {*told}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_ends_the_server_while_its_input_is_open(
    folder: Path, number: signal.Signals
) -> None:
    """A thread of the SDK waits for standard input's next line: Python would join it."""
    asked = {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    }
    line = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": asked}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-m", "finecast", "mcp", str(folder)],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stderr is not None
        server.stdin.write(json.dumps(line).encode() + b"\n")
        server.stdin.flush()
        assert b"result" in server.stdout.readline()
        server.send_signal(number)
        try:
            assert server.wait(timeout=30) == ExitCode.INTERRUPTED
        finally:
            server.kill()
        assert server.stderr.read().startswith(b"error: interrupted")

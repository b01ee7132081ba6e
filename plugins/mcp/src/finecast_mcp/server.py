"""``finecast mcp``: the verbs as tools of a Model Context Protocol server, over stdio.

Laws: a tool is a verb, its arguments are the verb's options by their names, its result what
the verb prints with ``--json``. Each call is a process of its own in the server's folder: when
the call is cancelled the process is ended as Ctrl-C ends it, and a crash ends that call alone.
A path that leads out of the folder is refused. So is what runs code, unless the server was
started to trust it.

Protocol: https://modelcontextprotocol.io/specification; the server is the official SDK's.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from finecast.errors import EngineError, UsageError
from finecast.terminal import results

if TYPE_CHECKING:
    import anyio.abc
    from mcp import types
    from mcp.server import Server

_RUNS_CODE: Final = frozenset({"trust", "check", "eval", "rules"})
"""Options that run code which a file brings."""
_DATA: Final = frozenset({"data", "calib"})
"""Options that do so where they name a function."""
_NAMES_FILES: Final = frozenset({"check", "eval", *_DATA})
"""Options whose files may have a function behind them; others have paths as values."""
_NO_OPTIONS: Final = frozenset({"json", "help"})
_ENDING_S: Final = 10.0
"""Seconds that a cancelled verb has to clean up in."""


def run(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Models, data and results are in this folder."),
    ] = Path(),
    trust: Annotated[
        bool,
        typer.Option(
            "--trust",
            help="Let clients run code from files in the folder: --check, --eval, --rules,"
            " --trust.",
        ),
    ] = False,
) -> None:
    """Serve the verbs as tools of the Model Context Protocol, over stdio.

    A client, such as an assistant or an editor, starts this command and calls the verbs by
    their options; each result is what --json prints. Long work reports its progress and can be
    cancelled. Paths that lead out of the folder are refused, and so are options that run code,
    unless --trust is given.

    Example:
      finecast mcp models/
    """
    if importlib.util.find_spec("mcp") is None:
        raise EngineError("finecast mcp needs the SDK", fix="pip install mcp")
    if not folder.is_dir():
        raise UsageError("no such folder", where=str(folder), fix="give one that exists")
    import anyio

    from finecast.cli import end_interrupted

    # It would log a traceback of the interrupt, now and then, where that ends a task.
    logging.getLogger("asyncio").disabled = True
    try:
        anyio.run(_serve, Tools(folder=folder.resolve(), trust=trust))
    except KeyboardInterrupt:
        # A thread of the SDK waits for the next line of standard input. Python would join it,
        # so that the process would stay until its client closes that.
        end_interrupted()


async def _serve(tools: Tools) -> None:
    import anyio
    from mcp.server.stdio import stdio_server

    server = tools.server()
    # Without a stream it would take sys.stdout, which is not that of results.
    answers = TextIOWrapper(results().buffer, encoding="utf-8")
    async with stdio_server(stdout=anyio.wrap_file(answers)) as (read, write):
        await server.run(read, write, server.create_initialization_options())


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The verbs as tools.

    Attributes:
        folder: The folder, absolute, in which verbs run and all files have to be.
        trust: Whether options that run code are served.
    """

    folder: Path
    trust: bool = False

    def server(self) -> Server[Any]:
        """A server of the SDK with these tools."""
        from mcp import types
        from mcp.server import Server

        from finecast.measure import version_of

        async def listed(_context: Any, _page: Any) -> types.ListToolsResult:
            return types.ListToolsResult(tools=self.listed())

        async def called(
            context: Any, asked: types.CallToolRequestParams
        ) -> types.CallToolResult:
            return await self.call(asked.name, asked.arguments or {}, context.session)

        return Server(
            "finecast",
            version=version_of("finecast") or "",
            instructions="Mixed precision for trained models: start with inspect and doctor,"
            " then tune with data and a metric. Results are JSON.",
            on_list_tools=listed,
            on_call_tool=called,
        )

    def listed(self) -> list[types.Tool]:
        """All tools, each with the schema of its verb's options."""
        from mcp import types

        from finecast.cli import VERBS

        return [
            types.Tool(name=verb, description=entry.summary, input_schema=schema(verb))
            for verb, entry in VERBS.items()
            if verb != "mcp"
        ]

    def command_line(self, verb: str, arguments: Mapping[str, Any]) -> list[str]:
        """The words after ``finecast`` that call ``verb`` with these arguments.

        Raises:
            UsageError: If there is no such verb or option, a value is of another type, leads
                out of the folder, or runs code.
        """
        from finecast.cli import VERBS
        from finecast.naming import look_up

        look_up(verb, {v: v for v in VERBS if v != "mcp"}, what="tool")
        parameters = {name: (name, p) for name, p in _parameters(verb).items()}
        options, values = ["--json"], list[str]()
        for given_name, given in arguments.items():
            name, parameter = look_up(given_name, parameters, what="option", where=verb)
            for value in given if isinstance(given, list) else [given]:
                text = self._text(name, parameter, value)
                if parameter.param_type_name == "argument":
                    values.append(text)
                elif parameter.is_flag:
                    options += _flag(parameter, value)
                else:
                    options.append(f"{_longest(parameter)}={text}")
        return [verb, *options, "--", *values]

    def _text(self, name: str, parameter: Any, value: Any) -> str:
        if not isinstance(value, (str, int, float)):
            raise UsageError(
                f"{value!r} is no text, number or truth value", where=name, fix="give one"
            )
        from finecast.data import file_of, names_function

        text = str(value)
        runs_code = name in _RUNS_CODE or (name in _DATA and names_function(text))
        if runs_code and value is not False and not self.trust:
            raise UsageError(
                "this runs code of a file, which the server was not started to trust",
                where=name,
                fix="start it with finecast mcp --trust",
            )
        if name in _NAMES_FILES or "Path" in str(parameter.type_descriptor.annotation):
            path = file_of(text) if name in _NAMES_FILES else Path(text)
            if not (self.folder / path).resolve().is_relative_to(self.folder):
                raise UsageError(
                    f"{str(path)!r} leads out of the server's folder",
                    where=name,
                    fix=f"name a file in {self.folder}",
                )
        return text

    async def call(
        self, verb: str, arguments: Mapping[str, Any], session: Any
    ) -> types.CallToolResult:
        """Run a verb; its progress is reported to the client of ``session``."""
        try:
            words = self.command_line(verb, arguments)
        except UsageError as error:
            parts = {"what": error.what, "where": error.where, "fix": error.fix}
            return _result({"error": {**parts, "exit_code": int(error.exit_code)}})
        import anyio

        command = [sys.executable, "-m", "finecast", *words]
        async with await anyio.open_process(command, cwd=self.folder) as process:
            try:
                printed = await _followed(process, session)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await _end(process)
                raise
        try:
            return _result(json.loads(printed))
        except ValueError:
            code = process.returncode
            what = f"finecast {verb} ended with code {code} and printed no JSON"
            return _result(
                {"error": {"what": what, "where": "", "fix": "", "exit_code": code}}
            )


def schema(verb: str) -> dict[str, Any]:
    """The JSON Schema of a verb's options and arguments."""
    parameters = _parameters(verb)
    return {
        "type": "object",
        "properties": {name: _property(parameter) for name, parameter in parameters.items()},
        "required": [name for name, parameter in parameters.items() if parameter.required],
        "additionalProperties": False,
    }


def _parameters(verb: str) -> dict[str, Any]:
    """A verb's options and arguments by the names that they have in a tool."""
    from finecast.cli import command

    parameters = {}
    for parameter in command(verb).params:
        is_option = parameter.param_type_name == "option"
        name = _longest(parameter).lstrip("-").replace("-", "_")
        if not (is_option and name in _NO_OPTIONS):
            parameters[name if is_option else _argument(parameter)] = parameter
    return parameters


def _argument(parameter: Any) -> str:
    """An argument's name as ``--help`` shows it: ``MODEL...`` is model."""
    shown = parameter.metavar or parameter.name
    return "".join(letter for letter in shown if letter.isidentifier()).lower()


def _longest(parameter: Any) -> str:
    return max(parameter.opts, key=len)


def _flag(parameter: Any, value: Any) -> list[str]:
    if value:
        return [_longest(parameter)]
    return [*parameter.secondary_opts[:1]]


def _property(parameter: Any) -> dict[str, Any]:
    annotation = str(parameter.type_descriptor.annotation)
    kind = "string"
    if parameter.param_type_name == "option" and parameter.is_flag:
        kind = "boolean"
    elif "int" in annotation:
        kind = "integer"
    elif "float" in annotation or isinstance(parameter.default, float):
        kind = "number"
    property_schema: dict[str, Any] = {"type": kind}
    if parameter.multiple or parameter.nargs == -1:
        property_schema = {"type": "array", "items": property_schema}
    if parameter.help:
        property_schema["description"] = " ".join(parameter.help.split())
    return property_schema


def _result(found: Any) -> types.CallToolResult:
    from mcp import types

    content = found if isinstance(found, dict) else {"result": found}
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=json.dumps(found))],
        structured_content=content,
        is_error="error" in content,
    )


async def _followed(process: anyio.abc.Process, session: Any) -> str:
    """What a process prints; each line of its standard error is told as progress."""
    import anyio
    from anyio.streams.text import TextReceiveStream

    assert process.stdout is not None
    assert process.stderr is not None
    printed: list[str] = []

    async def follow() -> None:
        assert process.stderr is not None
        told = 0
        async for text in TextReceiveStream(process.stderr, errors="replace"):
            for line in filter(None, text.splitlines()):
                told += 1
                await session.report_progress(told, message=line)

    async with anyio.create_task_group() as group:
        group.start_soon(follow)
        printed += [t async for t in TextReceiveStream(process.stdout, errors="replace")]
    await process.wait()
    return "".join(printed)


async def _end(process: anyio.abc.Process) -> None:
    """End a process as Ctrl-C does, so that it cleans up; kill it if it does not end."""
    import anyio

    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
        with anyio.move_on_after(_ENDING_S):
            await process.wait()
        if process.returncode is None:
            process.kill()

"""Nothing that a file or an exception brings acts on the terminal."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from finecast import cli, terminal
from finecast.cli import output
from finecast.errors import ExitCode
from finecast.plugin import say
from tests.cli.conftest import Answer

Finecast = Callable[..., Answer]

NASTY = "a\x1b[2J\x07b\r\x9bc\u202ed\u2066e\x7ff\u2028g[red]h[/red]:smile:\U000e0041"
ACTS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f]")


@given(st.text())
def test_safe_text_is_one_line_that_prints(text: str) -> None:
    safe = terminal.safe(text)
    assert not ACTS.search(safe)
    assert "\n" not in safe
    assert len(safe.splitlines()) <= 1
    safe.encode()  # no lone surrogates
    assert terminal.safe(safe) == safe


@pytest.mark.parametrize("text", ["plain", "é", "日本語", "/block.0/MatMul[1]", "a\\nb", "😀"])
def test_what_is_harmless_stays(text: str) -> None:
    assert terminal.safe(text) == text


@pytest.mark.parametrize(
    "write",
    [
        lambda: say(NASTY),
        lambda: output.warn(NASTY),
        lambda: output.write_error(NASTY),
        lambda: output.write_table(output.new_table(NASTY, (NASTY,), (NASTY,)), NASTY),
    ],
)
def test_every_way_out_escapes(
    write: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    write()
    said = "".join(capsys.readouterr())
    assert not ACTS.search(said)
    assert r"\x1b[2J" in said
    assert "[red]h[/red]:smile:" in said  # no markup of rich's either


def test_notes_below_a_table_are_wrapped_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a pipe as in a terminal; what is copied, and a name of any length, stays whole."""
    monkeypatch.setenv("COLUMNS", "40")
    name = "a/" * 30 + "b-c"
    command = output.Verbatim(f"run it: {'word ' * 20}")
    words = "  openvino:CPU int8: no kernel of this CPU sums such products exactly"
    output.write_table(output.new_table("", ("a",)), words, f"see {name}", command)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-5:] == [
        "  openvino:CPU int8: no kernel of this",
        "    CPU sums such products exactly",
        "see",
        f"  {name}",
        str(command),
    ]


def test_a_terminal_without_unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    say("é日")
    ascii_only.flush()
    assert ascii_only.buffer.getvalue() == rb"\xe9\u65e5" + b"\n"  # pyright: ignore[reportAttributeAccessIssue]


def test_a_table_on_a_terminal_without_unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    table = output.new_table("titlé", ("héad",))
    output.add_row(table, "é日")
    output.write_table(table)
    ascii_only.flush()
    written = ascii_only.buffer.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert all(text in written for text in (rb"titl\xe9", rb"h\xe9ad", rb"\xe9\u65e5"))


def test_one_place_writes() -> None:
    folder = Path(cli.__file__).parent
    said = re.compile(r"\bprint\(|sys\.std(out|err)\.write")
    lines = [
        line.strip()
        for path in folder.glob("*.py")
        if path.name != "output.py"
        for line in path.read_text(encoding="utf-8").splitlines()
        if said.search(line)
    ]
    assert all("safe(" in line or "__version__" in line for line in lines), lines


@pytest.fixture
def nasty(tmp_path: Path) -> Path:
    """A model whose every name is hostile."""
    nodes = [
        helper.make_node("MatMul", [f"x{NASTY}", "w"], ["m"], f"node{NASTY}"),
        helper.make_node(f"Op{NASTY}", ["m"], ["y"], "other", domain=f"dom{NASTY}"),
    ]
    x = helper.make_tensor_value_info(f"x{NASTY}", TensorProto.FLOAT, [2, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])
    w = onnx.numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    graph = helper.make_graph(nodes, f"graph{NASTY}", [x], [y], [w])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(f"dom{NASTY}", 1)]
    path = tmp_path / f"nasty{NASTY.replace('/', '')}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


@pytest.mark.parametrize("as_json", [[], ["--json"]])
@pytest.mark.parametrize(
    "line",
    [
        ["inspect", "{}"],
        ["explain", "{}", f"node{NASTY}"],
        ["explain", "{}", f"no{NASTY}"],
        ["profile", "{}"],
        ["convert", "{}", "-o", "low.onnx", "--no-verify"],
        ["convert", "{}", "-o", f"{NASTY}/low.onnx"],
        ["convert", "{}", "-o", "low.onnx", "--exclude", NASTY],
        ["tune", "{}", "-o", "low.onnx", "--data", f"{NASTY}.npz"],
        [NASTY],
        ["inspect", "{}", f"--{NASTY}"],
    ],
)
def test_hostile_names_do_nothing(
    finecast: Finecast,
    nasty: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: list[str],
    as_json: list[str],
) -> None:
    monkeypatch.chdir(nasty.parent)
    answer = finecast(*(nasty if word == "{}" else word for word in line), *as_json)
    assert answer.code in (ExitCode.DONE, ExitCode.USAGE, ExitCode.FAILED)
    assert not ACTS.search(answer.out + answer.err)
    assert answer.err.count("\n") <= 5
    if as_json:
        json.loads(answer.out)


def test_the_width_is_columns_or_the_terminal_s_or_80(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "123")
    assert output.width() == 123
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((97, 24)))
    assert output.width() == 97

    def no_terminal(_: int) -> os.terminal_size:
        raise OSError

    monkeypatch.setattr(os, "get_terminal_size", no_terminal)
    for unusable in ("", "wide", "0", "-5"):
        monkeypatch.setenv("COLUMNS", unusable)
        assert output.width() == 80


@pytest.mark.parametrize(
    ("variable", "value", "coloured"),
    [
        ("TERM", "xterm", True),
        ("TERM", "dumb", False),
        ("NO_COLOR", "1", False),
        ("NO_COLOR", "", True),
    ],
)
def test_an_error_has_a_colour_where_a_terminal_shows_it(
    variable: str, value: str, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, side = os.openpty()
    try:
        with os.fdopen(side, "w") as terminal:
            monkeypatch.delenv("NO_COLOR", raising=False)
            monkeypatch.setenv("TERM", "xterm")
            monkeypatch.setenv(variable, value)
            monkeypatch.setattr(sys, "stderr", terminal)
            output.write_error("it failed")
            assert (b"\x1b" in os.read(main, 99)) == coloured
    finally:
        os.close(main)


def test_in_a_pipe_the_terminal_is_that_of_another_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main, side = os.openpty()
    termios.tcsetwinsize(side, (24, 101))
    try:
        with os.fdopen(side, "w") as terminal, Path(os.devnull).open("w") as null:
            monkeypatch.delenv("COLUMNS", raising=False)
            monkeypatch.setattr(sys, "stdout", null)
            monkeypatch.setattr(sys, "stderr", terminal)
            assert output.width() == 101
    finally:
        os.close(main)


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
@pytest.mark.parametrize("fold", ["", "name", ("name", "kind")])
def test_nothing_in_a_table_is_cut(
    columns: int,
    fold: str | tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At 80 columns figures ended in dots and columns of words vanished."""
    monkeypatch.setenv("COLUMNS", str(columns))
    table = output.new_table("", ("name", "kind", "more"), ("ms\na call", "share"), fold=fold)
    kind, figure = "kind" * 16, "123456.789012"
    output.add_row(table, "name" * 9, kind, "more" * 5, figure, "12.5%")
    output.write_table(table)
    said = capsys.readouterr().out
    assert "\u2026" not in said
    assert figure in said
    assert "12.5%" in said
    letters = re.sub(r"[^a-z]", "", said)
    assert len(letters) == len("namekindmoremsacallshare") + 36 + 64 + 20
    lines = said.splitlines()
    assert lines == [line.rstrip() for line in lines]
    assert max(map(len, lines)) <= max(columns, 75)


def test_a_name_that_is_too_long_ends_its_line_after_a_slash(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``convolu`` and ``tion`` stood in two lines, of a name of Keras."""
    monkeypatch.setenv("COLUMNS", "50")
    table = output.new_table("", ("op", "format"), ("us",), fold=("op", "format"))
    output.add_row(table, "sequential_1/conv2d_1_2/convolution +2", "bf16", "145.123")
    output.add_row(table, "sequential_1/Relu", "bf16", "1")
    output.write_table(table)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["sequential_1/conv2d_1_2/", "bf16", "145.123"] in lines
    assert ["convolution", "+2"] in lines
    assert ["sequential_1/Relu", "bf16", "1"] in lines


def test_a_warning_is_wrapped_in_a_terminal_and_one_line_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Terminals cut long lines in the middle of a word."""
    text = "the model with its products alone in reduced precision gives as much " * 3
    monkeypatch.setenv("COLUMNS", "60")
    main, side = os.openpty()
    try:
        with os.fdopen(side, "w") as terminal, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", terminal)
            output.warn(text)
            shown = os.read(main, 999).decode().splitlines()
    finally:
        os.close(main)
    assert len(shown) > 3
    assert max(map(len, shown)) <= 60
    assert " ".join(" ".join(shown).split()) == f"warning: {text.strip()}"
    output.warn(text)
    assert capsys.readouterr().err == f"warning: {text.strip()}\n"

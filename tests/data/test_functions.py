from __future__ import annotations

from pathlib import Path

import pytest

from finecast.data.functions import load_function
from finecast.errors import UsageError


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(text)
    return path


def test_functions_are_found_with_what_lies_beside_them(tmp_path: Path) -> None:
    (tmp_path / "beside_mine.py").write_text("VALUE = 41\n")
    path = written(
        tmp_path, "import beside_mine\n\ndef f():\n    return beside_mine.VALUE + 1\n"
    )
    assert load_function(f"{path}:f")() == 42


def test_a_file_may_change_where_modules_are_found(tmp_path: Path) -> None:
    path = written(tmp_path, "import sys\nsys.path.pop(0)\ndef f():\n    return 42\n")
    assert load_function(f"{path}:f")() == 42


@pytest.mark.parametrize("spec", ["f", "mine.py", ":f", "mine.py:"])
def test_specs_that_name_no_function(spec: str) -> None:
    with pytest.raises(UsageError, match=r"write FILE\.py:FUNCTION"):
        load_function(spec)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such Python file"):
        load_function(f"{tmp_path}/none.py:f")


def test_a_function_that_is_missing(tmp_path: Path) -> None:
    path = written(tmp_path, "value = 1\ndef g(): ...\n")
    for name in ("f", "value"):
        with pytest.raises(UsageError, match="it defines g"):
            load_function(f"{path}:{name}")


@pytest.mark.parametrize(
    ("text", "line", "kind"),
    [
        ("x = 1\n\nraise KeyError('k')\n", 3, "KeyError"),
        ("x = 1\ndef f(:\n", 2, "SyntaxError"),
        ("import no_such_module\n", 1, "ModuleNotFoundError"),
    ],
)
def test_a_failing_import_names_the_line(
    tmp_path: Path, text: str, line: int, kind: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError, match=rf"importing fails: {kind}.*mine\.py:{line}"):
        load_function(f"{path}:f")

"""What TensorFlow prints of itself as it loads does not reach the user's terminal."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("tensorflow")

LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def said(code: str, **environment: str) -> str:
    known = {n: v for n, v in os.environ.items() if n != LEVEL}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**known, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stderr


def test_notices_are_left_out_and_all_else_is_not() -> None:
    code = (
        "import os, sys, importlib\n"
        "load = importlib.import_module\n"
        "def other(name):\n"
        "    if name == 'tensorflow': os.write(2, b'an error\\n')\n"
        "    return load(name)\n"
        "importlib.import_module = other\n"
        "import finecast_tensorflow.frontend.library as library\n"
        "library.tf.constant(1.0) + 1\n"
        "print('end', file=sys.stderr)\n"
    )
    assert set(said(code).splitlines()) == {"an error", "end"}
    assert set(said(code, **{LEVEL: "3"}).splitlines()) == {"an error", "end"}


def test_a_user_may_want_to_see_them() -> None:
    shown = said("import finecast_tensorflow.frontend.library", **{LEVEL: "0"})
    assert "This TensorFlow binary is optimized" in shown  # on every CPU

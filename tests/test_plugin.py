"""Plugins: found by their entry points, each in a distribution of its own."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import finecast
from finecast import plugin
from finecast.builtin import CORE
from finecast.cli import VERBS
from finecast.errors import FinecastError

TOY = Path(__file__).parent / "toy_plugin"
DIGITS = Path(__file__).parents[1] / "examples" / "digits"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the toy plugin, installed from its own wheel."""
    folder = tmp_path_factory.mktemp("toy")
    source = shutil.copytree(TOY, folder / "source")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    command += ["--no-deps", "--no-build-isolation", "--target", str(folder / "site")]
    subprocess.run([*command, str(source)], check=True, capture_output=True, timeout=300)
    return folder / "site"


def run(site: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """The command line where the packages of ``site`` are installed, too."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "finecast", *map(str, words)]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, timeout=300
    )


def test_a_plugin_s_verb_is_one_of_finecast_s(installed: Path) -> None:
    assert "greet    Say how many ops a model has." in run(installed, "--help").stdout
    answer = run(installed, "greet", DIGITS / "digits.onnx")
    assert answer.stdout == "hello, digits.onnx of 25 ops\n"
    assert answer.stderr == ""


def test_a_plugin_s_engine_runs_models(installed: Path, tmp_path: Path) -> None:
    words = ["convert", DIGITS / "digits.onnx", "-o", tmp_path / "low.onnx", "--json"]
    answer = run(installed, *words, "--auto-cast", "all", "--engine", "reference")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["verified"]["engine"] == "reference"


def test_a_plugin_s_engine_is_profiled(installed: Path) -> None:
    words = ["profile", DIGITS / "digits.onnx", "--engine", "reference", "--json"]
    answer = run(installed, *words, "--runs", "2", "--seconds", "0")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["engine"] == "reference:CPU"
    other = run(installed, "profile", DIGITS / "digits.onnx", "--engine", "torch")
    assert "openvino or onnxruntime or reference" in other.stderr
    shown = " ".join(run(installed, "profile", "--help").stdout.split())
    assert "torch-eager" in shown
    assert "reference" in shown  # the help named engines as they were once


def test_a_plugin_s_engine_runs_models_of_every_kind_that_it_states(
    installed: Path, tmp_path: Path
) -> None:
    """An engine could be declared for one kind of files alone."""
    openvino = pytest.importorskip("openvino")
    source, low = tmp_path / "digits.xml", tmp_path / "low.xml"
    model = openvino.convert_model(DIGITS / "digits.onnx")
    openvino.save_model(model, source, compress_to_fp16=False)
    words = ["convert", source, "-o", low, "--json", "--auto-cast", "all"]
    answer = run(installed, *words, "--engine", "reference")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["verified"]["engine"] == "reference"
    timed = run(installed, "profile", low, "--engine", "reference", "--json", "--runs", "2")
    assert json.loads(timed.stdout)["engine"] == "reference:CPU"
    other = run(installed, "convert", source, "-o", low, "--engine", "onnxruntime", "--force")
    assert "use --engine openvino or reference" in other.stderr


def test_a_plugin_s_module_is_one_object_under_both_names(installed: Path) -> None:
    code = (
        "import finecast, finecast.toy, finecast_toy.greet as own\n"
        "assert finecast.toy is own and finecast.greet is own.greeting\n"
        "assert own.__name__ == own.__spec__.name == 'finecast_toy.greet'\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_a_plugin_that_fails_costs_what_it_adds_and_a_line(
    installed: Path, tmp_path: Path
) -> None:
    site = shutil.copytree(installed, tmp_path / "site")
    module = site / "finecast_toy" / "plugin.py"
    module.write_text("raise RuntimeError('broken here')\n")
    answer = run(site, "formats")
    assert answer.returncode == 0
    line = "warning: the plugin 'toy' is not loaded: RuntimeError: broken here"
    assert answer.stderr.splitlines() == [line]
    assert run(site, "greet", "m.onnx").returncode == 2


def test_a_plugin_whose_package_is_absent_is_passed_over(
    installed: Path, tmp_path: Path
) -> None:
    site = shutil.copytree(installed, tmp_path / "site")
    shutil.rmtree(site / "finecast_toy")
    assert run(site, "formats").stderr == ""


def test_the_core_registers_what_it_has_by_the_same_values() -> None:
    assert plugin.plugins()[0] is CORE
    assert {verb.name for verb in CORE.verbs} <= {*VERBS}


@pytest.mark.skipif(
    importlib.util.find_spec("finecast_tensorflow") is None, reason="Keras is a plugin's"
)
def test_a_module_is_an_attribute_or_says_what_it_needs() -> None:
    """``finecast.keras`` was said to be no attribute, and ``import finecast.keras`` works."""
    assert finecast.errors is importlib.import_module("finecast.errors")
    code = (
        "import sys; sys.modules['torch'] = sys.modules['tensorflow'] = None\n"
        "import finecast\n"
        "for name in ('keras', 'torch'):\n"
        "    try: getattr(finecast, name)\n"
        "    except AttributeError as error: print(error)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(printed) == 2
    assert re.match(r"finecast.keras: TensorFlow is not installed: pip install", printed[0])
    assert "PyTorch" in printed[1]


def test_what_no_plugin_has_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="'finecast' has no attribute 'nothing'"):
        _ = finecast.nothing  # type: ignore[attr-defined]
    with pytest.raises(ModuleNotFoundError, match=r"finecast\.nothing"):
        __import__("finecast.nothing")


def test_a_name_that_a_plugin_s_package_lacks_is_an_error_with_those_it_has() -> None:
    """``finecast.compat.raf.CustomTypeHint``: that there is no such name was all it said."""
    attribute = plugin.lazily(dict.fromkeys(["check", "PrimType"], "finecast_toy.rules"))
    with pytest.raises(AttributeError, match="TypeHint': the names are PrimType, check"):
        attribute("CustomTypeHint")


def test_a_plugin_with_a_name_that_is_there_is_not_loaded() -> None:
    greeting = plugin.Verb("inspect", "Say hello.", "finecast_toy.greet")
    other = plugin.Plugin(name="other", summary="", verbs=(greeting,))
    assert plugin._taken(other, [CORE]) == "the verb 'inspect'"
    (engine, *_) = CORE.engines
    twice = plugin.Plugin(name="other", summary="", engines=(engine,))
    assert plugin._taken(twice, [CORE]) == f"the engine {engine.name!r}"
    assert not plugin._taken(plugin.Plugin(name="other", summary=""), [CORE])


@pytest.mark.parametrize(
    "reference",
    ["finecast_not_here.engine:Toy", "finecast.engines:Toy", "finecast.plugin:run"],
)
def test_a_reference_that_names_nothing_is_an_error_with_its_name(reference: str) -> None:
    with pytest.raises(FinecastError, match=re.escape(reference)):
        plugin.load(reference)

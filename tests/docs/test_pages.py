"""Every block of code in the documentation and the README runs.

Laws of a page: blocks run from top to bottom in one folder and one namespace.

- ``python`` blocks are executed; those with ``title="FILE"`` are written to that file.
- Lines of ``console`` blocks that begin with ``$`` are commands. finecast's run here, in this
  process; what installs, and what this table does not know, must be named in ``NOT_RUN``.
- A block after ``<!-- needs: MODULE -->`` runs where the module is installed.
- A block after ``<!-- not run: REASON -->`` is shown only.
- ``<!-- setup: NAME -->`` at the top of a page names the files that it starts from.

A ``tune`` that finds nothing to gain on this CPU exits with 1 and writes nothing. The commands
after it need a model: its output is then the model converted to bf16.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from finecast import cli
from finecast.engines import installed
from finecast.native import subject
from tests import decoder as decoders

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
DIGITS = ROOT / "examples" / "digits"
UPSTREAM = (
    DOCS / "upstream"
)  # scripts that show faults: tests/devices/test_faults.py runs them
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)(?P<rest>[^\n]*)\n(?P<body>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
SHOWN_ONLY = re.compile(r"<!-- not run: [^>]+ -->\s*$")
NEEDS = re.compile(r"<!-- needs: (\w+) -->\s*$")
NOT_RUN = ("pip ", "make ", "docker ", "trtexec ", "python ", "curl ", "git ", "neuronx-cc ")
WITH_CODE = ("python", "console")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of code: its language, the file it is to be written to, its text."""

    language: str
    file: str
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page that run, in order."""
    text = page.read_text()
    return [
        Block(
            language=found["language"],
            file=title[1] if (title := re.search(r'title="([^"]+)"', found["rest"])) else "",
            text=re.sub(rf"^{found['indent']}", "", found["body"], flags=re.MULTILINE),
            line=text[: found.start()].count("\n") + 1,
        )
        for found in FENCE.finditer(text)
        if found["language"] in WITH_CODE and _runs(text[: found.start()])
    ]


def _runs(before: str) -> bool:
    """Whether the block after this text runs here."""
    needed = NEEDS.search(before)
    if needed is not None:
        return importlib.util.find_spec(needed[1]) is not None
    return SHOWN_ONLY.search(before) is None


def commands_of(block: Block) -> list[list[str]]:
    """The commands of a block, a line that ends in a backslash joined with the next."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [
        shlex.split(line[2:], comments=True)
        for line in lines
        if line.startswith("$ ") and not line[2:].startswith(NOT_RUN)
    ]


def digits(folder: Path, samples: int = 96) -> None:
    """A convolutional net, and the first samples of its data: emulation takes long on all."""
    shutil.copy(DIGITS / "digits.onnx", folder / "model.onnx")
    with np.load(DIGITS / "digits_eval.npz") as data:
        np.savez(folder / "data.npz", **{name: data[name][:samples] for name in data})
    shutil.copy(DIGITS / "digits_calib.npz", folder / "calib.npz")


def all_digits(folder: Path) -> None:
    """The same with all samples, of which a certificate needs many."""
    digits(folder, samples=600)


def versions(folder: Path) -> None:
    """The same net, and ``new.onnx``: trained further and exported with other names."""
    import onnx
    from onnx import numpy_helper

    digits(folder)
    proto, draw = onnx.load(folder / "model.onnx"), np.random.default_rng(0)
    for number, node in enumerate(proto.graph.node):
        node.name = f"node_{number}"
    for weight in proto.graph.initializer:
        array = numpy_helper.to_array(weight)
        if array.dtype == np.float32:
            moved = array * (1 + 1e-3 * draw.standard_normal(array.shape))
            made = numpy_helper.from_array(moved.astype(np.float32), weight.name)
            weight.CopyFrom(made)
    onnx.save(proto, folder / "new.onnx")


def ir(folder: Path) -> None:
    """The same net as OpenVINO's IR."""
    openvino = pytest.importorskip("openvino")
    digits(folder)
    model = openvino.Core().read_model(DIGITS / "digits.onnx")
    openvino.save_model(model, folder / "model.xml", compress_to_fp16=False)


def module(folder: Path) -> None:
    """PyTorch; the page makes its own module."""
    del folder
    pytest.importorskip("torch")


def keras(folder: Path) -> None:
    """Keras; the page makes its own model."""
    del folder
    pytest.importorskip("keras")


def nothing(folder: Path) -> None:
    """A page that starts from an empty folder."""
    del folder


def decoder(folder: Path) -> None:
    """A tiny decoder and a few texts; none without PyTorch, which trains it."""
    pytest.importorskip("torch")
    made = decoders.folder()
    shutil.copy(made / "decoder.onnx", folder)
    with np.load(made / "texts.npz") as texts:
        np.savez(folder / "texts.npz", **{name: texts[name][:8] for name in texts.files})


SETUPS: dict[str, Callable[[Path], None]] = {
    f.__name__: f for f in (digits, all_digits, versions, ir, module, keras, decoder, nothing)
}
PAGES = [
    page
    for page in (
        ROOT / "README.md",
        *sorted(set(DOCS.rglob("*.md")) - set(UPSTREAM.glob("*.md"))),
    )
    if blocks_of(page)
]


@pytest.mark.skipif(not installed("openvino"), reason="needs OpenVINO")
# A CPU that gains nothing by a format is told so by a warning.
@pytest.mark.filterwarnings("ignore::UserWarning")
# The compiler of PyTorch uses what PyTorch deprecates, as it is imported.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "MAX_STEPS", 3)  # each plan that is tried is compiled
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    named = re.search(r"<!-- setup: (\w+) -->", page.read_text())
    SETUPS[named[1] if named else "nothing"](tmp_path)
    names: dict[str, object] = {"__name__": page.stem}
    for block in blocks_of(page):
        at = f"{page.name}:{block.line}"
        if block.file:
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, at, "exec"), names)
        for words in commands_of(block) if block.language == "console" else ():
            run(words, at)


def worded(text: str) -> str:
    """The words of an output: without numbers, rules, widths of lines, and the machine."""
    words = " ".join(re.sub(r"\d[\d.]*", "#", text.replace("─", "")).split())
    return re.sub(r"on # cores? of .*?(?= relative output error)", "", words)


def test_the_readme_shows_what_tune_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In words alone: numbers are those of a recorded run."""
    monkeypatch.chdir(tmp_path)
    all_digits(tmp_path)
    blocks = blocks_of(ROOT / "README.md")
    block = next(b for b in blocks if b.text.startswith("$ finecast tune"))
    shown = re.split(r"^\$.*(?:\n    .*)*\n", block.text, flags=re.MULTILINE)[1]
    run(next(iter(commands_of(block))), "README.md")
    printed = worded(capsys.readouterr().out)
    for part in filter(None, map(worded, re.split(r"^\.\.\.$", shown, flags=re.MULTILINE))):
        assert part in printed


def run(words: list[str], at: str) -> None:
    """Run one command, and give what comes after it the files that it names."""
    assert words[0] == "finecast", f"{at}: a command that no test knows: {words}"
    study = words[2] if words[1] == "report" else ""
    if study.endswith(".study.db") and not Path(study).exists():
        return  # no plan promised to be faster on this CPU: nothing was tried
    code = cli.main([word for word in words[1:] if word != ">"])
    if code == 1 and words[1] == "tune":
        model, output = words[2], words[words.index("-o") + 1]
        plan = f"{output.removesuffix('.onnx').removesuffix('.xml').rstrip('/')}.plan.json"
        low = ("--auto-cast", "all", "--auto-cast-type", "bf16", "--no-verify", "--force")
        code = cli.main(["convert", model, "-o", output, *low, "--plan-out", plan])
    assert code == 0, f"{at}: exit code {code} of {shlex.join(words)}"


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md") if UPSTREAM not in p.parents}
    assert pages == listed


def test_the_written_pages_are_what_the_code_says() -> None:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts/reference.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["reference"] = script
    spec.loader.exec_module(script)
    for name, text in script.pages().items():
        written = (DOCS / "reference" / name).read_text()
        assert written == text, f"run python scripts/reference.py: {name} is stale"

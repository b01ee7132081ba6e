from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import finecast  # noqa: E402
import finecast.torch as ft  # noqa: E402
from finecast.cli import VERBS, main  # noqa: E402
from finecast.errors import UsageError  # noqa: E402
from finecast.native.torch import planning, subject  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _not_compiled(monkeypatch: pytest.MonkeyPatch, fast_bf16: None) -> None:
    """Modules are timed as they are."""
    monkeypatch.setattr(subject, "deployed", lambda: lambda module: module)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 10)).eval()
    batch = torch.export.Dim("batch", min=2, max=512)
    x = torch.randn(16, 32)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "m.pt2")
    samples = torch.randn(40, 32)
    labels = net(samples).argmax(1)
    np.savez(tmp_path / "d.npz", input=samples.numpy(), label=labels.numpy())
    return tmp_path / "m.pt2"


def test_convert_writes_a_program_and_reports_as_for_onnx(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    low, plan = model.with_name("low.pt2"), model.with_name("plan.json")
    options = ["--auto-cast", "all", "--auto-cast-type", "bf16", "--plan-out", str(plan)]
    assert main(["convert", str(model), "-o", str(low), *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ops"] == {"bf16": 3}
    assert report["size_bytes"]["after"] < report["size_bytes"]["before"]
    assert report["verified"]["engine"] == "torch"
    assert json.loads(plan.read_text())["engine"] == "torch"
    assert torch.export.load(low).module()(torch.randn(7, 32)).shape == (7, 10)
    assert main(["convert", str(model), "-o", str(low)]) == 2
    assert "output exists" in capsys.readouterr().err


def test_tune_keeps_its_exit_codes(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = model.with_name("tuned.pt2")
    data = ["--data", str(model.with_name("d.npz")), "--metric", "top1", "--json"]
    code = main(["tune", str(model), "-o", str(out), *data, "--tolerance", "0.2"])
    report = json.loads(capsys.readouterr().out)
    assert (code == 0) == (report["verdict"] == "improved") == out.exists()
    assert report["baseline"]["metric"] == 1.0


def test_an_output_of_another_kind_is_refused_before_any_work(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = model.with_name("m.onnx")
    other.write_bytes(b"refused by its name, before it is read")
    for given, named in ((model, "low.onnx"), (model, "low"), (other, "low.pt2")):
        out = given.with_name(named)
        ladder = [["ladder", "--target", "trn1"]] if "ladder" in VERBS else []
        for verb in (["convert"], ["tune"], *ladder):
            assert main([*verb, str(given), "-o", str(out)]) == 2
            assert f"name it {out.with_suffix(given.suffix)}" in capsys.readouterr().err
        assert not out.exists()
    with pytest.raises(UsageError, match=r"of the kind \.pt2 "):
        finecast.convert(finecast.load(model), model.with_name("low.onnx"))


def test_suffixes_count_in_any_case(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    upper = model.rename(model.with_name("NET.PT2"))
    assert main(["convert", str(upper), "-o", str(upper.with_name("LOW.Pt2"))]) == 0
    assert "verified in" in capsys.readouterr().out


def test_a_directory_is_called_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder := tmp_path / "folder.pt2").mkdir()
    for verb in (["inspect"], ["convert", "-o", str(tmp_path / "low.xml")]):
        assert main([*verb, str(folder)]) == 2
        assert "is a directory" in capsys.readouterr().err


def test_tune_keeps_a_study_and_takes_it_up(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = model.with_name("tuned.pt2")
    options = ["--data", str(model.with_name("d.npz")), "--metric", "top1", "--json"]
    options += ["--tolerance", "0.2", "--resume", "--force"]
    main(["tune", str(model), "-o", str(out), *options])
    first = json.loads(capsys.readouterr().out)
    main(["tune", str(model), "-o", str(out), *options])
    second = json.loads(capsys.readouterr().out)
    assert first["reused_trials"] == 0
    # On a busy machine one of the two may find nothing faster, and tries nothing.
    tried = {t["plan"] for t in first["trials"]} & {t["plan"] for t in second["trials"]}
    assert second["reused_trials"] == len(tried)


def test_apply_gives_what_convert_gave(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    low, plan, again = (model.with_name(n) for n in ("low.pt2", "p.json", "again.pt2"))
    options = ["--auto-cast", "all", "--plan-out", str(plan)]
    assert main(["convert", str(model), "-o", str(low), *options]) == 0
    assert main(["apply", str(plan), str(model), "-o", str(again)]) == 0
    x = torch.randn(7, 32)
    assert torch.equal(
        torch.export.load(low).module()(x), torch.export.load(again).module()(x)
    )
    assert "the plan is of" not in capsys.readouterr().err  # it is of this very file


def test_a_slow_format_asked_for_by_name_warns_with_the_ratio(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = model.with_name("low.pt2")
    options = ["--auto-cast", "all", "--auto-cast-type", "fp16"]
    assert main(["convert", str(model), "-o", str(out), *options]) == 0
    assert "fp16 runs at x0.1 of fp32's speed" in capsys.readouterr().err


def test_inspect_and_explain(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 32 * 512 + 512 + 512 * 10 + 10
    assert main(["explain", str(model), "0/linear", "--auto-cast", "all", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["format"] == "bf16"
    assert "kernels were not compared" not in said.err
    rules = model.with_name("rules.py")
    rules.write_text("def rule_all(view):\n    return 'fp32'\n")
    assert main(["explain", str(model), "0/linear", "--rules", str(rules), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "fp32"


def test_it_is_said_that_kernels_of_a_program_are_not_told(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["--no-memory", "--runs", "2", "--seconds", "0", "--engine", "torch-eager"]
    assert main(["profile", str(model), "--ops", *quick]) == 0
    assert "does not report its kernels: --ops shows nothing" in capsys.readouterr().err


def test_options_that_do_not_apply_are_refused(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(model.with_name("low.pt2"))
    data = ["--data", str(model.with_name("d.npz"))]
    for option, said in (
        (["--engine", "openvino"], "does not run models of PyTorch"),
        (["--engine", "onnxruntime:CUDA"], "does not run models of PyTorch"),
        (["--io", "low"], "--io does not apply"),
    ):
        assert main(["convert", str(model), "-o", out, *option]) == 2
        assert said in capsys.readouterr().err
        assert main(["tune", str(model), "-o", out, *data, *option]) == 2
        assert said in capsys.readouterr().err


def test_operands_are_not_adjusted_and_that_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--auto-cast matmult --auto-cast-type int8 --adjust bias"
    assert (
        main(["convert", str(model), "-o", str(model.with_name("low.pt2")), *words.split()])
        == 2
    )
    assert "in models of ONNX and OpenVINO" in capsys.readouterr().err
    assert not model.with_name("low.pt2").exists()


def test_a_file_that_would_run_code_needs_the_user_s_word(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reader = torch._C.PyTorchFileReader(str(model))
    bad = model.with_name("bad.pt2")
    writer = torch._C.PyTorchFileWriter(str(bad))
    for name in reader.get_all_records():
        if name.startswith((".data/", "version", "byteorder")):
            continue
        content = reader.get_record(name)
        if name == "models/model.json":
            content = content.replace(b"torch.ops.aten.relu.default", b"torch.hub.load")
        writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    assert main(["convert", str(bad), "-o", str(model.with_name("low.pt2"))]) == 3
    shown = capsys.readouterr().err
    assert "call torch.hub.load" in shown
    assert "--trust" in shown


def test_without_torch_the_message_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import importlib.util as u, sys; find = u.find_spec;"
        " u.find_spec = lambda name, *more: None if name == 'torch' else find(name, *more);"
        " from finecast.cli import main; sys.exit(main(['convert', 'm.pt2', '-o', 'l.pt2']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        # Where no other command has left anything that a warning would be about.
        cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr == ("error: .pt2 files need torch: pip install torch onnxscript\n")


@pytest.mark.parametrize("verb", ["convert", "tune", "explain"])
@pytest.mark.parametrize(
    ("options", "offered"),
    [
        (["--op", "linaer=fp32"], "linear"),
        (["--include", "0/lineal"], "0/linear"),
        (["--exclude", "nowhere"], "0/linear"),
    ],
)
def test_names_that_match_nothing_are_errors(
    model: Path, capsys: pytest.CaptureFixture[str], verb: str, options: list[str],
    offered: str,
) -> None:  # fmt: skip
    if verb == "tune" and "--include" in options:
        pytest.skip("tune has no such option")
    out, ran = model.with_name("low.pt2"), model.with_name("ran")
    score = model.with_name("score.py")
    score.write_text(f"def score(run):\n    open({str(ran)!r}, 'w')\n    return 1.0\n")
    more = {
        "convert": ["-o", str(out)],
        "tune": ["-o", str(out), "--eval", f"{score}:score"],
        "explain": ["0/linear"],
    }[verb]
    assert main([verb, str(model), *more, *options]) == 2
    shown = capsys.readouterr().err
    assert f"({options[0]})" in shown
    assert offered in shown
    assert not out.exists()
    assert not ran.exists()


def test_it_is_said_that_nothing_was_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = torch.export.export(nn.Linear(4, 4).double(), (torch.ones(2, 4).double(),))
    path, low = tmp_path / "fp64.pt2", tmp_path / "low.pt2"
    torch.export.save(program, path)
    for number, options in enumerate(([], ["--target", "trn1"])):
        out = low.with_stem(f"low{number}")
        assert (
            main(["convert", str(path), "-o", str(out), "--auto-cast", "all", *options]) == 0
        )
        assert "nothing was converted" in capsys.readouterr().err


def test_products_of_a_program_get_int8_op_by_op(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        planning,
        "compiled_frozen",
        lambda module, *_: (module, frozenset()),
    )
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    source, low = tmp_path / "net.pt2", tmp_path / "low.pt2"
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    torch.export.save(torch.export.export(net, (x,)), source)
    words = ["--auto-cast", "matmult", "--auto-cast-type", "int8", "--exclude", "linear_1"]
    assert main(["explain", str(source), "2/linear_1", *words]) == 0
    assert "2/linear_1" in capsys.readouterr().out
    assert main(["convert", str(source), "-o", str(low), *words]) == 0
    assert "on integers there alone" in capsys.readouterr().err
    program = ft.load(low)  # its ops on codes are known to the strict reader
    codes = [n for n in program.graph.nodes if "quantize_per_tensor" in str(n.target)]
    assert len(codes) == 2
    with torch.no_grad():
        got, want = program.module()(x), net(x)
    assert 0 < float((got - want).norm() / want.norm()) < 0.05

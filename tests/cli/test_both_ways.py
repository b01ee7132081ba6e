"""A verb writes the same bytes from a shell as from Python, with the same defaults."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import finecast
from finecast import api
from finecast.cli import main
from finecast.cli.groups import expanded
from finecast.naming import options_of

# What differs between two runs of one command: times, and files that are named after it.
OF_A_RUN = ("seconds", "phases_s", "output", "verified")
Case = tuple[list[str], Callable[[Path, Path], Any]]

CASES: dict[str, Case] = {
    # By a device's roofline: by times that are measured here, two runs may differ.
    "convert": (
        ["convert", "NET", "--target", "trn1"],
        lambda net, out: finecast.convert(net, out, target="trn1"),
    ),
    "convert with options": (
        *(["convert", "NET", "--auto-cast", "all", "--op", "Softmax=fp32"],),
        lambda net, out: finecast.convert(
            net, out, finecast.Policy("all", keep={"Softmax": "fp32"})
        ),
    ),
    "convert with sizes": (
        ["convert", "NET", "--auto-cast", "all", "--auto-cast-type", "fp16", "--dim", "N=3"],
        lambda net, out: finecast.convert(net, out, "all:fp16", dims={"N": 3}),
    ),
    "convert with data": (
        ["convert", "NET", "--auto-cast", "all", "--exclude", "bias", "--data", "DATA"],
        lambda net, out: finecast.convert(
            *(net, out, finecast.Policy("all", exclude=["bias"])),
            data=finecast.DataOptions(data=net.with_name("data.npz")),
        ),
    ),
    "tune": (
        ["tune", "NET", "--data", "DATA", "--metric", "cosine", "--target", "trn1"],
        lambda net, out: finecast.tune(
            net, out, data=net.with_name("data.npz"), metric="cosine", target="trn1"
        ),
    ),
    "tune with options": (
        [
            *("tune", "NET", "--data", "DATA", "--metric", "cosine", "--target", "trn1"),
            *("--max-drop", "0.5", "--batch", "16"),
            *("--auto-cast-type", "bf16,fp16", "--objective", "size", "--of", "y"),
        ],
        lambda net, out: finecast.tune(
            *(net, out),
            policy="auto:bf16,fp16",
            goal=finecast.Goal(
                criterion=finecast.Criterion(
                    kind=finecast.CriterionKind.ABSOLUTE, tolerance=0.5
                ),
                objective=finecast.Objective.SIZE,
            ),
            target="trn1",
            data=net.with_name("data.npz"),
            metric="cosine",
            batch=16,
            of="y",
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_the_same(
    case: str, net: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, call = CASES[case]
    shell, python = net.with_name("shell.onnx"), net.with_name("python.onnx")
    places = {"NET": str(net), "DATA": str(data)}
    line = [places.get(word, word) for word in words]
    code = main([*line, "-o", str(shell), "--json"])
    told = json.loads(capsys.readouterr().out)
    done = call(net, python)
    assert code == (done.verdict is finecast.Verdict.UNCHANGED)
    assert shell.exists() == python.exists()
    if shell.exists():
        assert shell.read_bytes() == python.read_bytes()
    assert of_every_run(told) == of_every_run(json.loads(json.dumps(done.to_dict())))


LOOKING: dict[str, Case] = {
    "inspect": (["inspect", "NET"], lambda net, _: finecast.inspect(net)),
    "explain": (
        ["explain", "NET", "--auto-cast", "all"],
        lambda net, _: finecast.explain(net, policy="all"),
    ),
    "explain a node": (
        ["explain", "NET", "soft", "--auto-cast", "all", "--auto-cast-type", "fp16"],
        lambda net, _: finecast.explain(net, "soft", policy="all:fp16"),
    ),
    "emulate": (
        [
            *("emulate", "NET", "--target", "trn1", "--auto-cast", "all"),
            *("--auto-cast-type", "bf16", "--data", "DATA", "--metric", "cosine"),
        ],
        lambda net, _: finecast.emulate(
            net, "trn1", "all:bf16", data=net.with_name("data.npz"), metric="cosine"
        ),
    ),
    "blame": (
        [
            *("blame", "NET", "--target", "trn1", "--auto-cast", "all"),
            *("--auto-cast-type", "fp16", "--data", "DATA"),
        ],
        lambda net, _: finecast.blame(
            net, "trn1", policy="all:fp16", data=net.with_name("data.npz")
        ),
    ),
}
if find_spec("finecast_neuron") is not None:
    from finecast_neuron.compilers import ladder

    LOOKING["ladder"] = (
        ["ladder", "NET", "--target", "trn1", "--data", "DATA", "--metric", "cosine"],
        lambda net, _: finecast.ladder(
            net, ladder("trn1"), data=net.with_name("data.npz"), metric="cosine"
        ),
    )


@pytest.mark.parametrize("case", LOOKING)
def test_what_a_verb_says_is_the_same(
    case: str, net: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, call = LOOKING[case]
    places = {"NET": str(net), "DATA": str(data)}
    assert main([*(places.get(word, word) for word in words), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    done = call(net, net)
    assert repr(done)
    found = json.loads(json.dumps(done.to_dict()))
    of_a_shell = ("seconds", "options", "compiled", "stale")
    assert {k: v for k, v in told.items() if k not in of_a_shell} == {
        k: v for k, v in found.items() if k not in of_a_shell
    }


def test_profiles_have_the_same_figures(net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["profile", str(net), "--no-memory", "--runs", "2", "--seconds", "0", "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    found = finecast.profile(net, runs=2, seconds=0.0, memory=False)
    assert found.to_dict().keys() == told.keys()
    assert found.to_dict()["models"][0].keys() == told["models"][0].keys()
    assert net.name in repr(found)


def of_every_run(told: dict[str, Any]) -> dict[str, Any]:
    """What two runs have in common; either may remove what another process left."""
    found = {key: value for key, value in told.items() if key not in OF_A_RUN}
    found["journal"] = [
        {key: value for key, value in step.items() if key != "seconds"}
        for step in found.get("journal", ())
    ]
    found["warnings"] = [w for w in found["warnings"] if not w.startswith("removed ")]
    return found


def test_a_plan_is_applied_alike(net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = net.with_name("p.json")
    plan.write_text(finecast.convert(net, None, "all:fp16").plan.to_json())
    low = [net.with_name(f"low{n}.onnx") for n in range(3)]
    assert main(["apply", str(plan), str(net), "-o", str(low[0])]) == 0, capsys.readouterr()
    finecast.apply(plan, net, low[1])
    finecast.convert(net, None, "all:fp16").save(low[2])
    assert len({path.read_bytes() for path in low}) == 1


def test_a_plan_is_written_alike(net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    low = [net.with_name(f"low{n}.onnx") for n in range(2)]
    plans = [path.with_suffix(".json") for path in low]
    words = ["convert", str(net), "-o", str(low[0]), "--plan-out", str(plans[0]), "--json"]
    assert main(words) == 0, capsys.readouterr()
    done = finecast.convert(net, low[1], plan_out=plans[1])
    assert done.plan_out == plans[1]
    assert plans[0].read_text() == plans[1].read_text() == done.plan.to_json()
    with pytest.raises(finecast.UsageError, match="outputs exist"):
        finecast.convert(net, low[1], plan_out=plans[1])
    with pytest.raises(finecast.UsageError, match="are the same file"):
        finecast.convert(net, low[1], plan_out=net, force=True)


@pytest.mark.parametrize("verb", ["apply", "convert", "inspect", "tune"])
def test_an_option_has_one_default(verb: str) -> None:
    """Options of both have the default of the dataclass that states them."""
    shell = inspect.signature(expanded(_run(verb))).parameters
    python = inspect.signature(getattr(api, verb)).parameters
    both = {*shell, *python} & {*shell} & {*python} - {"model", "output", "plan"}
    assert both
    for name in both:
        empty = (None, (), {})
        given = shell[name].default, python[name].default
        if given[1] is True:  # --no-verify makes it False
            assert given[0] is False, name
            continue
        assert given[0] == given[1] or (given[0] in empty and given[1] in empty), name


def _run(verb: str) -> Callable[..., Any]:
    from importlib import import_module

    found: Callable[..., Any] = import_module(f"finecast.cli.{verb}").run
    return found


def test_an_option_says_what_it_does() -> None:
    groups = (
        *(finecast.DataOptions, finecast.Goal, finecast.Criterion, finecast.Policy),
        *(api.Destination, api.ReadOptions, api.RunOptions, api.TuneRequest),
    )
    for group in groups:
        stated = options_of(group)
        assert stated
        assert all(option.help.endswith((".", "'.")) for option in stated.values())


def test_an_unknown_option_names_those_that_are_close() -> None:
    with pytest.raises(finecast.UsageError, match="did you mean max_trials"):
        finecast.tune("m.onnx", max_trial=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(finecast.UsageError, match="metric is given beside DataOptions"):
        finecast.tune("m.onnx", data=finecast.DataOptions(data={}), metric="top1")
    with pytest.raises(finecast.UsageError, match="a criterion is given beside Goal"):
        finecast.tune("m.onnx", goal=finecast.Goal(), tolerance=0.5)


@pytest.mark.parametrize(
    ("keep", "tolerance"),
    [("99%", 0.01), ("99.9%", 0.001), ("100%", 0.0), (" 97.5 %", 0.025), ("0.99", 0.01)],
)
def test_what_to_keep_is_a_share(keep: str, tolerance: float) -> None:
    assert finecast.Criterion(keep=keep) == finecast.Criterion(tolerance=tolerance)


@pytest.mark.parametrize("keep", ["99", "-1%", "101%", "much", "%"])
def test_what_is_no_share(keep: str) -> None:
    with pytest.raises(finecast.UsageError, match="is not a number"):
        finecast.Criterion(keep=keep)
    with pytest.raises(finecast.UsageError, match="and so does another option"):
        finecast.Criterion(keep="99%", tolerance=0.5)

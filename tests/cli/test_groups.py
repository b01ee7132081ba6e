"""Groups of options: a dataclass in a verb's signature stands for its fields."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields

import pytest

from finecast.cli import VERBS, command, main
from finecast.cli.groups import expanded
from finecast.cli.panels import HELP_ALL, PANELS, panels_of
from finecast.cli.policy_options import Casting
from finecast.naming import Option, options_of
from finecast.plugin import load, option_groups, plugins


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    size: int = Option(help="How many.", kind=int).field(3)
    name: str | None = Option(help="What.").field(None)


def verb(path: str, group: Group, *, loud: bool = False) -> tuple[str, Group, bool]:
    """What it does."""
    return path, group, loud


def test_fields_take_the_groups_place() -> None:
    found = inspect.signature(expanded(verb)).parameters
    assert list(found) == ["path", "size", "name", "loud"]
    assert found["size"].default == 3
    assert found["path"].default is inspect.Parameter.empty
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in found.values())


def test_the_verb_gets_the_group() -> None:
    call = expanded(verb)
    assert call(path="p", size=5, name="n", loud=True) == ("p", Group(size=5, name="n"), True)
    assert call.__doc__ == "What it does."


def names_of(name: str) -> set[str]:
    run = load(VERBS[name].module).run
    return set(inspect.signature(expanded(run, name)).parameters)


@pytest.mark.parametrize("name", [v for v in VERBS if "data" in names_of(v)])
def test_verbs_that_take_data_take_it_alike(name: str) -> None:
    assert {"data", "labels", "calib", "sample_axes", "batch"} <= names_of(name)


def test_these_verbs_take_data() -> None:
    taking = {v for v in VERBS if "data" in names_of(v)}
    assert taking == {
        *("inspect", "convert", "tune", "apply", "explain", "emulate", "profile", "blame"),
        *(["ladder"] if "ladder" in VERBS else []),
    }


def test_every_option_is_in_one_panel() -> None:
    for verb in VERBS:
        listed = [name for names in panels_of(verb).values() for name in names]
        assert len({*listed}) == len(listed)
    listed = [name for names in PANELS.values() for name in names]
    listed += [
        option
        for plugin in plugins()
        for group in plugin.options
        for option in options_of(load(group.options))
    ]
    options = {
        p.name for v in VERBS for p in command(v).params if p.param_type_name == "option"
    }
    # Without the plugin of a verb its options are listed for nothing.
    assert {*listed} - options - {"help"} <= (set() if "ladder" in VERBS else {*listed})
    assert options <= {*listed}


def test_tune_has_few_options() -> None:
    """Beside those that plugins bring: of a device's compiler, of places for evaluations."""
    device = {f.name for kind in (Casting, *option_groups("tune")) for f in fields(kind)}
    own = {p.name for p in command("tune").params if p.param_type_name == "option"}
    assert len(own - device - {"executor", HELP_ALL}) <= 40


def test_help_has_the_usual_options_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--help"]) == 0
    said = capsys.readouterr().out
    assert len(said.splitlines()) <= 60
    assert max(map(len, said.splitlines())) <= 80
    listed = [line for line in said.splitlines() if line.startswith("  -")]
    assert len(listed) == 14  # with --help and --help-all
    assert "--max-drop X" in said
    assert "--tolerance" not in said
    more = len([p for p in command("tune").params if p.param_type_name == "option"]) + 1
    assert f"Show all options, {more - 14} more." in listed[-1]


def test_the_whole_help_has_all_options_the_usual_ones_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["tune", "--help-all"]) == 0  # needs no --output
    said = capsys.readouterr().out
    places = [
        said.index(f"\n{heading}:")
        for heading in ("Arguments", *PANELS)
        if heading != "Timing"
    ]
    assert places == sorted(places)
    assert said.index("--data FILE") < said.index("\nAccuracy:") < said.index("--of ")
    assert said.count("--tolerance") == 1  # in one row with the other spellings
    aliases = {"tolerance", "keep", "kind"}
    for one in command("tune").params:
        if one.param_type_name == "option" and one.name not in aliases:
            assert one.opts[0] in said
    assert max(map(len, said.splitlines())) <= 80


def test_a_short_help_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--help"]) == 0
    said = capsys.readouterr().out
    assert "--help-all" not in said
    assert "\nThe model and files:" in said


@pytest.mark.parametrize("name", ["convert", "tune", "explain", "emulate"])
def test_verbs_that_cast_take_the_compilers_options(name: str) -> None:
    wanted = {f.name for kind in (Casting, *option_groups("convert")) for f in fields(kind)}
    assert wanted | {"target"} <= names_of(name)

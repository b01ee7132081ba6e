"""What is wrong in a saved file is said in words of finecast's, with the place in full."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.errors import FormError, UsageError
from finecast.files.saved import Saved, SavedPart, checksum, converted, reading, sealed
from finecast.numbers.formats import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    engine: str
    times: Mapping[str, int | float | str] = msgspec.field(
        default_factory=dict[str, int | float | str]
    )


class Inner(SavedPart):
    count: Annotated[int, msgspec.Meta(ge=1)] = 1

    def __post_init__(self) -> None:
        if self.count == 7:
            raise ValueError("seven are too many")


class Content(Saved, kw_only=True, tag_field="kind", tag="finecast.sample"):
    run: Run | None = None
    inner: list[Inner] = []  # noqa: RUF012 - msgspec copies it
    formats: dict[Format, dict[str, Format]] = {}  # noqa: RUF012
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    raw: bytes = b""


HEAD = {"kind": "finecast.sample", "version": 2}
LONG = "x y " * 1250


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"run": {}}, "run has no 'engine'"),
        ({"run": 7}, "run is 7, expected an object or null"),
        ({"run": {"engine": 7}}, "run.engine is 7, expected text"),
        (
            {"run": {"engine": "", "times": {"a": 1, "b": "x", "c d.e": None, "f": True}}},
            "run.times.c d.e is None, expected a number or text",
        ),
        ({"inner": [{}, {"count": 0}]}, "inner[1].count is 0, expected an integer >= 1"),
        ({"inner": [{"more": 0}]}, "inner[0] has 'more', which is not known"),
        ({"inner": [{"count": 7}]}, "inner[0]: seven are too many"),
        ({"formats": {"bf17": {}}}, "formats has 'bf17', which is not known"),
        (
            {"formats": {"bf16": {}, "fp16": {"a": "fp16", "b": "fp17"}}},
            "formats.fp16.b is 'fp17', which is not known",
        ),
        ({"formats": {"bf16": 3}}, "formats.bf16 is 3, expected an object"),
        ({"share": float("nan")}, "share is nan, expected a number >= 0.0"),
        ({"share": 1e9}, "share is 1000000000.0, expected a number <= 1.0"),
        ({"raw": "?"}, "raw: Invalid base64 encoded string"),
        ({"version": 0}, "version is 0, expected an integer >= 1"),
        ({"checksum": None}, "checksum is None, expected text"),
        ({"": 1}, "it has '', which is not known"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(change: dict[str, Any], says: str) -> None:
    with pytest.raises(FormError) as raised:
        converted(HEAD | change, Content)
    assert str(raised.value) == says


def test_formats_have_the_names_of_frameworks_too() -> None:
    read = converted(HEAD | {"formats": {"half": {"a": "bfloat16"}}}, Content)
    assert read.formats == {Format.FP16: {"a": Format.BF16}}


@pytest.mark.parametrize("place", ["run", "inner", "formats", "share", "more", LONG])
def test_long_values_and_names_are_shortened(place: str) -> None:
    for value in (
        LONG,
        {LONG: LONG},
        [LONG],
        {"bf16": {LONG: LONG}},
        {"engine": LONG, "times": {LONG: [LONG]}},
    ):
        with pytest.raises(UsageError) as raised, reading("sample", "s.json", "mend it") as at:
            at.parsed(json.dumps(HEAD | {place: value}), Content, newest=2, sealed_from=3)
        assert len(raised.value.line) < 500


@given(st.text(), st.text())
def test_names_that_look_like_what_msgspec_says(name: str, more: str) -> None:
    for key in (
        name,
        f"{name}` - at `$.{more}",
        f"{name} - at `$[...]`",
        f"{name} - at `$.run.engine",
    ):
        with pytest.raises(FormError):
            converted(HEAD | {"run": {"engine": "", "times": {key: None}}}, Content)
        with pytest.raises(FormError):
            converted(HEAD | {f"{key}.": 1}, Content)


def read(content: dict[str, Any]) -> Content:
    with reading("sample", "s.json", "mend it") as at:
        return at.parsed(json.dumps(content), Content, newest=3, sealed_from=2)


def test_a_file_is_held_to_its_checksum() -> None:
    whole = sealed(HEAD | {"share": 0.5})
    assert read(whole).share == 0.5
    assert checksum(whole) == whole["checksum"]
    for changed in (
        whole | {"share": 0.25},
        whole | {"version": 3},
        whole | {"checksum": "0"},
    ):
        with pytest.raises(UsageError) as raised:
            read(changed)
        says = "its checksum is not that of what it says"
        assert raised.value.line == f"the sample was changed: {says} (s.json): mend it"


def test_a_version_with_checksums_needs_one() -> None:
    with pytest.raises(UsageError, match="the sample was changed: it has no checksum"):
        read(HEAD | {"share": 0.5})
    assert read(HEAD | {"share": 0.5, "version": 1}).share == 0.5
    with pytest.raises(UsageError, match="its checksum is not that"):
        read(HEAD | {"version": 1, "checksum": "0"})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"version": 2}, "not a sample: it has no kind finecast.sample"),
        ({"kind": ["finecast.lock"]}, "not a sample: it has no kind finecast.sample"),
        (
            {"kind": "finecast.lock", "version": 1},
            "not a sample: it is a lock of version 1",
        ),
        (HEAD | {"version": 4, "more": 1}, "sample version 4 is newer than 3"),
        (HEAD | {"version": "4"}, "not a sample: version is '4', expected an integer"),
    ],
)
def test_another_kind_or_version(content: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        read(content)
    assert raised.value.what == says

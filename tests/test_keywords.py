"""Types of keywords: each verb of Python states those that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

import finecast
from finecast import api, keywords

VERBS: dict[str, tuple[Callable[..., Any], type]] = {
    "load": (api.load, keywords.LoadKeywords),
    "convert": (api.convert, keywords.ConvertKeywords),
    "apply": (api.apply, keywords.ApplyKeywords),
    "tune": (api.tune, keywords.TuneKeywords),
    "inspect": (api.inspect, keywords.InspectKeywords),
    "explain": (api.explain, keywords.ExplainKeywords),
    "emulate": (api.emulate, keywords.EmulateKeywords),
    "blame": (api.blame, keywords.BlameKeywords),
    "profile": (api.profile, keywords.ProfileKeywords),
    "verify": (api.verify, keywords.VerifyKeywords),
    "diff": (api.diff, keywords.ReadingKeywords),
}
if find_spec("finecast_neuron") is not None:
    from finecast_neuron.api import LadderKeywords

    VERBS["ladder"] = (finecast.ladder, LadderKeywords)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_states_all_its_keywords_and_no_other(verb: str) -> None:
    function, stated = VERBS[verb]
    own = inspect.signature(inspect.unwrap(function)).parameters
    options = {name for name in inspect.signature(function).parameters if name not in own}
    assert stated.__optional_keys__ == options  # type: ignore[attr-defined]
    assert own["options"].annotation.endswith(f"{stated.__name__}]")

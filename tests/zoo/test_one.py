"""What a stage of one network comes to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from zoo import one
from zoo.job import Found, Job
from zoo.network import Network
from zoo.outcome import Outcome, Status, WrongNumbersError
from zoo.stages import Stage


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[set[float]], Outcome]:
    """Runs a stage that finds wrong numbers for some inputs, the first being 0."""

    def of(wrong: set[float]) -> Outcome:
        drawn = iter((1.0, 2.0))

        def work(job: Job) -> Found:
            first = float(job.inputs["x"])
            if first in wrong:
                raise WrongNumbersError(Status.FINECAST, "relative error 1")
            return Found(figures={"first": first})

        network = Network(
            name="net",
            library="torch",
            build=nn.Identity,
            inputs=lambda: {"x": torch.tensor(next(drawn))},
        )
        monkeypatch.setitem(one.STAGES, "stage", Stage(work=work))
        inputs = {"x": torch.tensor(0.0)}
        job = Job(network=network, net=nn.Identity(), inputs=inputs, folder=tmp_path)
        return one.run(job, "stage", set())

    return of


def test_numbers_that_are_wrong_for_the_first_inputs_alone_are_a_note(
    ran: Callable[[set[float]], Outcome],
) -> None:
    found = ran({0.0})
    assert found.status is Status.OK
    assert found.figures == {"first": 2.0}
    (note,) = found.notes
    assert "one of three inputs: relative error 1" in note


@pytest.mark.parametrize("wrong", [{0.0, 1.0}, {0.0, 2.0}, {0.0, 1.0, 2.0}])
def test_numbers_that_are_wrong_again_are_a_failure(
    ran: Callable[[set[float]], Outcome], wrong: set[float]
) -> None:
    assert ran(wrong).status is Status.FINECAST


def test_right_numbers_are_asked_for_once(ran: Callable[[set[float]], Outcome]) -> None:
    found = ran({1.0, 2.0})
    assert found.figures == {"first": 0.0}
    assert not found.notes

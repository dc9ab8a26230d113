"""Ranks that do something else alone on streams are told of by the heartbeat, not by a timeout."""

from __future__ import annotations

import re

import emulated
import pytest
import streams
from ranks import run_ranks
from test_attach_noise import Task

from gradzip import Fixed
from gradzip.exchange.peers.standing import Standing


def test_a_rank_that_waits_alone_is_told_of() -> None:
    mine, other = Standing(0), Standing(1)
    for _ in range(3):
        mine.begin_pass()
        other.begin_pass()
    other.begin_comparison(waits=True)
    assert mine.difference(1, str(other)) is None, "this rank may still come to that point"
    mine.begin_pass()
    said = str(mine.difference(1, str(other)))
    assert "rank 1 changed its policy after 3 backward passes, and rank 0 did not" in said
    mine.begin_comparison(waits=True)
    assert mine.difference(1, str(other)) is None, "it has come to it"


@pytest.mark.parametrize("waits", [True, False])
def test_ranks_that_do_the_same_at_other_speeds_are_left_alone(waits: bool) -> None:
    ahead, behind = Standing(0), Standing(1)
    for _ in range(5):
        ahead.begin_comparison(waits)
        assert behind.difference(0, str(ahead)) is None
        behind.begin_comparison(waits)
        for rank in (ahead, behind):
            rank.end_comparison()
        ahead.begin_pass()
        assert behind.difference(0, str(ahead)) is None
        assert ahead.difference(1, str(behind)) is None
        behind.begin_pass()
        assert ahead.difference(1, str(behind)) is None


def alone(rank: int, policy: str) -> str:
    streams.install()
    task = Task(Fixed("cast"))
    task.train(0, 2)
    if rank == 1:
        task.handle.set_policy(policy)
    try:
        task.train(2, 8)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("policy", ["noise", "gcomp:mode=lossless"])
def test_a_rank_that_alone_changes_its_policy_is_named_on_all_ranks(policy: str) -> None:
    for said in run_ranks(2, alone, policy):
        assert "rank 1 changed its policy after 2 backward passes, and rank 0 did not" in said


def loads(rank: int, which: str) -> str:
    streams.install(room=1.25)  # slots that change when frames are known
    task = Task(Fixed("noise"))
    task.train(0, 2)
    early = task.handle.state_dict()
    task.train(2, 12)
    late = task.handle.state_dict()
    if which != "alone" or rank == 1:
        task.handle.load_state_dict(early if rank == 1 and which != "alike" else late)
    try:
        task.train(12, 18)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(
    ("which", "wanted"),
    [
        ("alone", "rank 1 loaded a state after 12 backward passes, and rank 0 did not: call load_state_dict on all"),
        (
            "others",
            r"ranks disagree. Rank \d: a state of step \d+, slots of \d messages .* Load the same checkpoint on",
        ),
        ("alike", "^$"),
    ],
)
def test_a_rank_that_loads_another_state_is_named_before_bytes_of_other_slots_are_waited_for(
    which: str, wanted: str
) -> None:
    for said in run_ranks(2, loads, which):
        assert re.search(wanted, said), said

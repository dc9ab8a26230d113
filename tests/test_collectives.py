"""Compressed collectives between real processes: all routes, replicas and packings."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exchanges import covering, random_messages, run_routes
from ranks import run_ranks

from gradzip.codecs import Context, parse
from gradzip.collectives import Message, message
from gradzip.collectives.pipeline import ROW_VERSION, Agreement, Job
from gradzip.collectives.terms import Exchange
from gradzip.exchange.topology import Members
from gradzip.feedback import Memory
from gradzip.routes import NAMED, tree


def test_routes_that_cover_the_tree_give_the_mean() -> None:
    """Four ranks on two hosts, over Gloo; the slow test runs all 4341."""
    chosen = [str(route) for route in covering(tree())]
    assert 20 < len(chosen) < 200
    for wrong in run_ranks(4, run_routes, [*chosen, *NAMED], 41):
        assert wrong == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("numel", [1, 41])
def test_every_route_of_the_tree_gives_the_mean(numel: int) -> None:
    for wrong in run_ranks(4, run_routes, [str(route) for route in tree()], numel, deadline=1000):
        assert wrong == []


@pytest.mark.parametrize("world", [3])
def test_replicas_are_identical_however_tensors_are_packed(world: int) -> None:
    results = run_ranks(world, random_messages, 5, 40, 2)
    assert results[0]["differing"] == []
    assert results[0]["finite"] == [True, False, False, True]
    assert all(result == results[0] for result in results)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_thousand_reductions(world: int) -> None:
    results = run_ranks(world, random_messages, world, 340, 3, deadline=1000)
    assert results[0]["differing"] == []
    assert all(result == results[0] for result in results)


def test_what_a_later_stage_reads_lives_as_long_as_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the next stage has another stream: memory that goes back too soon would be written to while it reads."""
    made, encoded = list[weakref.ref[torch.Tensor]](), message.encoded

    def watched(*args: Any) -> list[torch.Tensor]:
        frames = encoded(*args)
        made.extend(weakref.ref(frame) for frame in frames)
        return frames

    monkeypatch.setattr(message, "encoded", watched)
    alone: Any = SimpleNamespace(device=torch.device("cuda"), world=1, groups={"flat": Members(0, (0,))})
    alone.carries = lambda size: False
    contexts, tensors = [Context(str(i)) for i in range(2)], [torch.randn(100) for _ in range(2)]
    sent = Message(parse("randomk:ratio=0.2"), "allreduce", tensors, contexts, Memory(0))
    ((job, outcome),) = message.jobs_of(sent, alone)
    wanted: Any = next(job.steps)
    for _ in range(2):
        try:
            wanted = job.steps.send([wanted.send[0]])
        except StopIteration:
            break
    assert outcome.collectives == 1
    assert len(made) == 2
    assert all(frame() is not None for frame in made)
    job.crossing = None
    assert all(frame() is None for frame in made)


def test_ranks_of_one_version_number_data_alike() -> None:
    """Who changes the tags raises the version: ranks of two versions would wait for each other's data for ever."""
    job = Job(Agreement("gcomp at step 3"), message.no_steps(), message._unset, number=70, first_exchange=4)
    assert (ROW_VERSION, job.tag(Exchange("flat", [], [], number=1))) == (4, 631267333)

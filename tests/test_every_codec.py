"""Every registered codec by attach: replicas stay bit-identical, and a resumed run goes on as if nothing had been."""

from __future__ import annotations

import copy
from typing import Any

import emulated
import pytest
import streams
import torch
from ranks import run_ranks
from test_attach_noise import Task, quiet
from training import same

import gradzip
from gradzip.codecs import REGISTRY, parse
from gradzip.exchange.message_codecs import stream_codec

STEPS, STOP = 5, 3
NAMES = sorted(REGISTRY)
ON_STREAM = [name for name in NAMES if stream_codec(parse(name)) is not None]


def trained(rank: int, runner: str) -> dict[str, dict[str, Any]]:
    quiet()
    if runner == "stream":
        streams.install()
    found = {}
    for name in NAMES if runner == "host" else ON_STREAM:
        policy = gradzip.Fixed(name)
        whole = Task(policy)
        whole.train(0, STOP)
        state = [copy.deepcopy(part.state_dict()) for part in (whole.model, whole.optimizer, whole.handle)]
        whole.train(STOP, STEPS)
        again = Task(policy)
        parts: tuple[Any, ...] = (again.model, again.optimizer, again.handle)
        for part, saved in zip(parts, state):
            part.load_state_dict(saved)
        again.train(STOP, STEPS)
        found[name] = {"whole": whole.parameters(), "again": again.parameters(), "stats": whole.handle.stats()}
        whole.handle.detach()
        again.handle.detach()
    return found


def check(world: int, runner: str, names: list[str]) -> None:
    ranks = run_ranks(world, trained, runner, deadline=280)
    assert sorted(ranks[0]) == names
    for name, first in ranks[0].items():
        assert all(bool(p.isfinite().all()) for p in first["whole"]), name
        for seen in ranks:
            assert same(seen[name]["whole"], first["whole"]), f"{name}: replicas differ"
            if world > 2 and any(kind.endswith("/allreduce") for kind in first["stats"]["codecs"]):
                # torch's own sums depend on where a value lies, and a new model's first bucket is another one
                assert all(map(torch.allclose, seen[name]["again"], first["whole"])), name
            else:
                assert same(seen[name]["again"], first["whole"]), f"{name}: a resume changes something"
            assert seen[name]["stats"]["steps"] == STEPS
            if runner == "stream":  # alone, identity is plain averaging, which stays with torch
                assert seen[name]["stats"]["runner"] == ("torch" if name == "identity" else "stream"), name


@pytest.mark.parametrize("world", [2, 3, 4])
def test_replicas_and_resumes_are_bit_identical(world: int) -> None:
    check(world, "host", NAMES)


@pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("world", [2, 3, 4])
def test_replicas_and_resumes_are_bit_identical_on_streams(world: int) -> None:
    assert {"noise", "int8", "int4", "fp8", "cast"} <= set(ON_STREAM)
    check(world, "stream", ON_STREAM)

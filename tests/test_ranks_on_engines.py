"""Ranks train to the same bits by either engine for CPUs; other tests with ranks take the faster one."""

from __future__ import annotations

import pytest
import torch
from engine_cases import isas
from ranks import engine_of_ranks, run_ranks
from training import POLICIES, same, start

from gradzip import engines


def trained(rank: int) -> list[str]:
    differing = []
    for name, policy in POLICIES.items():
        found: list[list[torch.Tensor]] = []
        for engine in ("reference", "native"):
            with engines.use(engine):
                run = start(policy)
                assert run.handle is not None
                run.train(0, 4)
                run.handle.stats()
                found.append([*run.gradients(), *run.parameters()])
                run.handle.detach()
        if not same(*found):
            differing.append(name)
    return differing


@pytest.mark.skipif(not isas(), reason="the native engine is not built")
def test_ranks_train_to_the_same_bits_by_either_engine() -> None:
    assert engine_of_ranks() == "native"
    assert run_ranks(2, trained) == [[], []]

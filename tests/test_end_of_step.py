"""What fails where a step ends on the host, after its means are there: no rank waits for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from training import start

from gradzip import Accordion, GradzipWarning, PeerError


def traced(rank: int, folder: str) -> int:
    """The folder of a trace is not there when it is written."""
    run = start("cast")
    run.train(0, 2)
    assert run.handle is not None
    if rank == 0:
        run.handle.trace(Path(folder) / "missing" / "steps.json", steps=1)
        with pytest.warns(GradzipWarning, match=r"trace: .*steps\.json could not be written: "):
            run.train(2, 6)
    else:
        run.train(2, 6)
    steps: int = run.handle.stats()["steps"]
    return steps


def test_a_trace_that_cannot_be_written_warns(tmp_path: Path) -> None:
    assert run_ranks(2, traced, str(tmp_path)) == [6, 6]


class Forgetful(Accordion):
    """Fails on one rank, when it is shown the means of the third step."""

    rank = 0

    def observe(self, name: str, mean: torch.Tensor, scale: float = 1.0) -> None:
        super().observe(name, mean, scale)
        self.seen = getattr(self, "seen", 0) + 1
        if self.rank == 1 and self.seen > 12:
            raise ZeroDivisionError("nothing was learned")


def taught(rank: int) -> str:
    policy = Forgetful(low="powersgd:rank=2", high="powersgd:rank=1", window=10)
    policy.rank = rank
    run = start(policy)
    with pytest.raises(RuntimeError) as failed:
        run.train(0, 6)
    assert run.handle is not None
    assert isinstance(run.handle.error, PeerError if rank == 0 else ZeroDivisionError)
    run.handle.detach()
    return str(failed.value)


def test_a_policy_that_fails_ends_the_step_on_all_ranks() -> None:
    for said in run_ranks(2, taught):
        assert "nothing was learned" in said

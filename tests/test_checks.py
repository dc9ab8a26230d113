"""GRADZIP_CHECK, and the shared book that is made anew while training goes on."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run_ranks
from training import same, start

from gradzip import Fixed
from gradzip.exchange.on_host.gcomp import GCompCoder


def checked(rank: int) -> dict[str, Any]:
    """A few good steps, then one whose result on rank 1 has another bit."""
    patch = pytest.MonkeyPatch()
    patch.setenv("GRADZIP_CHECK", "1")
    run = start(Fixed("gcomp:mode=lossless"))
    assert run.handle is not None
    run.train(0, 3)
    good = run.handle.error is None
    finish = GCompCoder.finish

    def flipped(self: GCompCoder) -> None:
        if rank == 1:
            for name, flat in zip(self.message.names, self._own.tensors):
                if name == "2.weight":
                    flat[7] += 1
        finish(self)

    patch.setattr(GCompCoder, "finish", flipped)
    with pytest.raises(RuntimeError) as caught:
        run.train(3, 4)
    patch.undo()
    return {"good": good, "said": str(caught.value)}


def test_replicas_that_differ_are_found_out() -> None:
    for rank, seen in enumerate(run_ranks(2, checked)):
        assert seen["good"]
        assert "after step 3" in seen["said"]
        assert "'2.weight'" in seen["said"]
        assert f"rank {1 - rank}" in seen["said"] or f"rank {rank}" in seen["said"]


def refreshed(rank: int) -> dict[str, Any]:
    shared, lossless = start(Fixed("gcomp:mode=lossless,book=shared,refresh=4")), start(Fixed("gcomp:mode=lossless"))
    assert shared.handle is not None
    seen = []
    for step in range(8):
        book = shared.handle._books.at(step)
        seen.append(None if book is None else book.id)
        for run in (shared, lossless):
            run.train(step, step + 1)
    state = shared.handle.state_dict()
    return {
        "ids": seen,
        "same": same(shared.parameters(), lossless.parameters()),
        "state": sorted(k for k in state if not k.startswith("rank")),
    }


def test_the_shared_book_changes_on_all_ranks_at_once() -> None:
    results = run_ranks(2, refreshed)
    assert results[0] == results[1]
    ids = results[0]["ids"]
    assert ids[:2] == [None, None], "the prior serves until the second step after the first count"
    assert ids[2] is not None
    assert ids[2] == ids[5]
    assert ids[6] not in (None, ids[2]), "and the next one from the second step after the next count"
    assert results[0]["same"]
    assert "book/lengths" in results[0]["state"]

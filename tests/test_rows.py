"""Rows of numbers between ranks: what travels, what is heard, and what ranks that differ are told."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exchanges import connect
from ranks import run_ranks
from training import start

from gradzip import Rules
from gradzip.errors import PeerError
from gradzip.exchange.on_host.rows import Row, RowExchange, rows_of
from gradzip.exchange.peers.channel import Channel

WORLD = 3


class Said:
    """What became of rows, in the order in which it was known."""

    def __init__(self, channel: Channel) -> None:
        self.worker: RowExchange = rows_of(channel)
        self.heard: list[list[list[int]]] = []
        self.errors: list[BaseException] = []

    def submit(self, what: str, numbers: Sequence[int] | None = None) -> Row:
        given = None if numbers is None else lambda: torch.tensor(numbers, dtype=torch.int64)
        return self.worker.submit(Row(what, self.errors.append, given, self._hear))

    def _hear(self, rows: Sequence[torch.Tensor]) -> None:
        self.heard.append([row.tolist() for row in rows])


def alike_and_different(rank: int) -> dict[str, Any]:
    """Numbers that are alike, that differ on one rank, and none; how long the messages were."""
    channel = connect(1)
    said, sent = Said(channel), list[int]()
    send_row = channel.gloo.send_row

    def noted(row: torch.Tensor, *rest: Any) -> Any:
        sent.append(row.numel())
        return send_row(row, *rest)

    channel.gloo.send_row = noted  # type: ignore[method-assign]
    said.submit("alike", [3, 1, 4, 1, 5])
    said.submit("one differs", [7, 8, 9 + (rank == 1), 10])
    said.submit("nothing")
    said.worker.drain()
    channel.leave()
    return {"heard": said.heard, "sent": sent, "errors": said.errors}


def test_numbers_travel_only_where_ranks_differ() -> None:
    for seen in run_ranks(WORLD, alike_and_different):
        assert seen["errors"] == []
        assert seen["heard"] == [
            [[3, 1, 4, 1, 5]] * WORLD,
            [[7, 8, 9 + (rank == 1), 10] for rank in range(WORLD)],
            [[]] * WORLD,
        ]
        head = seen["sent"][0]
        assert seen["sent"] == [head, head, 4, head], "one short message where all are alike"


def other_texts(rank: int) -> dict[str, Any]:
    """Rank 1 says something else, and of another length; what was said before is heard, what comes after is not."""
    said = Said(connect(1))
    said.submit("before", [rank])
    said.submit(f"by {'another' if rank == 1 else 'one'} policy", [0] * (1 + 1000 * (rank == 1)))
    after = said.submit("after", [1])
    said.worker.drain()
    return {
        "heard": said.heard,
        "said": [f"{type(error).__name__}: {error}" for error in said.errors],
        "over": after.over.wait(30),
        "later": said.submit("later").over.is_set(),
        "all": len(said.errors),
    }


def test_ranks_that_say_something_else_are_named_on_all_of_them() -> None:
    for seen in run_ranks(WORLD, other_texts):
        assert seen["heard"] == [[[rank] for rank in range(WORLD)]]
        assert seen["over"]
        assert seen["later"], "a row that comes later fails at once"
        assert seen["all"] == 3
        for words in seen["said"]:
            assert words.startswith("PeerError: ranks disagree. Rank 0: by one policy. Rank 1: by another policy. ")


def fails_while_waiting(rank: int) -> dict[str, Any]:
    """Rank 1 fails while the others wait for its row, and while a row of its own waits for its numbers."""
    channel = connect(1)
    said, may_go_on = Said(channel), threading.Event()

    def numbers() -> torch.Tensor:
        may_go_on.wait(30)
        return torch.tensor([0])

    dist.barrier()
    row = said.worker.submit(Row("held up", said.errors.append, numbers if rank == 1 else None))
    if rank == 1:
        channel.fail(PeerError("rank 1 gives up"))
    over = row.over.wait(30)
    may_go_on.set()
    return {"over": over, "said": [str(error) for error in said.errors]}


def test_a_failure_ends_rows_that_wait() -> None:
    for seen in run_ranks(WORLD, fails_while_waiting):
        assert seen == {"over": True, "said": ["rank 1 gives up"]}


def refuses(rank: int) -> list[str]:
    """Who hears the numbers may find them wrong."""
    said = Said(connect(1))

    def heard(rows: Sequence[torch.Tensor]) -> None:
        raise PeerError(f"the rows are {[int(row) for row in rows]}")

    said.worker.submit(Row("numbers", said.errors.append, lambda: torch.tensor([rank]), heard)).over.wait(30)
    return [str(error) for error in said.errors]


def test_what_is_wrong_with_numbers_is_raised_on_all_ranks() -> None:
    assert run_ranks(2, refuses) == [["the rows are [0, 1]"]] * 2


def swapped(rank: int) -> str:
    """Rank 1 gives two parameters each other's codec: as many of each kind, in messages that all ranks know."""
    one, other = (
        Rules({"0.weight": codecs[0], "2.weight": codecs[1], "*": "gcomp:mode=lossless"}, small=True)
        for codecs in (("topk", "sign"), ("sign", "topk"))
    )
    run = start(one)
    assert run.handle is not None
    run.train(0, 2)
    run.handle.set_policy(other)
    run.train(2, 4)
    run.handle.set_policy(one if rank == 0 else other)
    with pytest.raises((RuntimeError, PeerError)) as raised:
        run.train(4, 5)
    return str(raised.value)


def test_codecs_that_are_swapped_on_one_rank_are_told_before_anybody_waits() -> None:
    said = run_ranks(2, swapped)
    for words in said:
        assert "ranks disagree. Rank 0: " in words
        assert "at step 4" in words

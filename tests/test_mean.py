"""The mean of a flat tensor is what the executor makes of it, to the bit, by the same exchanges."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from conftest import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from gradzip.collectives.executor import Executor
from gradzip.collectives.mean import WHERE, averaging
from gradzip.collectives.message import ALLREDUCE, _Plain
from gradzip.collectives.terms import AllReduce, Exchange, Parts, Steps
from gradzip.exchange.topology import Members
from gradzip.routes import NAMED

Said = list[tuple[str, int, bool, list[int], list[bytes]]]


def run(ranks: Sequence[Steps]) -> Said:
    """All ranks in one thread; what each asked for."""
    said: Said = []
    received: list[Parts | None] = [None] * len(ranks)
    while True:
        asked = list[Exchange | AllReduce]()
        for steps, parts in zip(ranks, received):
            with contextlib.suppress(StopIteration):
                asked.append(steps.send(parts))  # type: ignore[arg-type]  # None starts a generator
        if not asked:
            return said
        assert len(asked) == len(ranks)
        exchanges = [exchange for exchange in asked if isinstance(exchange, Exchange)]
        for exchange in exchanges:
            sent = [b"" if part is None else bytes(part.tolist()) for part in exchange.send]
            most = [-1 if size is None else size for size in exchange.most or ()]
            said.append((exchange.where, exchange.number, exchange.carried, most, sent))
        received = [
            [exchange.send[me] if other == me else _copy(exchange.send[me]) for other, exchange in enumerate(exchanges)]
            for me in range(len(exchanges))
        ]


def _copy(part: torch.Tensor | None) -> torch.Tensor | None:
    return None if part is None else part.clone()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(0, 40),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
    st.sampled_from([1.0, 1e-40, 1e38, float("inf")]),
)
def test_it_is_what_the_executor_does(world: int, numel: int, dtype: torch.dtype, carried: bool, size: float) -> None:
    rng = torch.Generator().manual_seed(numel)
    given = [torch.randn(numel, generator=rng).to(dtype) * size for _ in range(world)]
    members = [Members(rank, tuple(range(world))) for rank in range(world)]
    mine, theirs = [x.clone() for x in given], [x.clone() for x in given]
    said = run([averaging(x, group, carried) for x, group in zip(mine, members)])
    executors = list[Steps]()
    for x, group in zip(theirs, members):
        plain = _Plain(x)
        route = NAMED[ALLREDUCE]
        executors.append(Executor(route, plain.layout, plain, {WHERE: group}, world, None, carried).steps())
    assert said == run(executors)
    assert all(same_bits(a, b) for a, b in zip(mine, theirs))
    assert all(same_bits(a, mine[0]) for a in mine)

"""Routes as data: text form, validity, Espresso's tree, and every route of it carried out."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradzip import Context, parse
from gradzip.collectives.blobs import Blob
from gradzip.collectives.coder import TensorCoder
from gradzip.collectives.executor import Executor
from gradzip.collectives.layout import PART, PART_ON_GPU, Layout, Piece, chunks, parts
from gradzip.collectives.message import Message, jobs_of
from gradzip.collectives.terms import Exchange, How, Parts, Steps
from gradzip.errors import Unsupported
from gradzip.exchange.peers.buffers import Buffers
from gradzip.exchange.topology import Members
from gradzip.feedback import Memory
from gradzip.routes import NAMED, Route, Step, tree

HOSTS, LOCAL = 2, 2


class Bytes:
    """A lossless coder of one tensor that notices when a blob is decoded as something that it is not."""

    exact_grid = False
    dtype, home = torch.float32, torch.device("cpu")

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.result = values, torch.empty_like(values)

    def load(self, layout: Layout) -> list[torch.Tensor]:
        (piece,) = layout
        return [self.values[piece.start : piece.stop]]

    def store(self, layout: Layout, mean: torch.Tensor) -> None:
        self.result.copy_(mean)

    def targets(self, layout: Layout) -> list[torch.Tensor] | None:
        return [self.result]

    def goes_plainly(self, leaf: Layout) -> None:
        pass

    def scratch(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype)

    def bound(self, leaf: Layout) -> int:
        return 24 + 4 * leaf[0].numel + 4

    def encode(
        self, leaves: Sequence[Layout], values: Sequence[Sequence[torch.Tensor]], how: How, stays: int | None = None
    ) -> list[Blob]:
        nothing = torch.empty(0, dtype=torch.uint8)  # nobody else will miss it
        pairs = enumerate(zip(leaves, values))
        return [Blob(nothing, values=x) if i == stays else self._encode(leaf, x[0], how) for i, (leaf, x) in pairs]

    def _encode(self, leaf: Layout, values: torch.Tensor, how: How) -> Blob:
        (piece,) = leaf
        head = torch.tensor([piece.start, values.numel(), how.shift])
        padding = torch.zeros(-4 * values.numel() % 8, dtype=torch.uint8)
        return Blob(torch.cat([head.view(torch.uint8), values.contiguous().view(torch.uint8), padding]))

    def decode(
        self,
        leaves: Sequence[Layout],
        contributions: Sequence[Sequence[Blob]],
        how: How,
        outs: Sequence[Sequence[torch.Tensor]],
        add: bool,
    ) -> None:
        for (piece,), (out,), *blobs in zip(leaves, outs, *contributions):
            for number, blob in enumerate(blobs):
                if blob.values is not None:
                    (values,) = blob.values
                else:
                    assert blob.data[:24].clone().view(torch.int64).tolist() == [piece.start, piece.numel, how.shift]
                    values = blob.data[24 : 24 + 4 * piece.numel].clone().view(torch.float32)
                out.add_(values) if add or number else out.copy_(values)

    def lands(self, how: How) -> bool:
        return False

    def hop(self, leaf: Layout, blob: Blob, values: Sequence[torch.Tensor], how: How) -> Blob:
        total = values[0].clone()
        self.decode([leaf], [[blob]], how, [[total]], add=True)
        return self._encode(leaf, total, how)


Groups = dict[str, Members]


def go_on(steps: Steps, received: Parts | None) -> Exchange | None:
    """To the next exchange of a rank, or to its end."""
    try:
        wanted = steps.send(received)  # type: ignore[arg-type]
    except StopIteration:
        return None
    assert isinstance(wanted, Exchange)
    return wanted


def deliver(waiting: dict[int, Exchange], groups: list[Groups]) -> dict[int, Parts]:
    """What those ranks get whose whole group waits for the same exchange."""
    received = {}
    for rank, own in waiting.items():
        members = groups[rank][own.where]
        peers = [waiting[peer] for peer in members.ranks if peer in waiting]
        if [(peer.where, peer.number) for peer in peers] != [(own.where, own.number)] * members.size:
            continue
        assert len(own.send) == members.size
        parts = [peer.send[members.rank] for peer in peers]
        for number, (part, most) in enumerate(zip(parts, own.most or [1 << 20] * members.size)):
            if number == members.rank:
                continue  # what it holds need not travel
            assert (part is None) == (most is None) or (part is None and own.most is None)
            assert part is None or part.numel() <= most
        received[rank] = [None if part is None else part.clone() for part in parts]
    return received


def execute(route: Route, inputs: list[torch.Tensor], coder_of: type[Bytes] = Bytes) -> list[torch.Tensor]:
    """What each rank ends with; they take turns in this thread, 2 on each of 2 hosts."""
    world = tuple(range(HOSTS * LOCAL))
    coders, groups, runs = [coder_of(values) for values in inputs], list[Groups](), []
    for rank, coder in zip(world, coders):
        host, local = divmod(rank, LOCAL)
        groups.append(
            {
                "flat": Members(rank, world),
                "intra": Members(local, world[host * LOCAL : (host + 1) * LOCAL]),
                "inter": Members(host, world[local::LOCAL]),
            }
        )
        layout = (Piece(0, 0, coder.values.numel()),)
        runs.append(Executor(route, layout, coder, groups[rank], len(world)).steps())
    received: dict[int, Parts | None] = dict.fromkeys(world)
    waiting: dict[int, Exchange] = {}
    while received:
        for rank, got in received.items():
            waiting.pop(rank, None)
            if (wanted := go_on(runs[rank], got)) is not None:
                waiting[rank] = wanted
        received = dict(deliver(waiting, groups))
    assert not waiting, f"{route}: ranks {sorted(waiting)} wait for ever"
    return [coder.result for coder in coders]


def whole_numbers(numel: int) -> list[torch.Tensor]:
    """Sums and means of these are exact in float32, in whatever order."""
    index = torch.arange(numel)
    return [((index * 7919 + rank * 104729) % 1000 * 4 - 2000).float() for rank in range(HOSTS * LOCAL)]


def check(routes: list[Route], numel: int) -> None:
    inputs = whole_numbers(numel)
    mean = torch.stack(inputs).sum(0) / len(inputs)
    for route in routes:
        for rank, result in enumerate(execute(route, inputs)):
            assert torch.equal(result, mean), f"{route} on rank {rank}"


def test_tree_has_the_published_size() -> None:
    both, gpu = tree(), tree(("gpu",))
    assert len(set(both)) == len(both) == 4341
    assert len(set(gpu)) == len(gpu) == 174
    assert sum(not route.compresses for route in gpu) == 9


def test_every_route_of_the_tree_parses_back() -> None:
    for route in tree():
        assert Route.parse(str(route)) == route


@pytest.mark.parametrize("numel", [0, 1, 3, 41])
def test_every_gpu_route_gives_the_mean(numel: int) -> None:
    check(tree(("gpu",)), numel)


def test_every_route_gives_the_mean() -> None:
    check(tree(), 41)


@pytest.mark.parametrize("name", sorted(NAMED))
def test_named_routes_give_the_mean(name: str) -> None:
    assert Route.parse(name) == NAMED[name]
    check([NAMED[name]], 41)


class Noting(Bytes):
    """Knows which of its blobs are still there."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__(values)
        self.blobs: list[weakref.ref[torch.Tensor]] = []

    def _encode(self, leaf: Layout, values: torch.Tensor, how: How) -> Blob:
        blob = super()._encode(leaf, values, how)
        self.blobs.append(weakref.ref(blob.data))
        return blob


@pytest.mark.parametrize("name", ["alltoall", "allgather", "allreduce"])
def test_what_crosses_an_exchange_stays_until_the_job_has_ended(name: str) -> None:
    """The next stage's stream may read it longer than Python needs it."""
    ranks, crossing = (0, 1), list[object]()
    coders = [Noting(torch.arange(41.0)) for _ in ranks]
    layout = (Piece(0, 0, 41),)
    runs = [
        Executor(NAMED[name], layout, coder, {"flat": Members(rank, ranks)}, 2, crossing).steps()
        for rank, coder in zip(ranks, coders)
    ]
    received: list[list[torch.Tensor | None] | None] = [None, None]
    made: list[weakref.ref[torch.Tensor]] = []
    while True:
        try:
            wanted = [run.send(parts) for run, parts in zip(runs, received)]  # type: ignore[arg-type]
        except StopIteration:
            break
        sent = [w.send for w in wanted if isinstance(w, Exchange)]
        made += [weakref.ref(part) for parts in sent for part in parts if part is not None]
        received = [[parts[rank] for parts in sent] for rank in ranks]
        del wanted, sent
    del received, runs
    made += [ref for coder in coders for ref in coder.blobs]
    assert made
    assert all(ref() is not None for ref in made)
    crossing.clear()
    assert not any(ref() is not None for ref in made)


def test_what_was_lost_stays_until_the_job_has_ended() -> None:
    """On a GPU, the last stage's stream may read it longer than Python needs it."""
    channel: Any = SimpleNamespace(
        device=torch.device("cuda"),
        world=2,
        groups={"flat": Members(0, (0, 1))},
        buffers=Buffers(),
        topology=SimpleNamespace(check=lambda route: None),
        carries=lambda size: False,
    )
    message = Message(parse("sign"), "allgather", [torch.arange(41.0)], [Context("x", world=2)], Memory(0))
    ((job, _),) = jobs_of(message, channel)
    next(job.steps)
    assert job.crossing is not None
    (coder,) = (x for x in job.crossing if isinstance(x, TensorCoder))
    lost = weakref.ref(coder._lost[0])
    del coder
    job.steps.close()
    assert lost() is not None
    job.crossing = None
    assert lost() is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alltoal", "did you mean 'alltoall'"),
        ("enc.cpu > a2a.flat", "ends before every rank"),
        ("enc.cpu > enc.gpu", "the data is coded"),
        ("dec.cpu > ar.flat", "the data is plain"),
        ("enc.cpu > ar.flat > dec.cpu", "coded data cannot go by ar"),
        ("a2a.flat > ag.flat", "plain data cannot go by a2a"),
        ("ag.flat", "nothing to join"),
        ("ar.intra", "must sum over the flat group"),
        ("ar.flat > ar.flat", "has its sum already"),
        ("enc.cpu > a2a.flat > ring.flat", "follows enc directly"),
        ("ar.nowhere", "is done in one of flat"),
        ("enc.tpu > ag.flat > dec.gpu", "is done in one of cpu, gpu"),
    ],
)
def test_bad_routes_say_why(text: str, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        Route.parse(text)


def test_route_properties() -> None:
    route = Route.parse("hierarchical")
    assert route.hierarchical
    assert route.compresses
    assert route.encodes == 2
    assert {step.where for step in route.on("gpu").steps if step.kind in ("enc", "dec")} == {"gpu"}
    assert not Route((Step("ar", "flat"),)).compresses


def test_parts_cover_a_stretch() -> None:
    for size in range(12):
        for count in range(1, 6):
            cut = parts(3, 3 + size, count)
            assert len(cut) == count
            assert cut[0][0] == 3
            assert cut[-1][1] == 3 + size
            assert all(a[1] == b[0] for a, b in itertools.pairwise(cut))


@pytest.mark.parametrize("part", [PART, PART_ON_GPU])
def test_where_a_tensor_is_cut_follows_from_its_size_alone(part: int) -> None:
    size = 4 * 2_000_000
    alone = chunks([size], 4, True, part)
    together = [c for c in chunks([10, 40_000_000, size, 3_000], 4, True, part) if c[0].tensor == 2]
    assert [(p.start, p.stop) for (p,) in alone] == [(p.start, p.stop) for (p,) in together]
    expected = [1 / 8, 1 / 4, 1 / 4, 1 / 4, 1 / 8] if part == PART else [3 / 5, 2 / 5]
    assert [p.numel / size for (p,) in alone] == expected, "enough to overlap, and short in the end"
    assert len(chunks([50 * size], 4, True, part)) == round(50 * size / (4 * part)) + 1
    assert len(chunks([1000] * 50, 4, True, part)) == 1

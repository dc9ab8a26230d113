"""Error feedback of GComp that keeps what messages lose as one tensor: the same as by each tensor for itself."""

from __future__ import annotations

import pytest
import torch
from conftest import floor_for, gradient, same_bits

from gradzip import engines
from gradzip.codecs import parse
from gradzip.codecs.gcomp import GComp
from gradzip.exchange.coding import Message, Values
from gradzip.exchange.compiler import compile_route
from gradzip.exchange.on_host.gcomp import GCompCoder, GCompOnHost
from gradzip.exchange.on_host.residuals import LostWithSums
from gradzip.exchange.parts import Table
from gradzip.exchange.program import Decode, Encode, Recode
from gradzip.exchange.topology import Topology
from gradzip.feedback import Memory
from gradzip.routes import NAMED

SIZES = [1024, 300, 7, 1024, 5000, 40]
NAMES = [f"layer.{number}" for number in range(len(SIZES))]
WORLD = 2


class Ranks:
    """All ranks in this process; their gradients lie where DDP has them, in a bucket that stays."""

    def __init__(self, codec: str) -> None:
        chosen = parse(codec)
        assert isinstance(chosen, GComp)
        self.messages = GCompOnHost(chosen)
        topology = Topology.of_ranks(0, list(range(WORLD)))
        args = NAMES, SIZES, torch.float32, topology, self.messages.codes_sums
        self.program = compile_route(self.messages.text, NAMED["alltoall"], *args)
        self.values = [Values(torch.zeros(sum(SIZES)).split(SIZES)) for _ in range(WORLD)]
        self.memories = [Memory(rank) for rank in range(WORLD)]
        self.floors = [floor_for(torch.zeros(n), seed=n, depth=3) for n in SIZES]

    def step(self, number: int, scale: float = 1.0) -> list[torch.Tensor]:
        """All frames and means."""
        encode, _, recode, _, decode = self.program.steps
        assert isinstance(encode, Encode)
        assert isinstance(recode, Recode)
        assert isinstance(decode, Decode)
        own, sums = self.program.hop(recode.source), self.program.hop(recode.target)
        coders = list[GCompCoder]()
        for rank, (values, memory) in enumerate(zip(self.values, self.memories)):
            for at, tensor in enumerate(values.tensors):
                tensor.copy_(gradient(tensor.numel(), seed=1000 * number + 100 * rank + at) * scale)
            message = Message(NAMES, torch.float32, rank, WORLD, number, scale=scale, memory=memory, floors=self.floors)
            coder = self.messages.coder(message)
            assert isinstance(coder, GCompCoder)
            coder.measure(values)
            coders.append(coder)
        sent, frames = dict[int, torch.Tensor](), list[torch.Tensor]()
        for rank, coder in enumerate(coders):
            table, other = self.table(rank, encode.target), 1 - rank
            room = self.room(table, other)
            (size,) = coder.encode(table, [other], self.values[rank], own, [room])
            sent[other] = room[:size]
        for rank, coder in enumerate(coders):
            table = self.table(rank, recode.source)
            room = self.room(table, 0)
            terms = [None if place == rank else sent[rank] for place in range(WORLD)]
            frames.append(room[: coder.recode(table, 0, terms, self.values[rank], own, 1, sums, room)])
        for rank, coder in enumerate(coders):
            table = self.table(rank, decode.source)
            coder.decode_all(table, [0, 1], [[frame] for frame in frames], None, sums, self.values[rank], WORLD)
            coder.finish()
        return [*sent.values(), *frames, *(x.clone() for values in self.values for x in values.tensors)]

    def table(self, rank: int, buffer: str) -> Table:
        return self.program.table(rank, self.program.buffer(buffer))

    def room(self, table: Table, owner: int) -> torch.Tensor:
        return torch.empty(self.messages.bound(table, owner, torch.float32), dtype=torch.uint8)

    def states(self) -> list[torch.Tensor]:
        of_ranks = [memory.state_dict() for memory in self.memories]
        return [value for state in of_ranks for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]


def run(codec: str, looks: bool) -> list[torch.Tensor]:
    """Eight steps: some are skipped, the scale changes, residuals are looked at, or put back to gradients."""
    ranks, found = Ranks(codec), list[torch.Tensor]()
    for number in range(8):
        found += ranks.step(number, scale=2.0 if number >= 3 else 1.0)
        for memory in ranks.memories:
            memory.drop() if number == 4 else memory.commit()
            if number == 5:
                memory.fold()
        if looks and number in (0, 2, 6):
            found += ranks.states()
    return found + ranks.states()


@pytest.mark.parametrize("codec", ["gcomp:ulps=4096", "gcomp:ulps=4096,own=lossless", "gcomp:keep=3"])
@pytest.mark.parametrize("looks", [True, False])
def test_residuals_kept_as_one_are_those_of_each_tensor(
    codec: str, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engines.use("native"):
        together = run(codec, looks)
        monkeypatch.setattr(GCompCoder, "_keeps_together", lambda *_: False)
        apart = run(codec, looks)
    assert len(together) == len(apart) > 0
    assert all(torch.equal(a, b) if a.dtype == torch.uint8 else same_bits(a, b) for a, b in zip(together, apart))


def test_memory_is_used_again_and_never_that_of_residuals_to_come() -> None:
    with engines.use("native"):
        ranks, seen = Ranks("gcomp:ulps=4096"), list[int]()
        for number in range(6):
            ranks.step(number)
            for memory in ranks.memories:
                memory.commit()
            kept = ranks.memories[0].kept_by(ranks.values[0], NAMES)
            assert isinstance(kept, LostWithSums)
            assert kept.spare is None or kept.spare.data_ptr() != kept.lost.flat.data_ptr()
            seen.append(kept.lost.flat.data_ptr())
    assert len(set(seen)) == 2

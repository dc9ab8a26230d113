"""The quantiser of experiments/workers/noise.py against frames of the codec noise: own gradients, sums and mean.

Runs that show what noise costs use the quantiser; this is what makes them runs of the codec.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from conftest import same_bits

from gradzip import wire
from gradzip.engines import noise_layout, reference_noise
from gradzip.engines.noise_layout import Part, Slot
from gradzip.exchange.parts import Table

sys.path.append(str(Path(__file__).parent.parent / "experiments"))
from workers import noise

SHAPES = {"a.weight": (70, 130), "b.bias": (300,), "c.weight": (17, 1000), "zero": (900,), "one": (1,), "d": (40, 33)}
SEED, STEP, BUDGET = 12, 3, 0.03


class Ranks:
    """Gradients of all ranks, flat by tensor, and their parts as an owner's frame holds them."""

    def __init__(self, layout: noise.Layout, x: torch.Tensor, d: torch.Tensor | None) -> None:
        self.world, self.names, self._x = layout.world, layout.names, x
        self.own = [[view.reshape(-1) for view in layout.views(row)] for row in x]
        self.shape = [None] * len(self.names) if d is None else [view.reshape(-1) for view in layout.views(d)]
        self.table = Table.of(layout.names, layout.sizes, [layout.world])
        self.levels = [
            [
                noise_layout.level(reference_noise.statistics(values, d), BUDGET, self.world)
                for values, d in zip(own, self.shape)
            ]
            for own in self.own
        ]

    def parts(self, owner: int, hop: str, rank: int = 0) -> list[Part]:
        found = []
        for part in (p for p in self.table.parts if p.owner == owner):
            here, t = slice(part.start, part.stop), part.tensor
            key = noise_layout.key_of(SEED, STEP, self.names[t], hop, part.start)
            offset = noise_layout.offset_of(rank, self.world) if hop == "own" else 0
            d, level = self.shape[t], self.levels[rank][t]
            shape = None if d is None else d[here]
            found.append(Part(self.own[rank][t][here], level, shape, part.start, key, offset))
        return found


def frame(parts: list[Part]) -> torch.Tensor:
    (written,) = reference_noise.encode_frames([slot := slot_of(parts)], STEP, 0)
    assert written.notch == 0
    return slot.out[: written.size]


def slot_of(parts: list[Part]) -> Slot:
    bound = wire.HEADER_BYTES + noise_layout.body_bound([p.values.numel() for p in parts])
    return Slot(parts, torch.zeros(bound, dtype=torch.uint8))


def read(body: torch.Tensor, parts: list[Part], divisor: int = 1) -> list[torch.Tensor]:
    outs = [Part(torch.full_like(part.values, 7.0), shape=part.shape) for part in parts]
    reference_noise.decode_frame(body, outs, STEP, 0, divisor=divisor)
    return [part.values for part in outs]


@pytest.mark.parametrize("world", [2, 4, 5])
@pytest.mark.parametrize("shaped", [True, False])
def test_own_gradients_sums_and_mean_are_those_of_frames(world: int, shaped: bool) -> None:
    layout, rng = noise.Layout(SHAPES, world, torch.device("cpu")), torch.Generator().manual_seed(world)
    x, v = torch.zeros(1, world, layout.length), torch.zeros(1, layout.length)
    for name, gradients, moments in zip(layout.names, layout.views(x), layout.views(v)):
        if name != "zero":
            scale = torch.rand(moments.shape, generator=rng).pow(6) * 1e-3
            gradients.copy_(torch.randn(gradients.shape, generator=rng) * scale)
            moments.copy_(scale.square())
    layout.views(x)[2][0, 0, 3, 5], layout.views(v)[2][0, 3, 5] = 0.05, 1e-20  # an integer too large for a code
    d = noise.shape_of(layout, v) if shaped else None
    budgets = torch.tensor([BUDGET], dtype=torch.float64)
    found = noise.noisy_mean(layout, x, d, budgets, [SEED], STEP, integers=True)
    assert found.own is not None
    assert found.sum is not None
    assert found.own.abs().max() > noise_layout.NARROW_MOST

    finite = torch.ones(1, world, len(SHAPES), dtype=torch.bool)
    squares = layout.sums(noise.squares(layout, x)[0])
    levels = noise.levels_of(squares, noise.weights_of(layout, d), budgets, finite)
    shape = torch.zeros(1, layout.length, dtype=torch.int8) if d is None else d
    keys = noise.keys_in_step(noise.name_keys((SEED,), tuple(layout.names), "own", layout.device), STEP)

    def each(of_tensor: torch.Tensor) -> torch.Tensor:
        return layout.each_value(of_tensor).expand(1, layout.blocks, noise.BLOCK).reshape(1, -1)

    own = []
    for rank in range(world):
        h24 = noise.draws(layout, keys, noise.offset_of(rank, world))
        q = noise.quantised(x[:, rank], each(levels.own_inverse[:, rank]), shape, h24)
        own.append([view.reshape(-1) for view in layout.views(noise.decoded(q, each(levels.own[:, rank]), shape))])
    sums = [view.reshape(-1) for view in layout.views(noise.decoded(found.sum, each(levels.sum), shape))]
    mean = [view.reshape(-1) for view in layout.views(found.mean)]

    ranks = Ranks(layout, x[0], None if d is None else d[0])
    compared = 0
    for owner in range(world):
        places = [(p.tensor, slice(p.start, p.stop)) for p in ranks.table.parts if p.owner == owner]
        mine = [ranks.parts(owner, "own", rank) for rank in range(world)]
        terms = list[torch.Tensor | list[Part]]()
        for rank in range(world):
            body = frame(mine[rank])
            for (t, here), values in zip(places, read(body, mine[rank])):
                assert same_bits(values, own[rank][t][here]), (layout.names[t], rank)
            terms.append(mine[rank] if rank == owner else body)
        parts = ranks.parts(owner, "sum")
        slot = slot_of(parts)
        written = reference_noise.reduce(terms, slot, STEP, 0)
        assert written.notch == 0
        sent = slot.out[: written.size]
        for (t, here), total, average in zip(places, read(sent, parts), read(sent, parts, world)):
            assert same_bits(total, sums[t][here]), layout.names[t]
            assert same_bits(average, mean[t][here]), layout.names[t]
            compared += total.numel()
    assert compared == sum(layout.sizes)

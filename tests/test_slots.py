"""The sizes of slots: enough at first, tight later, and the same after a resume."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import generator

from gradzip.engines import noise_layout as layout
from gradzip.engines import reference_noise
from gradzip.engines.noise_layout import Part
from gradzip.exchange.slots import OWN, ROOM, SUM, Slots, aligned, gaussian_bits, is_due


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("hop", [OWN, SUM])
def test_the_bits_of_gaussian_values_are_those_that_frames_have(share: float, hop: str) -> None:
    world, x = 4, torch.randn(40_000, generator=generator(1))
    level = layout.level(reference_noise.statistics(x), share, world)
    if hop == SUM:  # of equal gradients
        level, x = layout.level_of_sum([level] * world), world * x
    room = torch.zeros(layout.body_bound([x.numel()]), dtype=torch.uint8)
    size, _ = reference_noise.encode([Part(x, level)], room)
    assert gaussian_bits(share, world, hop) == pytest.approx(8 * size / x.numel(), rel=0.06)


def slots() -> Slots:
    return Slots.first(0.01, 4, least=1000, values=100_000, bound=500_000)


def test_slots_follow_the_largest_frame_of_the_last_steps() -> None:
    mine = slots()
    first = dict(mine.sizes)
    assert first[OWN] > 50_000
    changes = []
    for step in range(600):
        if mine.begin():
            changes.append(step)
        mine.note({OWN: 50_000 - 10 * step, SUM: 55_000})
    assert changes == [8, 128, 256, 512]  # in step 32 the largest of the last 50 is still the first one
    assert mine.sizes == {OWN: aligned(ROOM * (50_000 - 10 * (512 - 50))), SUM: aligned(ROOM * 55_000)}
    assert all(size % 128 == 0 for size in mine.sizes.values())


def test_slots_never_pass_their_bound_nor_fall_below_the_head_of_a_frame() -> None:
    mine = slots()
    for step in range(40):
        mine.begin()
        mine.note({OWN: 10**9, SUM: 20})
        if is_due(step):
            assert mine.sizes == {OWN: aligned(500_000), SUM: aligned(1000)}


def test_a_resumed_run_changes_its_slots_as_if_it_had_gone_on() -> None:
    mine = slots()
    for step in range(20):
        mine.begin()
        mine.note({OWN: 40_000 + 100 * step, SUM: 50_000})
    other = slots()
    other.load_state_dict(copy.deepcopy(mine.state_dict()))
    for step in range(300):
        assert mine.begin() == other.begin()
        for one in (mine, other):
            one.note({OWN: 45_000 - step, SUM: 50_000})
        assert mine.sizes == other.sizes

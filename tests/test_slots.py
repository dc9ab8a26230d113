"""The sizes of slots: enough at first, tight later, and the same after a resume."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from conftest import generator

from gradzip.engines import noise_layout as layout
from gradzip.engines import reference_noise
from gradzip.engines.noise_layout import Part
from gradzip.exchange.on_stream.slots import (
    LATE,
    NOTCH_BITS,
    OWN,
    SUM,
    Largest,
    Slots,
    aligned,
    gaussian_bits,
    is_due,
    room,
)


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


VALUES = 100_000
ROOM = room(VALUES)


def slots() -> Slots:
    return Slots.first(0.01, 4, least=1000, values=VALUES, bound=500_000)


@pytest.mark.parametrize("values", [60_000, 1_600_000])
@pytest.mark.parametrize("seed", range(3))
def test_slots_of_frames_that_drift_are_tight_and_seldom_too_small(values: int, seed: int) -> None:
    """1,000 steps of 16 frames, 0.3 % apart, whose mean moves by up to 0.25 % a step, for 40 steps each way."""
    rng, mine = generator(seed), Slots.first(0.01, 4, least=1000, values=values, bound=4 * values)
    bits, drift, late = 5.0, 0.0, list[Largest]()
    sent = true = coarser = 0.0
    for step in range(1000):
        if step % 40 == 0:
            drift = 0.005 * float(torch.rand((), generator=rng)) - 0.0025
        bits = min(max(bits * (1 + drift), 3.5), 6.0)
        if len(late) == LATE:
            mine.note({OWN: late.pop(0)})
        mine.begin()
        frames = (values * bits / 8 * (1 + 0.003 * torch.randn(16, generator=rng))).tolist()
        notches = [max(0, math.ceil((size - mine.sizes[OWN]) / (NOTCH_BITS * values / 8))) for size in frames]
        fitted = [size - notch * NOTCH_BITS * values / 8 for size, notch in zip(frames, notches)]
        late.append(Largest(int(max(fitted)), max(notches)))
        if step >= 8:
            sent, true = sent + 16 * mine.sizes[OWN], true + sum(frames)
            coarser += sum(notch > 0 for notch in notches)
    assert sent <= 1.05 * true
    assert coarser <= 4 * 10, "of four ranks"


def test_slots_follow_the_largest_frame_of_the_last_steps() -> None:
    mine = slots()
    first = dict(mine.sizes)
    assert first[OWN] > 50_000
    changes = []
    for step in range(600):
        if mine.begin():
            changes.append(step)
        mine.note({OWN: Largest(50_000 - 10 * step), SUM: Largest(55_000)})
    assert changes[:3] == [8, 24, 32]  # in step 16 the largest of the last 16 is still the first one
    assert {step % 8 for step in changes} == {0}
    assert mine.sizes == {OWN: aligned(ROOM * (50_000 - 10 * (592 - 16))), SUM: aligned(ROOM * 55_000)}
    assert all(size % 128 == 0 for size in mine.sizes.values())


def test_slots_never_pass_their_bound_nor_fall_below_the_head_of_a_frame() -> None:
    mine = slots()
    for step in range(40):
        mine.begin()
        mine.note({OWN: Largest(10**9), SUM: Largest(20)})
        if is_due(step):
            assert mine.sizes == {OWN: aligned(500_000), SUM: aligned(1000)}


def test_a_resumed_run_changes_its_slots_as_if_it_had_gone_on() -> None:
    mine = slots()
    for step in range(20):
        mine.begin()
        mine.note({OWN: Largest(40_000 + 100 * step), SUM: Largest(50_000)})
    other = slots()
    other.load_state_dict(copy.deepcopy(mine.state_dict()))
    for step in range(300):
        assert mine.begin() == other.begin()
        for one in (mine, other):
            one.note({OWN: Largest(45_000 - step), SUM: Largest(50_000)})
        assert mine.sizes == other.sizes


def test_slots_grow_at_once_by_the_notch_of_a_frame_that_was_coarser() -> None:
    mine = slots()
    for _ in range(9):  # now they are as tight as they get
        mine.begin()
        mine.note({OWN: Largest(50_000), SUM: Largest(50_000)})
    tight = dict(mine.sizes)
    assert tight == {OWN: aligned(ROOM * 50_000), SUM: aligned(ROOM * 50_000)}
    mine.note({OWN: Largest(50_900, 2), SUM: Largest(50_100)})
    assert mine.begin()
    assert mine.sizes == {OWN: aligned(ROOM * (50_900 + 2 * 0.25 * 100_000 / 8)), SUM: tight[SUM]}
    assert not mine.begin()
    grown = dict(mine.sizes)
    mine.note({OWN: Largest(50_900, 1), SUM: Largest(50_100)})  # of a step that was under way
    assert not mine.begin(), "a coarser frame never makes a slot smaller"
    assert mine.sizes == grown


def test_a_slot_that_has_grown_has_room_for_the_frame_that_did_not_fit() -> None:
    """A notch is worth a quarter of a bit: real frames, of a tensor whose values turn harder to code."""
    x = torch.randn(40_000, generator=generator(1))
    level = layout.level(reference_noise.statistics(x), 0.01, 4)
    bound = layout.body_bound([x.numel()])
    fine, _ = reference_noise.encode([Part(x, level)], torch.zeros(bound, dtype=torch.uint8))
    mine = Slots.first(0.01, 4, least=100, values=x.numel(), bound=bound)
    for scale in (1.2, 1.5, 2.0):
        size, notch = reference_noise.encode([Part(x * scale, level)], torch.zeros(fine, dtype=torch.uint8))
        whole, none = reference_noise.encode([Part(x * scale, level)], torch.zeros(bound, dtype=torch.uint8))
        assert notch > 0
        assert none == 0
        mine.sizes[OWN] = fine
        mine.note({OWN: Largest(size, notch), SUM: Largest(size)})
        mine.begin()
        assert whole <= mine.sizes[OWN] <= 1.12 * whole


def test_a_resume_between_a_coarser_frame_and_the_next_step_grows_as_well() -> None:
    mine = slots()
    mine.begin()
    mine.sizes[OWN] = 40_064
    mine.note({OWN: Largest(40_000, 1), SUM: Largest(40_000)})
    other = Slots.loaded(json.loads(json.dumps(mine.state_dict())))
    assert mine.begin()
    assert other.begin()
    assert mine.sizes == other.sizes
    assert mine.sizes[OWN] > 43_000


@pytest.mark.parametrize(
    "damage",
    [
        {"sizes": {OWN: 10**15, SUM: 5000}},
        {"sizes": {OWN: 5000, SUM: 1}},
        {"sizes": {OWN: 5000, SUM: -128}},
        {"sizes": {OWN: 5000}},
        {"sizes": {OWN: 5000, SUM: "large"}},
        {"seen": {OWN: [], SUM: [-5]}},
        {"seen": {OWN: ["x"], SUM: []}},
        {"steps": "none"},
    ],
    ids=str,
)
def test_a_state_with_impossible_slots_is_refused_and_changes_nothing(damage: dict[str, object]) -> None:
    mine = slots()
    before = json.dumps(mine.state_dict())
    with pytest.raises((ValueError, KeyError)):
        mine.load_state_dict(json.loads(before) | damage)
    assert json.dumps(mine.state_dict()) == before

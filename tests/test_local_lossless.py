"""Which gradients of a rank's own go lossless where sums go in near mode: found out from a few of their values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import floor_for, generator, gradient, special
from hypothesis import given, settings
from hypothesis import strategies as st

from gradzip import Context, parse
from gradzip.codecs import local_lossless
from gradzip.codecs.gcomp import GComp

NEAR = GComp(own="near")
KINDS = {  # without negative zeros
    "float32": lambda x: x,
    "bfloat16": lambda x: x.bfloat16().float(),
    "float16": lambda x: x.half().float() + 0.0,
    "integers": lambda x: (x * 2**14).round() + 0.0,
}


def size(codec: GComp, x: torch.Tensor, context: Context) -> int:
    return codec.encode(x, context).numel()


@settings(max_examples=80, deadline=None)
@given(
    numel=st.integers(8192, 20_000),
    kind=st.sampled_from(sorted(KINDS)),
    depth=st.integers(-4, 22),
    zeros=st.sampled_from([0.0, 0.5, 0.9]),
    seed=st.integers(0, 1000),
)
def test_the_smaller_frame_is_found(numel: int, kind: str, depth: int, zeros: float, seed: int) -> None:
    x = KINDS[kind](gradient(numel, seed))
    x[torch.rand(numel, generator=generator(seed)) < zeros] = 0
    context = Context(floor=floor_for(x, seed, depth))
    chosen = GComp().for_own(x, context)
    assert chosen in (GComp(), NEAR.exact)
    best = min(size(NEAR, x, context), size(NEAR.exact, x, context))
    # Where both are about as large it does not matter. Frames of few values have more of other things than of these.
    assert size(chosen, x, context) <= 1.1 * best + numel / 16


@pytest.mark.parametrize("numel", [1, 700, 1024, 1025, 5000, 300_000])
def test_what_autocast_makes_of_gradients_goes_lossless(numel: int) -> None:
    x = gradient(numel, seed=numel) + 1e-5
    floor = floor_for(x)
    found = local_lossless.smaller_lossless([(x.bfloat16().float(), floor), (x.half().float(), floor), (x, floor)])
    assert found == [True, True, False]
    assert local_lossless.smaller_lossless([(x.bfloat16().float(), floor_for(x, depth=3))]) == [False], (
        "4096 ulps are less"
    )


@given(kind=st.sampled_from(sorted(KINDS)), part=st.floats(0.0, 0.9), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_zeros_and_what_is_not_finite_say_nothing(kind: str, part: float, seed: int) -> None:
    x = KINDS[kind](gradient(3000, seed))
    floor, plain = floor_for(x, seed), x.clone()
    mute = torch.tensor([0.0, float("inf"), float("-inf"), float("nan")])
    mute = torch.cat([mute, torch.tensor([0x7FABCDEF, 0x7F800001], dtype=torch.int32).view(torch.float32)])
    where = torch.rand(3000, generator=generator(seed)) < part
    x[where] = mute[torch.randint(mute.numel(), (int(where.sum()),), generator=generator(seed + 1))]
    plain[where] = 0
    assert local_lossless.smaller_lossless([(x, floor)]) == local_lossless.smaller_lossless([(plain, floor)])


def test_nothing_known_is_near() -> None:
    zeros, floor = torch.zeros(3000), floor_for(torch.zeros(3000))
    nowhere = torch.empty(0)
    mute = [zeros, -zeros, torch.full((3000,), float("nan")), torch.full((3000,), 2.0**-140)]
    assert local_lossless.smaller_lossless([(x, floor) for x in mute] + [(nowhere, floor_for(nowhere))]) == [False] * 5
    assert local_lossless.smaller_lossless([(gradient(10), None), (gradient(3000).bfloat16().float(), floor)]) == [
        False,
        True,
    ]
    assert local_lossless.smaller_lossless([(special(), floor_for(special()))]) == [False]
    assert local_lossless.smaller_lossless([]) == []


def test_negative_zeros_are_sent() -> None:
    """Lossless blocks leave out zeros unless one is negative; near mode has none."""
    x = gradient(20_000).half().float()
    x[torch.rand(x.numel(), generator=generator(1)) < 0.9] = 0
    context = Context(floor=floor_for(x))
    for zero, smaller in ((0.0, True), (-0.0, False)):
        x[x == 0] = zero
        assert local_lossless.smaller_lossless([(x, context.floor)]) == [smaller]
        assert (size(NEAR.exact, x, context) < size(NEAR, x, context)) == smaller


def test_floors_may_have_the_shape_of_the_parameter() -> None:
    """As gradzip.floors gives them."""
    x = gradient(96 * 512, seed=3)
    x[:512] = 2.0**-100  # in the first row alone there is nothing to keep
    x[512:] = x[512:].bfloat16().float()
    flat = floor_for(x).tensor()
    for floor in (flat, flat.view(96, 512)):
        assert GComp().for_own(x, Context(floor=floor)) == NEAR.exact


def test_some_values_of_all_bits_are_enough() -> None:
    """Blocks send as many bits of each value as the longest of them has."""
    x = gradient(100_000).bfloat16().float()
    assert local_lossless.smaller_lossless([(x, floor_for(x))]) == [True]
    few = torch.rand(x.numel(), generator=generator(1)) < 0.05
    x[few] = gradient(x.numel(), seed=2)[few]
    assert local_lossless.smaller_lossless([(x, floor_for(x))]) == [False]


def test_a_matrix_is_not_judged_by_one_column() -> None:
    x = gradient(1024 * 1024).view(1024, 1024)
    x[:, :2] = 0
    rounded = x.bfloat16().float()
    floor = floor_for(x)
    assert local_lossless.smaller_lossless([(x.view(-1), floor), (rounded.view(-1), floor)]) == [False, True]


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_neighbours_do_not_matter(sizes: list[int], seed: int) -> None:
    """Or the result would depend on the message that a tensor travels in."""
    xs = [list(KINDS.values())[(seed + i) % 3](gradient(n, seed + i)) for i, n in enumerate(sizes)]
    pairs = [(x, floor_for(x, seed)) for x in xs]
    alone = [local_lossless.smaller_lossless([pair])[0] for pair in pairs]
    assert local_lossless.smaller_lossless(pairs) == alone
    as_tensors = [(x, floor.tensor()) for x, floor in pairs]
    assert local_lossless.smaller_lossless(as_tensors) == alone


def test_what_was_found_counts_until_the_next_look() -> None:
    x = gradient(2000)
    rounded, floor, codec = x.bfloat16().float(), floor_for(x), GComp()
    state: dict[str, Any] = {}

    def found(values: torch.Tensor, step: int) -> bool:
        return codec.own_exact([values], [Context("w", step, floor=floor)], [state])[0]

    assert found(rounded, 5), "nothing was known before"
    assert found(x, 6)
    assert found(x, 7)
    assert not found(x, 8)
    assert not found(rounded, 9)
    assert state == {"own_lossless": 0}
    looks = [step for step in range(200) if local_lossless.looks_at(step)]
    assert looks == [0, 1, 2, 4, 8, 16, 32, 64, 128, 192]


@pytest.mark.parametrize(("text", "exact"), [("gcomp:own=lossless", True), ("gcomp:own=near", False)])
def test_users_may_say_it(text: str, exact: bool) -> None:
    codec, state = parse(text), dict[str, Any]()
    assert isinstance(codec, GComp)
    for x in (gradient(2000), gradient(2000).bfloat16().float()):
        assert codec.own_exact([x], [Context(floor=floor_for(x))], [state]) == [exact]
    assert state == {}


@pytest.mark.parametrize("text", ["gcomp:mode=lossless", "gcomp:keep=7", "gcomp:mode=paper"])
def test_other_modes_are_left_alone(text: str) -> None:
    x, codec = gradient(2000).bfloat16().float(), parse(text)
    assert isinstance(codec, GComp)
    assert codec.for_own(x, Context(floor=floor_for(x))) is codec

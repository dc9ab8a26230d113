"""Launches of the GPU engine, on the emulated GPU: what is kept from one to the next, and what must not be."""

from __future__ import annotations

import threading
from typing import Any

import emulated
import pytest
import torch
from conftest import gradient, same_bits
from emulated import floors

from gradzip import engines
from gradzip.engines import reference
from gradzip.engines.cuda import launch
from gradzip.engines.layout import BODY_HEAD_BYTES, TABLE_BYTES, Floor, Job, body_bound
from gradzip.errors import Truncated, Unsupported


def test_what_is_prepared_is_for_the_same_call_alone(gpu: emulated.Emulator) -> None:
    """From the second call on buffers are recognized: new contents count, and so does all else that may change."""
    engine, job, numel = engines.load("cuda"), Job("near"), 700
    x, theta, second = gradient(numel), torch.empty(numel), torch.empty(numel)
    narrow = torch.full((1, 256), 8, dtype=torch.uint8)
    narrow[:, 255] = 0  # its place is the escape's
    body, expected = (torch.empty(body_bound(numel, torch.float32), dtype=torch.uint8) for _ in range(2))

    def both(job: Job, floor: Floor | None, lengths: torch.Tensor | None) -> None:
        size = reference.encode(x, job, expected, floor, lengths)
        for _ in range(2):
            body.zero_()
            assert engine.encode(x, job, body, floor, lengths) == size
            assert torch.equal(body[:size], expected[:size])
        values, back = torch.empty(numel), torch.empty(numel)
        reference.decode(expected[:size], values, floor, job.shift)
        for add in (False, False, True, True):
            back.zero_()
            engine.decode(body[:size], back, floor, job.shift, add=add)
            assert same_bits(back, torch.zeros(numel) + values if add else values)

    for seed in range(2):
        x.copy_(gradient(numel, seed=seed))
        made = floors(numel, "both")
        assert isinstance(made, Floor)
        assert made.second is not None
        theta.copy_(made.theta.roll(seed))
        second.copy_(made.second.roll(seed))
        both(job, Floor(theta, second, -150, -75, -4), None)
        both(job, Floor(theta, second, -148, -75, -4), narrow)
        both(job, Floor(theta, None, -160), narrow)
        both(Job("near", shift=1), Floor(theta, None, -160), narrow)
        both(Job("lossless"), None, None)
    memory = torch.zeros(512, dtype=torch.uint8)
    memory[:256] = narrow
    both(Job("lossless"), None, memory[:256].view(1, 256))
    memory.zero_()[::2] = narrow
    both(Job("lossless"), None, memory[::2].view(1, 256))  # at the same address, every other byte


def test_a_body_that_changes_under_a_prepared_launch(gpu: emulated.Emulator) -> None:
    """Damage, another coding and floors that are missing are noticed in the second call on a buffer as in the first."""
    engine, x, floor, back = engines.load("cuda"), gradient(5_000), floors(5_000, "given"), torch.empty(5_000)
    room = torch.empty(body_bound(5_000, torch.float32), dtype=torch.uint8)
    size = reference.encode(x, Job("lossless"), room)
    body = room[:size].clone()
    engine.decode(body, back)
    damaged = body.clone()
    damaged[BODY_HEAD_BYTES + TABLE_BYTES] ^= 1
    good = body.clone()
    body.copy_(damaged)
    with pytest.raises(Truncated):
        engine.decode(body, back)
    body.copy_(good)
    engine.decode(body, back.zero_())
    assert same_bits(back, x)
    body[0] = 1
    with pytest.raises(Unsupported, match="needs floor="):
        engine.decode(body, back)
    bodies = [room[: reference.encode(x, Job("paper"), room, floor)].clone() for _ in range(2)]
    sums = list(torch.zeros(2, 5_000))
    reference.decode(bodies[0], back.zero_(), floor)
    for _ in range(2):
        engine.decode_many(bodies, [one.zero_() for one in sums], [floor] * 2, add=True)
        assert all(same_bits(one, torch.zeros(5_000) + back) for one in sums)


def test_numbers_of_launches_may_wrap(gpu: emulated.Emulator) -> None:
    """Launches are told apart by an epoch of 22 bits and by a count of tickets of 32; each starts again at its end."""
    x = gradient(9_000)
    engine, job = engines.load("cuda"), Job("lossless")
    expected = torch.empty(body_bound(9_000, torch.float32), dtype=torch.uint8)
    size = reference.encode(x, job, expected)
    space = launch.workspace(x.device, 0)
    space.epoch = (1 << 22) - 3
    space._counters.fill_(-4)
    space.served = [(1 << 32) - 4] * 2
    for _ in range(4):
        out, back = torch.zeros_like(expected), torch.empty_like(x)
        assert engine.encode(x, job, out) == size
        assert torch.equal(out[:size], expected[:size])
        engine.decode(out[:size], back)
        assert same_bits(back, x)
    assert space.epoch < 10


def test_faults_of_a_sum_are_not_left_to_the_next(gpu: emulated.Emulator) -> None:
    """One body is damaged where a kernel finds it, another too short to be looked at."""
    engine, x, job = engines.load("cuda"), gradient(5_000), Job("lossless")
    body = torch.empty(body_bound(5_000, torch.float32), dtype=torch.uint8)
    body = body[: reference.encode(x, job, body)]
    damaged, out = body.clone(), torch.empty(5_000)
    other = torch.empty(5_000)
    damaged[BODY_HEAD_BYTES + TABLE_BYTES] ^= 1  # the length of the first block
    with pytest.raises(Truncated):
        engine.decode_many([damaged, body[:20]], [out, other])
    engine.decode(body, out)
    assert same_bits(out, x)


def test_threads_that_share_a_stream(gpu: emulated.Emulator) -> None:
    mine, others = launch.workspace(torch.device("cpu"), 0), list[object]()
    thread = threading.Thread(target=lambda: others.append(launch.workspace(torch.device("cpu"), 0)))
    thread.start()
    thread.join()
    assert launch.workspace(torch.device("cpu"), 0) is mine
    assert others != [mine]


def test_an_interrupted_launch(gpu: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows how many tickets it took: what comes next must not count on it."""
    if not launch.SMALL_BLOCKS:
        pytest.skip("kernels for large messages count from 0")
    engine, x, job = engines.load("cuda"), gradient(9_000), Job("lossless")
    out, expected = (torch.zeros(body_bound(9_000, torch.float32), dtype=torch.uint8) for _ in range(2))
    launch._of_thread.workspaces.clear()
    size = engine.encode(x, job, out)
    prepared: Any = next(iter(launch.workspace(x.device, 0).prepared.values()))
    start = prepared._start

    def interrupted() -> None:
        start()
        raise KeyboardInterrupt

    monkeypatch.setattr(prepared, "_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.encode(x, job, out)
    out.zero_()
    assert engine.encode(x, job, out) == size == reference.encode(x, job, expected)
    assert torch.equal(out[:size], expected[:size])

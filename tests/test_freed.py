"""detach gives back what an exchange on streams took: buffers of messages, pinned rows, shapes and events."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import emulated
import pytest
import streams
import torch
from ranks import run_ranks
from test_attach_noise import Task

from gradzip import Fixed
from gradzip.exchange.on_stream.message import DeviceMessage
from gradzip.exchange.peers.buffers import Buffers


def bytes_held() -> int:
    """Of all tensors that are alive; memory that several share counts once."""
    gc.collect()
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for x in gc.get_objects()
        if issubclass(type(x), torch.Tensor) and x.layout == torch.strided
    }
    return sum(storages.values())


def of_messages() -> tuple[list[weakref.ref[Any]], list[weakref.ref[Any]]]:
    """Those that are alive, and the frames that they move."""
    gc.collect()
    found = [each for each in gc.get_objects() if issubclass(type(each), DeviceMessage)]
    frames = [x for each in found for x in (each.sent, each.received, each.gathered)]
    return [weakref.ref(each) for each in found], [weakref.ref(x) for x in frames]


def detached(rank: int, policy: str) -> dict[str, Any]:
    streams.install()
    task = Task(Fixed("cast"))  # what is made once, for all
    task.train(0, 3)
    task.handle.detach()
    task = Task(Fixed(policy))
    task.train(0, 6)
    handle, stream = task.handle, task.handle._stream
    assert stream is not None
    state = handle.state_dict()
    messages, frames = of_messages()
    checks = stream._checks
    assert checks._layout is not None
    rows = [weakref.ref(checks._layout.row), *(weakref.ref(pinned) for pinned, _ in checks._free)]
    shapes = [weakref.ref(x) for x in handle._shapes._places.values()]
    held = bytes_held()
    handle.detach()
    freed = held - bytes_held()
    counts = {"messages": len(messages), "rows": len(rows), "shapes": len(shapes)}
    left = [each() for each in (*messages, *frames, *rows, *shapes)]
    after = handle.state_dict()
    task.train(6, 7)  # by DDP itself
    return {
        "counts": counts,
        "left": sum(each is not None for each in left),
        "freed": freed,
        "state": after.keys() == state.keys() and bool((after["exchange/slots"] == state["exchange/slots"]).all()),  # type: ignore[union-attr]
        "steps": handle.stats()["steps"],
    }


@pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("policy", ["noise", "int8", "topk:ratio=0.1", "powersgd:rank=2"])
def test_detach_gives_memory_back_while_the_handle_lives(policy: str) -> None:
    for found in run_ranks(2, detached, policy):
        assert found["left"] == 0
        assert found["counts"]["rows"] >= 2, "one is in flight at least"
        assert found["counts"]["messages"] >= (policy != "powersgd:rank=2")
        assert found["counts"]["shapes"] == (4 if policy == "noise" else 0)
        assert found["freed"] > 0
        assert found["state"], "a state can still be saved"
        assert found["steps"] == 6


def test_buffers_of_a_channel_are_let_go() -> None:
    buffers = Buffers()
    taken = [buffers.take(5000), buffers.take(100)]
    there = [weakref.ref(each) for each in taken]
    buffers.give(taken)
    assert buffers.held > 5000
    buffers.free()
    assert buffers.held == 0
    assert [each() for each in there] == [None, None]

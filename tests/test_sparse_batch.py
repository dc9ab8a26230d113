"""Small tensors that sparse codecs code together: the same frames, means, residuals and state as one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from conftest import generator, gradient, same_bits
from three_ranks import means_and_residuals

from gradzip.codecs import Context, parse
from gradzip.codecs.sparse import SparseFrame, TopK, fewest, union
from gradzip.codecs.sparse_batch import Batch, bytes_of, read, write
from gradzip.errors import CodecError
from gradzip.exchange.coding import Message, Values
from gradzip.exchange.message_codecs import message_codec
from gradzip.exchange.on_host import generic, sparse
from gradzip.exchange.parts import Table
from gradzip.exchange.program import Hop
from gradzip.feedback import Memory

CODECS = ["threshold", "threshold:value=0.5", "topk:ratio=0.1", "topk:ratio=1.0", "dgc:ratio=0.02"]
OWN = Hop(0, 1, True, False)
SIZES = [300, 300, 4, 300, 7, 4, 1, 300, 2000, 20011, 4]


def flat_of(sizes: list[int], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Tensors one behind the other, some of them all zero, and some with values that are not finite."""
    x = torch.cat([gradient(size, seed=seed + number) for number, size in enumerate(sizes)])
    x[torch.rand(x.numel(), generator=generator(seed)) < (0, 0.5, 0.99)[seed % 3]] = 0
    x[: sizes[0]] = 0
    x[sizes[0] : 2 * sizes[0]] = -0.25
    return x.to(dtype)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN has one pattern in a vector of the processor and another one behind its last."""
    return same_bits(a.nan_to_num(77.0), b.nan_to_num(77.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("text", [*CODECS, "threshold:value=1e-9", "dgc:ratio=0.3,clip=0.01,warmup=8", "union"])
@pytest.mark.parametrize("sizes", [[5, 5, 5], SIZES, [65536, 3, 65536, 1], [1024] * 9])
def test_frames_and_state_are_those_of_each_tensor(text: str, sizes: list[int], dtype: torch.dtype) -> None:
    codec, batch, together = (
        parse("topk" if text == "union" else text),
        Batch(np.array(sizes)),
        dict[str, torch.Tensor](),
    )
    assert isinstance(codec, SparseFrame)
    alone = [dict[str, torch.Tensor]() for _ in sizes]
    for step in range(3):
        x = flat_of(sizes, step, dtype)
        if step == 2:
            x[0], x[-1] = -torch.inf if text.startswith("dgc") else torch.nan, -torch.inf  # see `equal`
        context = Context(step=step, scale=4.0, world=4, state=dict(together))
        picked = union(x, batch) if text == "union" else codec.pick(x, batch, context)
        together = context.state
        room = torch.full((int((bytes_of(batch, picked) + 7).sum()),), 255, dtype=torch.uint8)
        written, at, starts = write(room, codec.wire_id, batch, picked), 0, list[int]()
        for number, each in enumerate(x.split(sizes)):
            own = Context(step=step, scale=4.0, world=4, state=alone[number])
            frame = (codec.for_sum(each) if text == "union" else codec).encode(each, own)
            assert frame.numel() == written[number]
            assert torch.equal(frame, room[at : at + frame.numel()]), f"tensor {number} in step {step}"
            starts.append(at)
            end = at + frame.numel()
            at = end + -end % 8
            assert not room[end:at].any()
            for field, value in own.state.items():
                assert equal(value, together[field][batch.starts[number] : batch.ends[number]])
        found = read(room[:at], np.array(starts), written, (codec.wire_id,), batch, batch.by_size(fewest), dtype)
        assert found is not None
        assert torch.equal(found.index, picked.index)
        assert same_bits(found.values, picked.values)


def exchanged(text: str, dtype: torch.dtype, in_one: bool, scale: float, taken_apart: bool) -> list[torch.Tensor]:
    """Frames, means and what Memory holds of some steps of three ranks that send all to all."""
    codec, world, names = parse(text), 3, [f"layer.{number}" for number in range(len(SIZES))]
    messages, table = message_codec(codec), Table.of(names, SIZES, [1])
    assert messages is not None
    memories, found = [Memory(rank) for rank in range(world)], list[torch.Tensor]()
    buffers = [torch.empty(sum(SIZES), dtype=dtype) for _ in range(world)]
    tensors = [list(buffer.split(SIZES)) for buffer in buffers]
    if not in_one:
        tensors = [[tensor.clone() for tensor in of_rank] for of_rank in tensors]
    values = [Values(of_rank) for of_rank in tensors]
    for step in range(5):
        coders, frames = [], []
        for rank in range(world):
            fresh = flat_of(SIZES, 10 * step + rank, dtype) * scale
            fresh[-2000:] *= step != 2  # no gradient in this step
            torch._foreach_copy_(list(values[rank].tensors), list(fresh.split(SIZES)))
            if step == 3:
                values[rank].tensors[5][0] = torch.nan
            about = Message(names, dtype, rank, world, step, scale=scale, memory=memories[rank])
            coders.append(messages.coder(about))
            coders[-1].measure(values[rank])
            room = torch.empty(messages.bound(table, 0, dtype), dtype=torch.uint8)
            (size,) = coders[-1].encode(table, [0], values[rank], OWN, [room])
            frames.append(room[:size])
        for rank, coder in enumerate(coders):
            coder.decode(table, 0, frames, None, OWN, values[rank], world)
            coder.finish()
            found += [*frames, *(tensor.clone() for tensor in values[rank].tensors)]
            memories[rank].drop() if step == 3 else memories[rank].commit()
            if taken_apart or step == 4:
                state = memories[rank].state_dict()
                found += [value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]
    return found


@pytest.mark.parametrize("in_one", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", [*CODECS, "topk:ratio=0.1,feedback=bf16", "threshold:feedback=false", "sign"])
def test_steps_give_the_same_bits_together_and_one_by_one(
    text: str, dtype: torch.dtype, in_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = [exchanged(text, dtype, in_one, 4.0, apart) for apart in (False, True)]
    for module in (sparse, generic):
        monkeypatch.setattr(module, "LONGEST", 0)
    one_by_one = [exchanged(text, dtype, False, 4.0, apart) for apart in (False, True)]
    for a, b in zip(together, one_by_one):
        assert len(a) == len(b) > 0
        assert all(torch.equal(x, y) if x.dtype == torch.uint8 else equal(x, y) for x, y in zip(a, b))


def routed(text: str, route: str) -> list[torch.Tensor]:
    messages = message_codec(parse(text))
    assert messages is not None
    return means_and_residuals(
        messages, route, SIZES, lambda step, rank: list(flat_of(SIZES, 10 * step + rank).split(SIZES))
    )


@pytest.mark.parametrize("route", ["alltoall", "allgather", "ring"])
@pytest.mark.parametrize("text", CODECS)
@pytest.mark.parametrize("longest", [1 << 16, 400])
def test_exchanges_give_the_same_bits_together_and_one_by_one(
    text: str, route: str, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unions of sums as well; with `longest` some parts are coded one by one between those that are not."""
    monkeypatch.setattr(sparse, "LONGEST", longest)
    together = routed(text, route)
    monkeypatch.setattr(sparse, "LONGEST", 0)
    one_by_one = routed(text, route)
    assert len(together) == len(one_by_one) > 0
    assert all(map(same_bits, together, one_by_one))


@pytest.mark.parametrize("text", CODECS)
def test_damage_is_found_or_decoded_as_in_single_frames(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [300, 300, 4, 300, 7, 4, 1, 40]
    messages, names = message_codec(parse(text)), [f"layer.{number}" for number in range(len(sizes))]
    assert messages is not None
    table, x = Table.of(names, sizes, [1]), list(flat_of(sizes, 4).split(sizes))
    coder = messages.coder(Message(names, torch.float32))
    coder.measure(Values(x))
    room = torch.empty(messages.bound(table, 0, torch.float32), dtype=torch.uint8)
    (size,) = coder.encode(table, [0], Values(x), OWN, [room])
    seen = set[str]()
    for at, change in zip(range(0, size, 2), itertools.cycle((0x41, 0x80, 0x06))):
        damaged = room[:size].clone()
        damaged[at] ^= change
        outcomes: list[torch.Tensor | str] = []
        for longest in (1 << 16, 0):
            monkeypatch.setattr(sparse, "LONGEST", longest)
            fresh, out = messages.coder(Message(names, torch.float32)), [torch.zeros(n) for n in sizes]
            fresh.measure(Values(x))
            try:
                fresh.decode(table, 0, [damaged], None, OWN, Values(out), 1)
                outcomes.append(torch.cat(out))
            except CodecError as error:
                outcomes.append(str(error))
        together, one_by_one = outcomes
        assert isinstance(together, str) == isinstance(one_by_one, str), f"byte {at}"
        seen.add("refused" if isinstance(together, str) else "decoded")
        if isinstance(together, torch.Tensor) and isinstance(one_by_one, torch.Tensor):
            assert same_bits(together, one_by_one), f"byte {at}"
        else:
            assert together == one_by_one
    assert seen == {"refused", "decoded"}


def test_states_that_some_tensors_lack_are_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a checkpoint of a model with fewer parameters under dgc."""
    codec, found = parse("dgc:ratio=0.1"), []
    names, x = ["a", "b", "c"], [gradient(n, seed=n) for n in (30, 30, 40)]
    table, messages = Table.of(names, [30, 30, 40], [1]), message_codec(codec)
    assert messages is not None
    for longest in (1 << 16, 0):
        monkeypatch.setattr(sparse, "LONGEST", longest)
        memory = Memory(0)
        memory.state("b", "dgc").update(own_u=torch.ones(30), own_v=torch.ones(30))
        memory.commit()
        for step in range(2):
            coder = messages.coder(Message(names, torch.float32, step=step, memory=memory))
            coder.measure(Values(x))
            room = torch.zeros(messages.bound(table, 0, torch.float32), dtype=torch.uint8)
            coder.encode(table, [0], Values(x), OWN, [room])
            coder.finish()
            memory.commit()
            found += [room]
        found += [
            torch.cat(
                [value.view(-1) for _, value in sorted(memory.state_dict().items()) if isinstance(value, torch.Tensor)]
            )
        ]
    assert all(map(torch.equal, found[:3], found[3:]))


def test_a_union_is_a_frame_of_top_k() -> None:
    x, batch = flat_of(SIZES, 1), Batch(np.array(SIZES))
    picked = union(x, batch)
    assert picked.counts.tolist() == [max(int(each.count_nonzero()), fewest(each.numel())) for each in x.split(SIZES)]
    assert isinstance(parse("threshold").for_sum(x), TopK)  # type: ignore[attr-defined]

"""Tensors of one size that are coded together: the same bytes, values and residuals as one by one."""

from __future__ import annotations

import pytest
import torch
from conftest import gradient, same_bits
from three_ranks import means_and_residuals

from gradzip.codecs import REGISTRY, Context, parse
from gradzip.errors import CodecError
from gradzip.exchange.coding import Message
from gradzip.exchange.on_host import generic
from gradzip.exchange.on_host.generic import GenericOnHost
from gradzip.exchange.parts import Table
from gradzip.exchange.program import Hop

OPTIONS = ["qsgd:bits=3,bucket=100,norm=l2", "natural:bits=5", "terngrad:clip=2.5"]
CODECS = sorted(name for name, kind in REGISTRY.items() if kind.codes_rows) + OPTIONS
OWN = Hop(0, 1, True, False)


def tensors(size: int) -> torch.Tensor:
    x = torch.stack([gradient(size, seed=number) for number in range(9)])
    x[3], x[4, size // 2 :], x[5] = 0, 0, 1.5
    x[6, size // 2], x[7, 0], x[8] = torch.nan, -torch.inf, x[8].abs().neg()
    return x


def test_the_codecs_that_every_model_of_small_tensors_needs_take_rows() -> None:
    assert {"sign", "onebit", "qsgd", "terngrad", "natural", "randomk", "randomblock"} <= set(CODECS)


@pytest.mark.parametrize("size", [1, 2, 7, 130, 1024, 3001])
@pytest.mark.parametrize("codec", CODECS)
def test_rows_are_coded_as_each_of_them_is(codec: str, size: int) -> None:
    made, x, names = parse(codec), tensors(size), [f"layer.{number}" for number in range(9)]
    together = Context("", step=3, seed=7, rank=1, world=4, names=names)
    bodies = torch.zeros(len(x), made.bound(size, x.dtype) + 13, dtype=torch.uint8)
    written = made._encode(x, together, bodies)
    decoded, added = torch.full_like(x, torch.nan), x.clone()
    made._decode(bodies[:, :written], Context(), decoded, False)
    made._decode(bodies[:, :written], Context(), added, True)
    for number, (row, name) in enumerate(zip(x, names)):
        body = torch.zeros(bodies.shape[1], dtype=torch.uint8)
        context = Context(name, step=3, seed=7, rank=1, world=4)
        assert made._encode(row, context, body) == written
        assert torch.equal(body, bodies[number]), name
        alone, sum_alone = torch.empty(size), row.clone()
        made._decode(body[:written], Context(), alone, False)
        made._decode(body[:written], Context(), sum_alone, True)
        assert same_bits(alone, decoded[number]), name
        assert same_bits(sum_alone, added[number]), name


SIZES = [300, 300, 4, 300, 7, 4, 300, 300, 2000, 4]


def steps(codec: str, route: str) -> list[torch.Tensor]:
    def gradients(step: int, rank: int) -> list[torch.Tensor]:
        return [gradient(n, seed=100 * step + 10 * rank + n) for n in SIZES]

    return means_and_residuals(GenericOnHost(parse(codec)), route, SIZES, gradients)


@pytest.mark.parametrize("route", ["alltoall", "allgather", "ring"])
@pytest.mark.parametrize(
    "codec",
    ["sign", "qsgd", "onebit", "qsgd:feedback=true", "natural", "randomk:ratio=0.1", "randomblock:ratio=0.1"],
)
def test_exchanges_give_the_same_bits_with_rows_and_without(
    codec: str, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_rows = steps(codec, route)
    monkeypatch.setattr(generic, "LONGEST", 0)
    without = steps(codec, route)
    assert len(with_rows) == len(without) > 0
    assert all(map(same_bits, with_rows, without))


@pytest.mark.parametrize("codec", ["sign", "qsgd", "onebit", "natural", "terngrad", "randomk:ratio=0.1"])
def test_damage_that_shows_in_single_frames_is_found_in_rows(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    messages, names = GenericOnHost(parse(codec)), [f"layer.{number}" for number in range(len(SIZES))]
    table, x = Table.of(names, SIZES, [1]), [gradient(n, seed=n) for n in SIZES]
    coder = messages.coder(Message(names, torch.float32))
    coder.measure(generic.Values(x))
    room = torch.empty(messages.bound(table, 0, torch.float32), dtype=torch.uint8)
    (size,) = coder.encode(table, [0], generic.Values(x), OWN, [room])
    seen = set[str]()
    for at in range(0, size, 3):
        damaged = room[:size].clone()
        damaged[at] ^= 0x41
        outcomes = []
        for longest in (1 << 16, 0):
            monkeypatch.setattr(generic, "LONGEST", longest)
            fresh, out = messages.coder(Message(names, torch.float32)), [torch.zeros(n) for n in SIZES]
            fresh.measure(generic.Values(x))
            try:
                fresh.decode(table, 0, [damaged], None, OWN, generic.Values(out), 1)
                outcomes.append(torch.cat(out))
            except CodecError:
                outcomes.append(None)
        together, one_by_one = outcomes
        assert one_by_one is not None or together is None, f"byte {at}"  # heads that differ are refused as well
        seen.add("refused" if together is None else "decoded")
        if together is not None and one_by_one is not None:
            assert same_bits(together, one_by_one), f"byte {at}"
    assert seen == {"refused", "decoded"}

"""The codecs int8, int4 and fp8: what their numbers mean, and training with them on both runners."""

from __future__ import annotations

import copy
from typing import Any

import emulated
import pytest
import streams
import torch
import torch.distributed as dist
from conftest import gradient, same_bits
from ranks import run_ranks
from test_attach_noise import Task, quiet
from training import same

import gradzip
from gradzip import Context, Unsupported, parse
from gradzip.codecs.scaled import Fp8, Int4, Int8, Scaled
from gradzip.engines.scaled_layout import BLOCKS
from gradzip.errors import Corrupt
from gradzip.exchange.message_codecs import fills_frames, stream_codec
from gradzip.exchange.on_stream.coded import CodedOnStream
from gradzip.wire import HEADER_BYTES

HEAD = 16
DRAWS = 800
CODECS = [Int8(), Int4(), Fp8(), Int8(hadamard=True), Int4(128, hadamard=True), Fp8(32)]


def means(codec: Scaled, x: torch.Tensor, world: int = 1) -> torch.Tensor:
    """The mean over ranks of what they send for the same tensor, for many steps."""
    draws = [
        torch.stack([gradzip.decode(codec.encode(x, Context("w", step, 0, r, world))) for r in range(world)]).mean(0)
        for step in range(DRAWS)
    ]
    return torch.stack(draws).double()


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_the_mean_over_many_draws_is_the_tensor(codec: Scaled, scale: float) -> None:
    """Within 6 standard errors for each of 300 values, the deviation measured over the same draws."""
    assert not codec.biased
    assert codec.error_memory is None
    x = gradient(300, seed=1) * scale
    draws = means(codec, x)
    spread = draws.std(0) / DRAWS**0.5
    # what is almost never drawn has no spread to be measured: one draw's share of the largest value covers it
    assert bool(((draws.mean(0) - x.double()).abs() <= 6 * spread + x.abs().max() / DRAWS).all())
    assert float(spread.max()) > 0


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_ranks_draw_so_that_their_errors_cancel(codec: Scaled) -> None:
    x = gradient(300, seed=1)
    alone, together = (float((means(codec, x, world) - x).square().mean()) for world in (1, 4))
    assert together < 0.8 * alone / 4, "independent draws would give a quarter; evenly spread ones 5/8 of that"


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("kind", "most"), [(Int8, 127), (Int4, 7)])
def test_integers_are_within_a_step_of_their_block(kind: type[Int8 | Int4], most: int, block: int) -> None:
    x = gradient(5000, seed=2)
    y = gradzip.decode(gradzip.encode(x, kind(block)))
    step = torch.stack([part.abs().max() / most for part in x.split(block)]).repeat_interleave(block)[:5000]
    assert bool(((y - x).abs() <= step * (1 + 2**-7)).all()), "scales have 8 bits, rounded up"
    assert bool((y[x == 0] == 0).all())
    exact = torch.arange(-most, most + 1) * 0.125
    assert torch.equal(gradzip.decode(gradzip.encode(exact[:block], kind(block)))[:1], exact[:1])


def test_fp8_keeps_the_size_of_small_values() -> None:
    x = torch.cat([torch.ones(1), 2.0 ** torch.arange(-13, 0)])
    y = gradzip.decode(gradzip.encode(x, "fp8"))
    assert bool(((y - x).abs() <= x / 8 * 1.001).all())


@pytest.mark.parametrize("codec", [Int4(128), Int8(256)], ids=str)
def test_a_transform_lowers_the_noise_of_a_block_with_one_large_value(codec: Int4 | Int8) -> None:
    x = torch.randn(codec.block, generator=torch.Generator().manual_seed(1))
    x[7] = 100
    errors = []
    for each in (codec, type(codec)(codec.block, hadamard=True)):
        y = torch.stack([gradzip.decode(each.encode(x, Context("w", step))) for step in range(100)])
        errors.append(float((y - x).square().mean()))
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_numbers_stay_finite(codec: Scaled, dtype: torch.dtype) -> None:
    x = torch.tensor([1, -1, 0.9, 0, 1e-4] * 200) * torch.finfo(dtype).max
    assert bool(gradzip.decode(gradzip.encode(x.to(dtype), codec)).isfinite().all())


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_value_makes_its_block_nan_and_no_other(codec: Scaled, bad: float) -> None:
    x = gradient(1024)
    x[300] = bad
    y = gradzip.decode(gradzip.encode(x, codec))
    first = 300 // codec.block * codec.block
    assert bool(y[first : first + codec.block].isnan().all())
    assert int(y.isfinite().sum()) == 1024 - codec.block


def test_sizes() -> None:
    """A bfloat16 scale for each block, and codes up to a multiple of 32 values."""
    for codec, bits in ((Int8(128), 8), (Int4(32), 4), (Fp8(256), 8)):
        size = codec.bound(1024, torch.float32) - HEADER_BYTES - HEAD
        assert size == -(-2 * 1024 // codec.block // 16) * 16 + 1024 * bits // 8
    assert Int4().bound(1, torch.float32) == HEADER_BYTES + HEAD + 16 + 16


@pytest.mark.parametrize("spec", ["int8:block=16", "int4:block=512", "int4:block=100", "fp8:block=0", "int8:bits=3"])
def test_nonsense_is_refused(spec: str) -> None:
    with pytest.raises(Unsupported):
        parse(spec)


@pytest.mark.parametrize(("at", "value"), [(0, 33), (1, 1), (2, 2), (3, 1), (5, 1)])
def test_damaged_heads_are_refused(at: int, value: int) -> None:
    frame = gradzip.encode(gradient(300), "int8")
    frame[HEADER_BYTES + at] = value
    with pytest.raises(Corrupt, match="head"):
        gradzip.decode(frame)


def test_float64_is_refused() -> None:
    with pytest.raises(Unsupported, match="float64"):
        gradzip.encode(torch.ones(3).double(), "int4")


def test_codecs_with_feedback_travel_tensor_by_tensor() -> None:
    for text in ("int8", "int4:block=64", "fp8"):
        assert fills_frames(parse(text))
        assert stream_codec(parse(text)) is not None
        kept = parse(f"{text}{',' if ':' in text else ':'}feedback=true")
        assert kept.error_memory == "fp32"
        assert not fills_frames(kept)
        assert isinstance(stream_codec(kept), CodedOnStream), "part by part, too"
        for form in ("bf16", "cpu"):  # these leave the GPU, or its form
            assert stream_codec(parse(f"{text}{',' if ':' in text else ':'}feedback={form}")) is None


# --- By attach -------------------------------------------------------------------------------------------------------

POLICIES = ["int8", "int4", "fp8", "int4:block=128,hadamard=true"]


def trained(rank: int, policies: list[str]) -> dict[str, Any]:
    """The host runner first, then the stream runner's stand-in, with other buckets; and a resumed run."""
    quiet()
    out: dict[str, Any] = {}
    for runner in ("host", "stream"):
        if runner == "stream":
            streams.install()
        for policy in policies:
            for dtype in (torch.float32, torch.bfloat16):
                task = Task(policy, bucket_mb=0.005 if runner == "host" else 25, dtype=dtype)
                task.train(0, 3)
                state = [copy.deepcopy(part.state_dict()) for part in (task.model, task.optimizer, task.handle)]
                task.train(3, 6)
                again = Task(policy, dtype=dtype)
                parts: tuple[Any, ...] = (again.model, again.optimizer, again.handle)
                for part, saved in zip(parts, state):
                    part.load_state_dict(saved)
                again.train(3, 6)
                stats = task.handle.stats()
                out[f"{runner} {policy} {dtype}"] = task.parameters(), again.parameters(), stats
    return out


@pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("world", [2, 3])
def test_both_runners_give_the_same_bits_and_resume(world: int) -> None:
    ranks = run_ranks(world, trained, POLICIES if world == 2 else POLICIES[:1], deadline=300)
    for found in ranks:
        for case, (parameters, again, stats) in found.items():
            runner, _, rest = case.partition(" ")
            assert same(parameters, ranks[0][f"host {rest}"][0]), case
            assert same(again, parameters), f"{case}: a resume changes something"
            assert stats["runner"] == runner
            assert stats["noise"] == {}
            if case.startswith("host") and "bfloat16" not in case:  # slots are as large as the largest frame
                assert stats["ratio"] > (5 if "int4" in case else 3), case


def overflown(rank: int) -> bool:
    """An infinity of one rank reaches all of them, and the next step is as if nothing had been."""
    quiet()
    task = Task("int4")
    task.train(0, 2)
    task.optimizer.zero_grad()
    task.backward(2, torch.tensor(torch.inf if rank == 1 else 1.0))
    bad = task.gradients()
    task.train(3, 4)
    return not bool(bad.isfinite().all()) and bool(task.gradients().isfinite().all())


def test_an_overflow_is_seen_by_all_ranks() -> None:
    assert run_ranks(2, overflown) == [True, True]


def with_feedback(rank: int) -> list[torch.Tensor]:
    quiet()
    task = Task(gradzip.Fixed("int4:feedback=true"))
    task.train(0, 6)
    assert dist.get_world_size() == 2
    return task.parameters()


def test_replicas_stay_identical_with_feedback() -> None:
    one, other = run_ranks(2, with_feedback)
    assert all(map(same_bits, one, other))


def differing(rank: int) -> str:
    quiet()
    with pytest.raises(RuntimeError) as raised:
        Task("int4:block=64" if rank else "int4:block=32").train(0, 2)
    return str(raised.value)


def test_ranks_with_another_block_are_told() -> None:
    for said in run_ranks(2, differing):
        assert "int4:block=64" in said
        assert "int4/" in said

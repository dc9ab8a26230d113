"""Exchanges without DDP: FSDP2's reduce-scatters and lists of plain tensors, by both runners."""

from __future__ import annotations

from typing import Any

import emulated
import pytest
import streams
import torch
import torch.distributed as dist
from conftest import gradient, same_bits
from ranks import TIMEOUT, run_ranks
from torch import nn

from gradzip.codecs import parse
from gradzip.errors import PeerError, Unsupported
from gradzip.exchange import calls as exchange_calls
from gradzip.exchange.calls import HostCalls, StreamCalls
from gradzip.exchange.coding import Message
from gradzip.exchange.compiler import compile_reduce_scatter
from gradzip.exchange.interpreter import Interpreter
from gradzip.exchange.message_codecs import message_codec
from gradzip.exchange.on_host.runner import HostProgram
from gradzip.exchange.peers.channel import Channel, open_channel
from gradzip.exchange.topology import Topology

STREAM = ["identity", "cast", "noise", "int8", "int4:hadamard=true", "fp8"]
HOST = ["gcomp:mode=lossless", "gcomp:keep=7", *STREAM]
RUNNERS = ["host", pytest.param("stream", marks=pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++"))]
needs_emulator = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")


def connect() -> Channel:
    assert dist.group.WORLD is not None
    return open_channel(dist.group.WORLD, torch.device("cpu"), timeout=TIMEOUT)


def calls(codec: str, runner: str) -> HostCalls | StreamCalls:
    if runner == "host":
        return HostCalls(connect(), parse(codec))
    streams.install()
    assert dist.group.WORLD is not None
    return StreamCalls(connect(), parse(codec), dist.group.WORLD)


def expected_of_scatter(codec: str, name: str, inputs: list[torch.Tensor], step: int, mean: bool) -> list[torch.Tensor]:
    """What each rank gets, by the interpreter."""
    world, count = len(inputs), inputs[0].numel() // len(inputs)
    made = message_codec(parse(codec))
    assert made is not None
    names, topology = [f"{name}[{rank}]" for rank in range(world)], Topology(0, tuple((r,) for r in range(world)))
    program = compile_reduce_scatter(made.text, names, [count] * world, range(world), inputs[0].dtype, topology, mean)
    messages = [Message(names, inputs[0].dtype, rank, world, step, hops=program.hops) for rank in range(world)]
    results = Interpreter(program, made, messages).run([list(x.split_with_sizes([count] * world)) for x in inputs])
    return [results[rank][rank] for rank in range(world)]


def scattered(rank: int, runner: str) -> list[str]:
    """Reduce-scatters of several sizes and types that differ from the interpreter."""
    world, wrong = dist.get_world_size(), []
    for codec in [*(HOST if runner == "host" else STREAM), "qsgd:bits=4", "natural"]:
        calling = calls(codec, runner)
        for step, (count, dtype, mean) in enumerate(
            (
                (2000, torch.float32, True),
                (1, torch.float32, False),
                (333, torch.bfloat16, True),
                (0, torch.float32, True),
                (2000, torch.float32, True),
            )
        ):
            inputs = [gradient(world * count, seed=10 * step + r, dtype=dtype) for r in range(world)]
            output = torch.full((count,), 7.0, dtype=dtype)
            calling.reduce_scatter("layer", output, inputs[rank].clone(), step, mean).wait()
            if not same_bits(output, expected_of_scatter(codec, "layer", inputs, step, mean)[rank]):
                wrong.append(f"{codec} {count} {dtype} {mean}")
    return wrong


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_reduce_scatter_has_the_bits_of_the_interpreter(runner: str) -> None:
    assert run_ranks(3, scattered, runner) == [[]] * 3


def in_chunks(rank: int) -> bool:
    """A message that the host runner cuts into several chunks."""
    count = 20_001
    inputs = [gradient(2 * count, seed=r) for r in range(2)]
    output, calling = torch.empty(count), calls("noise", "host")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_calls, "HostProgram", lambda program, codec: HostProgram(program, codec, 5000))
        calling.reduce_scatter("layer", output, inputs[rank].clone(), 3).wait()
    return same_bits(output, expected_of_scatter("noise", "layer", inputs, 3, True)[rank])


def test_chunks_of_a_reduce_scatter_change_no_bit() -> None:
    assert run_ranks(2, in_chunks) == [True, True]


def noisy(rank: int, codec: str) -> float:
    """The share of noise in a reduce-scatter of independent gradients."""
    count, total = 6000, torch.zeros(2)
    calling = calls(codec, "host")
    for step in range(3):
        inputs = [torch.randn(2 * count, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(2)]
        output = torch.empty(count)
        calling.reduce_scatter("layer", output, inputs[rank].clone(), step).wait()
        mean = (inputs[0] + inputs[1])[rank * count : (rank + 1) * count] / 2
        total += torch.stack([(output - mean).square().sum(), mean.square().sum()])
    return float(total[0] / total[1])


def test_one_hop_may_use_the_whole_budget() -> None:
    """Half of it goes to each of two ranks, of which one adds its own values as they are."""
    for share in run_ranks(2, noisy, "noise:share=2%"):
        assert 0.006 < share <= 0.02


def overflowing(rank: int, runner: str) -> dict[str, bool]:
    """Whether an infinity of one rank, in a part of its own and in one of another's, is seen where it arrives."""
    seen = {}
    for codec in STREAM:
        calling = calls(codec, runner)
        for place in range(2):
            given, output = torch.ones(2 * 300), torch.empty(300)
            if rank == 0:
                given[300 * place + 5] = torch.inf
            calling.reduce_scatter("x", output, given, place).wait()
            seen[f"{codec} {place}"] = bool(output.isfinite().all()) == (rank != place)
    return seen


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_infinity_is_not_lost_in_a_reduce_scatter(runner: str) -> None:
    for seen in run_ranks(2, overflowing, runner):
        assert all(seen.values()), seen


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def sharded(rank: int, codec: str, runner: str) -> dict[str, Any]:
    """Trains a model of FSDP2, whose reduce-scatters go through gradzip; what they got is checked call by call."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

    calling, world = calls(codec, runner), dist.get_world_size()
    wrong, count = list[str](), [0]

    class Compressed(ReduceScatter):
        def __init__(self, name: str) -> None:
            self.name, self.step = name, 0

        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False) -> None:  # fmt: skip # noqa: E501
            mean = op == dist.ReduceOp.AVG
            assert mean or op == dist.ReduceOp.SUM
            inputs = [torch.empty_like(input_tensor) for _ in range(world)]
            dist.all_gather(inputs, input_tensor)
            calling.reduce_scatter(self.name, output_tensor, input_tensor, self.step, mean).wait()
            expected = expected_of_scatter(codec, self.name, inputs, self.step, mean)[rank]
            if not same_bits(output_tensor, expected):
                wrong.append(f"{self.name} at step {self.step}")
            self.step += 1
            count[0] += 1

    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 5))
    mesh = init_device_mesh("cpu", (world,))
    for number, layer in enumerate((net[0], net[2])):
        fully_shard(layer, mesh=mesh)
        layer.set_custom_reduce_scatter(Compressed(f"layer{number}"))
    fully_shard(net, mesh=mesh)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    x = torch.randn(16, 20, generator=torch.Generator().manual_seed(rank))
    for _ in range(5):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return {"wrong": wrong, "calls": count[0], "losses": losses}


@needs_emulator
@pytest.mark.parametrize(("codec", "runner"), [("gcomp:mode=lossless", "host"), ("noise", "stream")])
def test_reduce_scatters_of_fsdp2_go_through_a_program(codec: str, runner: str) -> None:
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        pytest.skip("needs torch 2.9")
    for found in run_ranks(3, sharded, codec, runner):
        assert found["wrong"] == []
        assert found["calls"] == 10
        assert found["losses"][-1] < 0.9 * found["losses"][0]


# --- Plain tensors ----------------------------------------------------------------------------------------------------


def awkward(rank: int, step: int, wide: bool) -> dict[str, torch.Tensor]:
    """Tensors as nobody's gradients are."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    made = {
        "matrix": torch.randn(60, 70, generator=draw),
        "transposed": torch.randn(33, 12, generator=draw).t(),
        "channels last": torch.randn(2, 3, 4, 5, generator=draw).to(memory_format=torch.channels_last),
        "every other": torch.randn(800, generator=draw)[::2],
        "columns": torch.randn(40, 10, generator=draw)[:, 2:5],
        "empty": torch.empty(0, 4),
        "one": torch.randn((), generator=draw),
        "fewer than ranks": torch.randn(2, generator=draw),
        "half": torch.randn(500, generator=draw).to(torch.bfloat16),
        "zeros": torch.zeros(300),
        "large": torch.randn(9000, generator=draw),
    }
    return made | ({"double": torch.randn(300, generator=draw, dtype=torch.float64)} if wide else {})


def averaged(rank: int, runner: str) -> dict[str, list[dict[str, torch.Tensor]]]:
    found = {}
    for codec in HOST if runner == "host" else STREAM:
        calling, found[codec] = calls(codec, runner), []
        for step in range(2):
            tensors = awkward(rank, step, codec in ("identity", "cast"))
            calling.all_reduce(tensors, step).wait()
            found[codec].append({name: x.contiguous().clone() for name, x in tensors.items()})
    return found


# Of the largest mean, as rounding at random is to a grid that follows the tensor's largest values.
ERRORS = {"identity": 1e-6, "gcomp:mode=lossless": 1e-6, "cast": 0.01, "gcomp:keep=7": 0.01, "int4:hadamard=true": 0.7}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("world", [2, 3])
def test_plain_tensors_of_any_kind_become_their_mean(runner: str, world: int) -> None:
    ranks = run_ranks(world, averaged, runner)
    for codec, steps in ranks[0].items():
        for step, seen in enumerate(steps):
            everybody = [awkward(rank, step, codec in ("identity", "cast")) for rank in range(world)]
            for name, x in seen.items():
                case = f"{codec} {name}"
                assert all(same_bits(x, other[codec][step][name]) for other in ranks), f"{case}: replicas differ"
                each = torch.stack([one[name].double() for one in everybody])
                size = float(each.norm(dim=None)) + 1e-30
                error = float((x.double() - each.mean(0)).norm()) / size
                assert error <= ERRORS.get(codec, 0.3) + 0.01 * (x.dtype == torch.bfloat16), case


def disagreeing(rank: int) -> str:
    calling = calls("cast", "host")
    try:
        calling.all_reduce({"x": torch.ones(300 + rank)}, 0).wait()
    except PeerError as error:
        return str(error)
    return ""


def test_ranks_that_call_with_other_tensors_are_told() -> None:
    for said in run_ranks(2, disagreeing):
        assert "ranks disagree" in said
        assert "1 tensors, 300 x float32" in said
        assert "1 tensors, 301 x float32" in said


def refused(rank: int) -> list[str]:
    said = []
    for attempt in (
        lambda: calls("topk:ratio=0.1", "host"),
        lambda: calls("powersgd:rank=2", "host"),
        lambda: calls("cast", "host").reduce_scatter("x", torch.empty(3), torch.empty(4), 0),
        lambda: calls("cast", "host").reduce_scatter("x", torch.empty(3, dtype=torch.float16), torch.empty(3), 0),
        lambda: calls("gcomp:mode=lossless", "stream"),
    ):
        with pytest.raises(Unsupported) as raised:
            attempt()
        said.append(str(raised.value))
    return said


def test_what_a_call_cannot_do_is_refused() -> None:
    (said,) = run_ranks(1, refused)
    for text, words in zip(said, ["residuals", "residuals", "contiguous", "one type", "no size that is known"]):
        assert words in text

"""PowerSGD on the stand-in of the stream runner: the host runner's bits, also in steps that are not finite."""

from __future__ import annotations

from typing import Any

import emulated
import pytest
import streams
import torch
import torch.distributed as dist
from conftest import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import TIMEOUT, run_ranks
from test_attach_noise import Task
from test_on_stream import _copied
from torch import nn
from training import same

import gradzip
from gradzip import Accordion, Fixed, Rules
from gradzip.codecs import parse
from gradzip.engines.cuda import pack_select
from gradzip.engines.cuda.restore import Change, restore
from gradzip.exchange.on_host import streams as on_device
from gradzip.exchange.on_stream import runner as on_stream
from gradzip.exchange.way import Way
from gradzip.hooks import runners

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
FACTORS = "powersgd:rank=2"
POLICIES = {
    "small ones travel along": Rules({"*.weight": FACTORS}, small=True),
    "everything": Fixed(FACTORS),
    "without feedback": Rules({"*.weight": f"{FACTORS},feedback=false"}, small=True),
    "two ranks of factors": Rules({"0.weight": FACTORS, "2.weight": "powersgd:rank=3"}, small=True),
    "nothing is factored": Rules({"*.weight": "powersgd:rank=30"}, small=True),
    "beside noise": Rules({"0.weight": FACTORS, "2.weight": "noise"}, small=True),
}
OVERFLOW = 5  # the step in which a rank's gradients are infinite


def by_host() -> None:
    """The host runner as for models on GPUs, with the kernels that the stream runner has."""
    emulated.install()
    pack_select.serves = lambda tensor: tensor.is_contiguous()  # type: ignore[assignment]
    on_device.are_needed = lambda device: True


def train(task: Task, first: int, last: int, overflow: int = OVERFLOW) -> None:
    """As a scaler would: a step whose gradients are not finite is skipped."""
    for number in range(first, last):
        task.optimizer.zero_grad()
        task.backward(number, torch.inf if number == overflow and dist.get_rank() == 1 else 1.0)
        if bool(task.gradients().isfinite().all()):
            task.optimizer.step()


def kept(task: Task) -> dict[str, Any]:
    state = task.handle.state_dict()
    return {key: torch.as_tensor(value) for key, value in state.items() if "residual/" in key or "codec/" in key}


def trained(rank: int, name: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    by_host()
    task = Task(POLICIES[name])
    train(task, 0, 8)
    out["host"], out["host keeps"] = task.parameters(), kept(task)
    streams.install()
    cases: dict[str, dict[str, Any]] = {"small": {}, "large": {"bucket_mb": 25, "gradient_as_bucket_view": True}}
    for case, options in cases.items():
        task = Task(POLICIES[name], **options)
        train(task, 0, 8)
        assert task.handle._stream is not None
        out[f"{case} waits"] = task.handle._stream._open is not None
        out[case], out[f"{case} keeps"] = task.parameters(), kept(task)
        out[f"{case} stats"] = task.handle.stats()
    whole = Task(POLICIES[name])
    for number in range(8):
        if number in (1, OVERFLOW, OVERFLOW + 1):
            parts = {"model": whole.model.module, "optimizer": whole.optimizer, "handle": whole.handle}
            saved = {key: torch.utils._pytree.tree_map(_copied, part.state_dict()) for key, part in parts.items()}
            again = Task(POLICIES[name])
            again.model.module.load_state_dict(saved["model"])
            again.optimizer.load_state_dict(saved["optimizer"])
            again.handle.load_state_dict(saved["handle"])
            train(again, number, 8)
            out[f"from {number}"] = again.parameters()
        train(whole, number, number + 1)
    return out


@pytest.mark.parametrize(("world", "name"), [*((2, name) for name in POLICIES), (3, "small ones travel along")])
def test_stream_runner_gives_the_host_runners_bits_skips_what_it_skips_and_resumes(world: int, name: str) -> None:
    ranks = run_ranks(world, trained, name)
    for found in ranks:
        for case in ("small", "large", "from 1", "from 5", "from 6"):
            assert same(found[case], ranks[0]["host"]), case
        for case in ("small", "large"):
            assert found[f"{case} keeps"].keys() == found["host keeps"].keys()
            for key, value in found["host keeps"].items():
                assert torch.equal(found[f"{case} keeps"][key], value), key
            assert not found[f"{case} waits"], "once buckets stay where they are, the device decides"
            stats = found[f"{case} stats"]
            assert (stats["runner"], stats["steps"]) == ("stream", 8)
            assert all(part["bytes_sent"] > 0 for part in stats["codecs"].values())


def changed(rank: int) -> dict[str, Any]:
    """The first step after each change of the policy is not finite: what was lost before must wait."""
    out: dict[str, Any] = {}
    for case, install in {"host": by_host, "stream": streams.install}.items():
        install()
        task = Task(POLICIES["small ones travel along"])
        train(task, 0, 4)
        task.handle.set_policy("noise")
        train(task, 4, 7, overflow=4)
        out[f"{case} keeps"] = sum("residual/" in key for key in kept(task))
        task.handle.set_policy(Fixed("powersgd:rank=3"))
        train(task, 7, 11, overflow=7)
        task.handle.set_policy(Rules({"*": "int8"}, small=True))
        train(task, 11, 13)
        out[case] = task.parameters()
        out[f"{case} runner"] = task.handle.stats()["runner"]
    return out


def test_residuals_of_another_codec_are_added_when_the_policy_changes() -> None:
    ranks = run_ranks(2, changed)
    for found in ranks:
        assert same(found["stream"], ranks[0]["host"])
        assert (found["host keeps"], found["stream keeps"]) == (0, 0)
        assert (found["host runner"], found["stream runner"]) == ("host", "stream")


def learnt(rank: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for case, install in {"host": by_host, "stream": streams.install}.items():
        install()
        low, high = (Rules({"*.weight": f"powersgd:rank={r}"}, small=True) for r in (3, 1))
        task = Task(Accordion(low, high, window=2, threshold=0.4))
        train(task, 0, 6)
        state = torch.utils._pytree.tree_map(_copied, task.handle.state_dict())
        train(task, 6, 11)
        out[case], out[f"{case} history"] = task.parameters(), task.handle.stats()["history"]
        out[f"{case} state"] = {
            key: torch.as_tensor(value) for key, value in state.items() if key.startswith("policy/")
        }
        out[f"{case} runner"] = task.handle.stats()["runner"]
    return out


def test_accordion_decides_on_streams_as_it_does_on_the_host() -> None:
    for found in run_ranks(2, learnt):
        assert found["stream runner"] == "stream"
        assert found["stream history"] == found["host history"]
        kinds = {len(entry["critical"]) for entry in found["stream history"]}
        assert len(kinds) > 1, "it has decided both ways"
        assert same(found["stream"], found["host"])
        assert found["stream state"].keys() == found["host state"].keys()
        assert all(torch.equal(found["stream state"][key], value) for key, value in found["host state"].items())


def convolved(rank: int) -> dict[str, Any]:
    """Gradients that are not row-major, for which there are no kernels; and sums in another order, as NCCL has one."""
    out: dict[str, Any] = {}
    sums = on_stream.all_reduce
    for case, install in {"host": by_host, "stream": streams.install, "other order": streams.install}.items():
        install()
        if case == "other order":
            on_stream.all_reduce = sums
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(72, 10))
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack memory_format
        model = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = Rules({"*.weight": FACTORS}, small=True)
        handle = gradzip.attach(model, optimizer, policy, timeout=TIMEOUT)
        for step in range(6):
            optimizer.zero_grad()
            draw = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(4, 3, 5, 5, generator=draw)).square().mean().backward()
            optimizer.step()
        out[case] = [p.detach().clone() for p in net.parameters()]
        if handle._stream is not None:
            out["waits"] = out.get("waits", False) or handle._stream._open is not None
        out[f"{case} runner"] = handle.stats()["runner"]
    return out


def loaded(rank: int, policy: str) -> list[bool]:
    """Whether the host learns what Memory holds, in each step; a state is loaded before the fifth one."""
    streams.install()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(72, 10))
    layout = torch.channels_last if policy == "without kernels" else torch.contiguous_format
    net.to(memory_format=layout)  # type: ignore[call-overload]  # torch's stubs lack memory_format
    model = nn.parallel.DistributedDataParallel(net)
    handle = gradzip.attach(model, None, Rules({"*.weight": FACTORS}, small=True), timeout=TIMEOUT)
    waits = []
    for step in range(7):
        if step == 4:
            handle.load_state_dict(torch.utils._pytree.tree_map(_copied, handle.state_dict()))
        model(torch.randn(4, 3, 5, 5)).square().mean().backward()
        assert handle._stream is not None
        waits.append(handle._stream._open is not None)
    return waits


@pytest.mark.parametrize("policy", ["kernels", "without kernels"])
def test_the_host_waits_for_the_step_that_replaces_a_state_which_was_loaded(policy: str) -> None:
    """Only the second stream may get memory of its own back at once; a loaded state has the main stream's."""
    for waits in run_ranks(2, loaded, policy):
        assert waits[0]
        assert waits[3:] == [False, True, False, False]


def test_replicas_are_identical_in_any_order_of_sums_and_without_kernels() -> None:
    ranks = run_ranks(3, convolved)
    for found in ranks:
        assert same(found["stream"], ranks[0]["host"])
        assert same(found["other order"], ranks[0]["other order"])
        assert found["stream runner"] == found["other order runner"] == "stream"
        assert not found["waits"], "the device decides without kernels, too"
        for mine, other in zip(found["other order"], found["stream"]):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)


# --- What is taken back ----------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=70),
    norms=st.lists(st.sampled_from([0.0, 1.0, 1e300, torch.inf, torch.nan]), min_size=1, max_size=5),
)
def test_changes_are_taken_back_exactly_where_a_norm_is_not_finite(sizes: list[int], norms: list[float]) -> None:
    emulated.install()
    changes = [Change(torch.full((n,), float(i)), torch.full((n,), -1.0 - i)) for i, n in enumerate(sizes)]
    restore(torch.tensor(norms, dtype=torch.float64), changes)
    failed = not all(norm < torch.inf for norm in norms)
    for i, (now, before) in enumerate(changes):
        assert same_bits(now, torch.full_like(now, -1.0 - i if failed else float(i)))
        assert bool((before == -1.0 - i).all())


# --- Which runner ----------------------------------------------------------------------------------------------------


def test_what_streams_cannot_carry_stays_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_stream, "reason_against", lambda group, device: None)
    group, device = object(), torch.device("cuda", 0)

    def chosen(codec: str, dtype: torch.dtype = torch.float32, patient: bool = False) -> str:
        ways = {
            "weight": Way(parse(codec), "factors", True, None),
            "bias": Way(parse("identity"), "allreduce", True, None),
        }
        types = {"weight": dtype, "bias": torch.float32}
        return runners.choose(ways, types, device, group, patient)  # type: ignore[arg-type]

    assert chosen(FACTORS) == runners.STREAM
    for other in (
        f"{FACTORS},alternate=true",
        "powersgd:rank=64",
        f"{FACTORS},feedback=bf16",
        f"{FACTORS},feedback=cpu",
    ):
        assert chosen(other) == runners.HOST
    assert chosen(FACTORS, dtype=torch.bfloat16) == runners.HOST
    assert chosen(FACTORS, patient=True) == runners.HOST

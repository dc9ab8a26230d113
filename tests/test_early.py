"""DDP gets its buckets while the GPU still works on them: what waits for the end, and what must not.

PowerSGD's kernels are emulated, and so is a GPU that takes its time: whether means are finite is known late.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from typing import Any

import emulated
import pytest
import torch
import torch.distributed as dist
from ranks import TIMEOUT, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import same, save, start

import gradzip
from gradzip import Codec, Rules
from gradzip.codecs import lowrank
from gradzip.codecs.base import Left
from gradzip.engines.cuda import pack_select
from gradzip.errors import GradzipWarning, PeerError
from gradzip.exchange.on_host import streams as on_device
from gradzip.exchange.on_host.backward import HostBackward

STEPS = 4


def emulate() -> None:
    emulated.install()
    pack_select.serves = lambda tensor: tensor.is_contiguous()  # type: ignore[assignment]
    on_device.are_needed = lambda device: True  # as models on GPUs


class Slow:
    """A GPU that is not through when the last kernel has been launched."""

    def __init__(self) -> None:
        self.dies = False
        self.starts_after = 0.0  # seconds
        self.may_end = threading.Event()
        self.may_end.set()
        inner = lowrank.Fused.reduce

        def reduce(fused: lowrank.Fused, *args: Any) -> Left:
            time.sleep(self.starts_after)
            left = inner(fused, *args)
            self.may_end.wait(20)
            if self.dies:
                raise RuntimeError("the GPU is gone")
            return left

        lowrank.Fused.reduce = reduce  # type: ignore[method-assign, assignment]


def trained(rank: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    reference = start("powersgd:rank=2")
    reference.train(0, STEPS)
    emulate()
    run, slow = start("powersgd:rank=2"), Slow()
    assert run.handle is not None
    run.train(0, STEPS)
    pairs = zip(run.parameters(), reference.parameters())
    out["difference"] = max(float((a - b).abs().max()) for a, b in pairs)
    out["parameters"] = run.parameters()
    out["collectives"] = run.handle.stats()["collectives"]

    slow.may_end.clear()
    run.step(STEPS)  # returns, although the end is not known
    out["early"] = run.gradients()
    counted = run.handle._steps
    threading.Timer(0.3, slow.may_end.set).start()
    state = run.handle.state_dict()  # waits for it
    out["waited"] = run.handle._steps - counted, state["steps"]
    run.optimizer.step()

    slow.may_end.clear()
    run.step(STEPS + 1)
    threading.Timer(0.3, slow.may_end.set).start()
    run.step(STEPS + 2)  # waits before it touches what the last one keeps
    out["next waited"] = slow.may_end.is_set()
    run.optimizer.step()

    before = save(run)["handle"]
    run.step(STEPS + 3, poison=float("nan"))
    out["poisoned"] = not all(bool(g.isfinite().all()) for g in run.gradients())
    after = save(run)["handle"]
    out["kept"] = before.keys() == after.keys() and all(
        torch.equal(value, after[key]) for key, value in before.items() if isinstance(value, torch.Tensor)
    )
    slow.starts_after = 0.2
    run.step(STEPS + 4)
    slow.starts_after = 0.0
    out["waited for"], out["buckets"] = run.gradients(), len(run.handle._buckets._seen)
    out["healthy"] = all(bool(g.isfinite().all()) for g in run.gradients())
    run.optimizer.step()

    again = start("powersgd:rank=2", copy.deepcopy(save(run)))
    for each in (run, again):
        each.train(STEPS + 5, STEPS + 7)
    out["resumed"] = same(run.parameters(), again.parameters())
    out["of two"] = of_two_messages()
    slow.dies = True
    slow.may_end.clear()
    run.step(STEPS + 8)  # says nothing: its gradients are there
    dist.barrier()  # the other's as well: it would hear what happened here
    slow.may_end.set()
    for name in ("state_dict", "stats"):
        try:
            getattr(run.handle, name)()
            out[name] = "fine"
        except PeerError as error:
            out[name] = str(error)
    slow.dies = False
    with pytest.warns(GradzipWarning, match="a step behind"):
        run.handle.detach()
    if rank == 1:
        pack_select.serves = lambda tensor: False  # type: ignore[assignment]
    with pytest.raises(RuntimeError) as raised:
        start("powersgd:rank=2").step(0)
    out["apart"] = str(raised.value)
    return out


def of_two_messages() -> list[bool]:
    """For each message of two steps, whether buckets were given out when its means followed."""
    given = list[bool]()
    inner = HostBackward._means_follow

    def spy(ending: HostBackward) -> None:
        inner(ending)
        given.append(all(ticket.promise.kept for ticket in ending._tickets))

    HostBackward._means_follow = spy  # type: ignore[method-assign]
    run = start(Rules({"0.*": "powersgd:rank=1", "*": "powersgd:rank=2"}))
    assert run.handle is not None
    run.train(0, 2)
    run.handle.detach()
    HostBackward._means_follow = inner  # type: ignore[method-assign]
    return given


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    if emulated.COMPILER is None:
        pytest.skip("emulating a GPU needs g++")
    return run_ranks(2, trained, deadline=120)


def test_training_by_kernels_is_training_by_torch(seen: list[dict[str, Any]]) -> None:
    assert all(found["difference"] < 1e-5 for found in seen)
    assert same(seen[0]["parameters"], seen[1]["parameters"])
    assert all(found["collectives"] == 3 * STEPS for found in seen)


def test_ddp_waits_for_its_first_bucket_before_it_looks_at_another(seen: list[dict[str, Any]]) -> None:
    """Only that one's future waits. Otherwise gradients would be each rank's own."""
    assert all(found["buckets"] > 1 for found in seen)
    assert same(seen[0]["waited for"], seen[1]["waited for"])


def test_gradients_are_there_before_the_end_is_known(seen: list[dict[str, Any]]) -> None:
    assert same(seen[0]["early"], seen[1]["early"])
    for found in seen:
        assert found["waited"] == (1, STEPS + 1), "a checkpoint waits for the end"
        assert found["next waited"], "and so does the next backward pass"
        assert found["of two"] == [False, True] * 2, "nothing comes before the last message"


def test_ranks_without_kernels_are_found_out(seen: list[dict[str, Any]]) -> None:
    """They would round differently, and replicas would drift apart."""
    assert all("in place" in found["apart"] for found in seen)


def test_a_state_that_is_a_step_behind_is_not_given_out(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        assert "a step behind" in found["state_dict"]
        assert found["stats"] == "fine"


def test_a_step_that_failed_leaves_no_trace(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        assert found["poisoned"], "all ranks see it in their gradients"
        assert found["kept"]
        assert found["healthy"]


def test_it_resumes_to_the_bit(seen: list[dict[str, Any]]) -> None:
    assert all(found["resumed"] for found in seen)


def on_a_gpu(rank: int) -> dict[str, Any]:
    del os.environ["GRADZIP_ENGINE"]  # the right one for each device
    torch.cuda.set_device(0)
    by_kernels = {views: clipped(views) for views in (False, True)}
    lowrank.PowerSGD.in_place = Codec.in_place  # type: ignore[method-assign]
    return {"kernels": by_kernels, "torch": clipped(False)}


def clipped(views: bool) -> list[torch.Tensor]:
    """Parameters after some steps; gradients, which may lie in the buckets, are changed as soon as backward returns."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(1500, 2000), nn.ReLU(), nn.Linear(2000, 700), nn.ReLU(), nn.Linear(700, 30)).cuda()
    model = DistributedDataParallel(net, bucket_cap_mb=4, gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = gradzip.attach(model, optimizer, "powersgd:rank=4", timeout=TIMEOUT)
    for step in range(8):
        x = torch.randn(16, 1500, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).cuda()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if step == 5 and dist.get_rank() == 1:
            loss = loss * float("nan")
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert bool(norm.isfinite()) == (step != 5)
        if step != 5:
            optimizer.step()
    handle.detach()
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.gpu
def test_on_a_gpu_nobody_comes_too_early() -> None:
    seen = run_ranks(2, on_a_gpu, deadline=100)
    for views in (False, True):
        first, second = (found["kernels"][views] for found in seen)
        assert same(first, second)
        for mine, other in zip(first, seen[0]["torch"]):
            assert float((mine - other).norm()) < 1e-3 * float(other.norm())
    assert same(seen[0]["kernels"][False], seen[0]["kernels"][True])

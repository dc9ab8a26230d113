"""What attach does once instead of in every step, and that it still sees what changes between steps."""

from __future__ import annotations

import math
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import generator, same_bits
from ranks import run_ranks
from torch import nn
from training import Run, same, start

from gradzip import Accordion, Fixed, Rules
from gradzip.engines.layout import Floor
from gradzip.errors import PeerError
from gradzip.exchange import comparisons
from gradzip.exchange.finiteness import all_finite
from gradzip.exchange.on_host import backward, rows
from gradzip.exchange.peers import sockets
from gradzip.exchange.topology import Topology
from gradzip.feedback import Memory
from gradzip.hooks.buckets import Buckets
from gradzip.hooks.early_fetch import EarlyFetch
from gradzip.hooks.ways import Ways
from gradzip.sensitivity import Grids, rules
from gradzip.sensitivity.survey import fetch

# -- grids -------------------------------------------------------------------------------------------------------------


def stepped(kind: type[torch.optim.Optimizer], **options: Any) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    parameters = [nn.Parameter(torch.randn(8, 5, generator=generator(i))) for i in range(4)]
    parameters.append(nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)))
    optimizer = kind(parameters, **options)  # type: ignore[call-arg]
    step(parameters, optimizer)
    return parameters, optimizer


def step(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, skip: int | None = None) -> None:
    for i, p in enumerate(parameters):
        p.grad = None if i == skip else torch.full_like(p, 0.1 * (i + 1))
    optimizer.step()


def equal(a: Floor | None, b: Floor | None) -> bool:
    if a is None or b is None:
        return a is b
    return (a.c0, a.c1, a.c2) == (b.c0, b.c1, b.c2) and torch.equal(a.tensor(), b.tensor())


def swap_memory(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    parameters[0].data = parameters[0].data * 64


def swap_state(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[key] = value * 1024


def add_group(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    parameters.append(nn.Parameter(torch.ones(7)))
    optimizer.add_param_group({"params": [parameters[-1]], "lr": 1e-6})


def write_in_place(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        parameters[1].mul_(1024)


CHANGES = {
    "learning rate": lambda p, o: o.param_groups[0].update(lr=o.param_groups[0]["lr"] / 64),
    "learning rate of 0": lambda p, o: o.param_groups[0].update(lr=0.0),
    "another step": step,
    "a step without one": lambda p, o: [step(p, o, skip=2) for _ in range(40)],
    "memory": swap_memory,
    "values": write_in_place,
    "state": swap_state,
    "a group": add_group,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"lr": 1e-3}),
        (torch.optim.Adam, {"lr": 1e-3, "amsgrad": True}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}),
        (torch.optim.RMSprop, {"lr": 1e-3}),
        (torch.optim.Adagrad, {"lr": 1e-2}),
    ],
)
def test_grids_that_are_kept_are_those_made_anew(kind: type, options: dict[str, Any], change: str) -> None:
    parameters, optimizer = stepped(kind, **options)
    grids = Grids(optimizer)
    before = grids.rules()
    again = grids.rules()
    assert all(again[p] is rule for p, rule in before.items()), "nothing has changed"
    CHANGES[change](parameters, optimizer)
    for scale in (1.0, 1024.0):
        kept, anew = grids.rules(1, scale), rules(optimizer, 1, scale)
        assert kept.keys() == anew.keys() == set(parameters)
        assert all(equal(kept[p], anew[p]) for p in parameters)
    assert grids.rules(wanted=set(parameters[:2])).keys() == set(parameters[:2])


def test_grids_follow_an_optimizer_from_step_to_step() -> None:
    """Constants change as steps and rates do; two codecs ask for different parameters; all are lossless for a while."""
    parameters, optimizer = stepped(torch.optim.AdamW, lr=1e-3)
    grids, halves = Grids(optimizer), [set(parameters[:1]), set(parameters[1:])]
    kept = 0
    for number in range(24):
        if number == 9:
            optimizer.load_state_dict(optimizer.state_dict())
        if number == 12:
            optimizer.param_groups[0]["lr"] = 0.0
        if number >= 13:
            optimizer.param_groups[0]["lr"] = 2.0**-number
        anew = rules(optimizer, 1)
        for half in halves:
            found = grids.rules(wanted=half)
            kept += grids.rules(wanted=half) is found
            assert found.keys() == half
            assert all(equal(found[p], anew[p]) for p in half)
        step(parameters, optimizer)
    assert kept == 2 * 23, "all but those that are lossless"


# -- ways --------------------------------------------------------------------------------------------------------------


class Moody:
    """A policy that answers otherwise in every step."""

    asked = 0

    def option(self, name: str, shape: Any) -> Any:
        self.asked += 1
        return Fixed("identity" if self.asked % 2 else "cast").chosen


def test_ways_are_found_once_and_policies_that_may_change_are_asked() -> None:
    parameter = nn.Parameter(torch.ones(64, 64))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    ways = Ways({parameter: "w"}, torch.device("cpu"), [optimizer], Topology(0, ((0,),)))
    near = Rules({"*": "gcomp"})
    first = ways.of(near, 1.0)
    assert ways.of(near, 1.0) is first
    optimizer.param_groups[0]["lr"] = 1e-3
    second = ways.of(near, 1.0)
    assert second["w"].floor is not first["w"].floor
    assert second["w"].kind == first["w"].kind == "gcomp/alltoall"
    optimizer.param_groups[0]["lr"] = 0.0
    assert ways.of(near, 1.0)["w"].codec.lossless
    optimizer.param_groups[0]["lr"] = 1e-3
    assert equal(ways.of(near, 1.0)["w"].floor, second["w"].floor)  # type: ignore[arg-type]
    parameter.requires_grad_(False)
    assert ways.of(near, 1.0)["w"].kind == "identity/allreduce"
    parameter.requires_grad_(True)
    assert ways.of(near, 1.0)["w"].codec == second["w"].codec
    moody = Moody()
    assert [ways.of(moody, 1.0)["w"].codec.name for _ in range(4)] == ["identity", "cast"] * 2


# -- what ranks compare ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 1023, 1024, 1025, 3000, 5000])
def test_every_value_of_a_grid_is_looked_at_in_the_end(size: int) -> None:
    theta, second = torch.arange(1.0, size + 1), torch.arange(size + 1.0, 1, -1)
    seen = {int(v) for number in range(size) for v in comparisons.sample(theta, number)}
    assert seen == set(range(1, size + 1))
    floors: list[Floor | torch.Tensor] = [
        Floor(theta, second, -150, 3, 5),
        Floor(theta, None, -150),
        torch.ones(size, dtype=torch.int8),
    ]
    usual = comparisons.floor_sums(floors, 3)
    place = int(comparisons.sample(torch.arange(size), 3)[0])
    for changed, spoil in (
        (0, lambda: second[place].add_(1)),
        (1, lambda: floors.__setitem__(1, Floor(theta, None, -151))),
        (2, lambda: floors[2][place].add_(1)),  # type: ignore[index, union-attr]
    ):
        spoil()
        now = comparisons.floor_sums(floors, 3)
        assert (now != usual).nonzero().view(-1).tolist() == [changed]
        usual = now
    assert comparisons.floor_sums([], 0).numel() == 0


@pytest.mark.parametrize("size", [1, 7, 1024, 1025, 5000])
def test_sums_of_all_floors_in_one_call_are_those_of_each(size: int) -> None:
    bits = torch.randint(-(1 << 31), 1 << 31, (4, size)).to(torch.int32).view(torch.float32)
    floors = [Floor(bits[0], bits[1], -150, 3, 5), Floor(bits[2], None, -150), Floor(bits[3], bits[0], 1, -2, 3)]
    samples = comparisons.FloorSamples()
    for step in (0, 1, 2, 997, 1 << 20):
        assert torch.equal(samples.sums(floors, step), comparisons.floor_sums(floors, step))
        bits[step % 4, size // 2] = float(step)
    for others in (
        [*floors[:2], Floor(bits[3], bits[1], 1, -2, 3)],
        [floors[0]],
        [],
        [torch.ones(size, dtype=torch.int8)],
    ):
        assert torch.equal(samples.sums(others, 5), comparisons.floor_sums(others, 5))


def test_all_finite() -> None:
    big = torch.full((3,), 3e38)  # their sum is not finite
    assert all_finite([])
    assert all_finite([torch.empty(0), big, torch.ones(2, dtype=torch.float64)])
    for bad in (math.nan, math.inf, -math.inf):
        assert not all_finite([torch.ones(3), torch.tensor([1.0, bad])])
        many = [torch.ones(2, 3) for _ in range(20)] + [torch.ones(1 << 14), torch.ones(2, dtype=torch.bfloat16)]
        assert all_finite(many)
        for number, tensor in enumerate(many):
            damaged = tensor.clone()
            damaged.view(-1)[1] = bad
            assert not all_finite([*many[:number], damaged, *many[number + 1 :]])
    assert not all_finite([torch.tensor([math.inf, -math.inf])])


# -- error feedback of many gradients at once --------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1024.0, 3.0])
@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize("form", [None, "bf16", "cpu"])
def test_many_gradients_at_once_as_one_by_one(scale: float, patient: bool, form: str | None) -> None:
    rng = generator(3)
    names = ["a", "b", "zero", "half"]
    one, many = Memory(0, patient), Memory(0, patient)
    for memory in (one, many):
        memory.forms = dict.fromkeys(names, form)
    for _ in range(3):
        xs = [torch.randn(6, 4, generator=rng) for _ in names]
        xs[2].zero_()
        xs[3] = xs[3].bfloat16()
        lost = [torch.randn(6, 4, generator=rng) for _ in names]
        expected = [one.compensated(n, x.clone(), scale) for n, x in zip(names, xs)]
        found = many.compensated_all(names, [x.clone() for x in xs], scale)
        assert all(same_bits(a, b) for a, b in zip(expected, found))
        for name, residual in zip(names, lost):
            one.lost(name, residual.clone(), scale)
        many.lost_all(names, [residual.clone() for residual in lost], scale)
        one.commit()
        many.commit()
    a, b = one.state_dict(), many.state_dict()
    assert a.keys() == b.keys()
    assert all(same_bits(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in a)


# -- plain steps -------------------------------------------------------------------------------------------------------


def plainly(rank: int) -> dict[str, Any]:
    """Which steps went by torch's own sum, through changes of policy; and a rank that changes its policy alone."""
    went: list[int] = []
    take = backward.HostBackward.take_buffer

    def noted(self: backward.HostBackward, buffer: torch.Tensor, last: bool) -> Any:
        taken = take(self, buffer, last)
        if taken is not None:
            went.append(step_now)
        return taken

    backward.HostBackward.take_buffer = noted  # type: ignore[method-assign]
    run, plain = start(Fixed("identity")), start(None)
    assert run.handle is not None
    out: dict[str, Any] = {"same": []}
    for step_now in range(10):
        if step_now == 3:
            run.handle.set_policy(Fixed("topk:ratio=0.1"))
        if step_now == 5:
            run.handle.set_policy(Fixed("identity"))
        for r in (run, plain):
            r.train(step_now, step_now + 1)
        out["same"].append(same(run.parameters(), plain.parameters()))
    out["went"] = sorted(set(went))
    stats = run.handle.stats()
    out["stats"] = {key: stats[key] for key in ("steps", "bytes_sent", "bytes_raw", "collectives")}
    out["codecs"] = {kind: part["bytes_sent"] for kind, part in stats["codecs"].items()}
    mean = torch.ones(1) * rank
    dist.all_reduce(mean)  # the user's own, on the same group
    out["sum"] = float(mean)
    out["alone"] = changes_alone(rank, run)
    return out


def changes_alone(rank: int, run: Run) -> dict[str, Any]:
    assert run.handle is not None
    if rank == 1:
        run.handle._policy, run.handle._agreed = (
            Fixed("topk:ratio=0.1"),
            None,
        )  # as if set_policy were called here alone
    else:
        # The other one is gone before this one has found out why.
        worker = rows.rows_of(run.handle._channel)
        disagree = worker._disagreement
        worker._disagreement = lambda row: [disagree(row), time.sleep(1)][0]  # type: ignore[method-assign]
    began = time.perf_counter()
    try:
        run.train(10, 11)
    except RuntimeError as error:
        return {"said": str(error), "kept": type(run.handle.error).__name__, "fast": time.perf_counter() - began < 60}
    return {}


def test_plain_steps_go_by_torch_itself() -> None:
    results = run_ranks(2, plainly)
    for seen in results:
        assert seen["same"][:3] == [True] * 3
        assert not any(seen["same"][3:])
        # The first step under a policy is agreed on with the others, the first after feedback has residuals to send.
        assert seen["went"] == [1, 2, 7, 8, 9]
        assert seen["stats"]["steps"] == 10
        assert seen["codecs"]["identity/allreduce"] >= seen["stats"]["bytes_raw"] * 7 // 10
        assert seen["sum"] == 1
        assert "ranks disagree" in seen["alone"]["said"]
        assert seen["alone"]["kept"] == "PeerError"
        assert seen["alone"]["fast"]


def breaks_off(rank: int) -> str:
    """Rank 1 is gone as if killed, after the step in which all agreed that torch's own sums are enough."""
    run = start(Fixed("identity"))
    assert run.handle is not None
    if rank == 1:
        run.train(0, 2)
        run.handle._channel.health.report = lambda *_, **__: None  # type: ignore[method-assign]
        sockets.shut_down(sockets.found())
        return ""
    with pytest.raises(RuntimeError) as raised:
        run.train(0, 4)
    assert isinstance(run.handle.error, PeerError)
    return str(raised.value)


def test_a_rank_that_is_gone_is_named_where_torch_sums() -> None:
    said = run_ranks(2, breaks_off)[0]
    assert "rank 1 closed its connections without a word: it was killed, crashed or ended early" in said


def kept_as_ddp(rank: int) -> dict[str, Any]:
    """Policies that learn see what plain steps bring, and checks compare it: these go the old way."""
    seen = {}
    went: list[bool] = []
    take = backward.HostBackward.take_buffer

    def noted(self: backward.HostBackward, buffer: torch.Tensor, last: bool) -> Any:
        taken = take(self, buffer, last)
        if taken is not None:
            went.append(last)
        return taken

    backward.HostBackward.take_buffer = noted  # type: ignore[method-assign]
    patch = pytest.MonkeyPatch()
    for name, policy in (("checks", Fixed("identity")), ("learns", Accordion("identity", "topk:ratio=0.5", window=9))):
        patch.setenv("GRADZIP_CHECK", "1" if name == "checks" else "0")
        run = start(policy)
        assert run.handle is not None
        run.train(0, 4)
        seen[name] = len(went), run.handle.stats()["steps"]
        run.handle.detach()
    patch.undo()
    return seen


def test_checks_and_policies_that_learn_see_plain_steps() -> None:
    for seen in run_ranks(2, kept_as_ddp):
        assert seen == {"checks": (0, 4), "learns": (0, 4)}


# -- one rank ----------------------------------------------------------------------------------------------------------


def single(rank: int) -> dict[str, Any]:
    """A single rank asks for no gradient by name and computes no grid; with GRADZIP_ALONE it does."""
    taken: list[str] = []
    for name in ("take", "take_buffer"):
        inner = getattr(backward.HostBackward, name)

        def noted(self: Any, *args: Any, inner: Any = inner, name: str = name) -> Any:
            result = inner(self, *args)
            if result is not None:
                taken.append(name)
            return result

        setattr(backward.HostBackward, name, noted)
    out: dict[str, Any] = {}
    plain = start(None)
    plain.train(0, 3)
    for policy in ("gcomp", "powersgd:rank=1", Fixed("identity")):
        taken.clear()
        run = start(policy)
        assert run.handle is not None
        run.train(0, 3)
        stats = run.handle.stats()
        out[str(policy)] = set(taken), same(run.parameters(), plain.parameters()), stats["steps"], stats["bytes_sent"]
        run.handle.detach()
    patch = pytest.MonkeyPatch()
    patch.setenv("GRADZIP_ALONE", "1")
    taken.clear()
    run = start("powersgd:rank=1")
    run.train(0, 3)
    out["alone"] = set(taken), same(run.parameters(), plain.parameters())
    patch.setenv("GRADZIP_ALONE", "")
    taken.clear()
    run.train(3, 5)  # what was held back is sent first
    out["after"] = list(dict.fromkeys(taken))
    patch.undo()
    return out


def test_a_rank_alone_hands_its_buckets_back() -> None:
    (out,) = run_ranks(1, single)
    alone, after = out.pop("alone"), out.pop("after")
    assert len(out) == 3
    assert all(seen == ({"take_buffer"}, True, 3, 0) for seen in out.values())
    assert alone == ({"take"}, False)
    assert after == ["take", "take_buffer"]


# -- buckets -----------------------------------------------------------------------------------------------------------


class Bucket:
    """What DDP hands to a hook."""

    def __init__(self, number: int, parameters: list[torch.Tensor], buffer: torch.Tensor) -> None:
        self._number, self._parameters, self._buffer = number, parameters, buffer

    def index(self) -> int:
        return self._number

    def parameters(self) -> list[torch.Tensor]:
        return list(self._parameters)

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        parts = self._buffer.split_with_sizes([p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters)]


def test_views_of_buckets_are_made_once_and_again_where_ddp_changes_them() -> None:
    a, b = torch.zeros(4, 6), torch.zeros(3, 2, 5, 5).to(memory_format=torch.channels_last)
    buckets = Buckets({a: "a", b: "b"})

    def named(parameters: list[torch.Tensor], buffer: torch.Tensor, number: int = 0) -> list[tuple[str, torch.Tensor]]:
        found = buckets.named(Bucket(number, parameters, buffer), buffer)  # type: ignore[arg-type]
        assert [name for name, _ in found] == [{a: "a", b: "b"}[p] for p in parameters]
        for (_, view), p in zip(found, parameters):
            assert view.stride() == p.stride()
            assert buffer.data_ptr() <= view.data_ptr() < buffer.data_ptr() + buffer.nbytes
        return found

    first, second = torch.arange(174.0), torch.arange(174.0)
    kept = weakref.ref(named([a, b], first)[0][1])
    assert kept() is None, "DDP may give the bucket up after its first step"
    again = named([a, b], first)
    assert named([a, b], first) is again
    assert named([b, a], first) is not again, "another order in the same place"
    assert named([a, b], second) is not again
    named([a, b], second)
    assert named([a], second[:24], number=1) is not named([a, b], second)
    assert named([a, b], second) is named([a, b], second)


# -- numbers of a GPU --------------------------------------------------------------------------------------------------


def test_numbers_that_were_not_copied_are_read() -> None:
    model = nn.Linear(2, 2)
    steps = [torch.tensor(3.0), torch.tensor(4.0)]
    early = EarlyFetch(model, lambda: steps)  # type: ignore[arg-type]
    model(torch.ones(2))  # they are on the CPU: nothing to copy
    assert early.read(steps) == [3.0, 4.0]
    steps[0] += 1
    assert early.read(steps) == [4.0, 4.0]
    early.remove()
    assert not model._forward_pre_hooks


@pytest.mark.gpu
def test_numbers_of_a_gpu_come_ahead_and_are_read_again_where_they_changed() -> None:
    model = nn.Linear(2, 2).cuda()
    steps = [torch.tensor(float(i), device="cuda") for i in range(3)]
    early = EarlyFetch(model, lambda: steps)  # type: ignore[arg-type]
    x = torch.ones(2, device="cuda")
    for _ in range(3):
        model(x)
        reads: list[int] = []
        patch = pytest.MonkeyPatch()
        patch.setattr("gradzip.hooks.early_fetch.fetch", lambda numbers, reads=reads: reads.append(1) or fetch(numbers))
        assert early.read(steps) == [float(step) for step in steps]
        assert early.read(steps[1:2]) == [float(steps[1])]
        assert not reads
        torch._foreach_add_(steps, 1)
        assert early.read(steps) == [float(step) for step in steps]
        assert reads
        patch.undo()

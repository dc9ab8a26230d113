"""What real training loops do, with compression: each goes on as without, or to the promise of the codec."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import TIMEOUT, run_ranks
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from training import same

import gradzip
from gradzip import Fixed, GradzipWarning

LOSSLESS = Fixed("gcomp:mode=lossless")
NEAR = Fixed("gcomp:ulps=4096")
TOPK = Fixed("topk:ratio=0.1")
HELD_BACK = {"near": NEAR, "topk": TOPK, "powersgd": Fixed("powersgd:rank=2")}  # what is lost goes out later
LOSSY = HELD_BACK | {"noise": Fixed("noise")}


class Net(nn.Module):
    """Two branches: which of them is used is up to the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 48)
        self.left, self.right = nn.Linear(48, 32), nn.Linear(48, 32)
        self.use = "both"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        out = torch.zeros(len(x), 32)
        if self.use in ("both", "left"):
            out = out + self.left(x)
        if self.use in ("both", "right"):
            out = out + self.right(x)
        return out


def data(step: int, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))


def make(policy: Any, optimizer: Any = None, net: nn.Module | None = None, **ddp: Any) -> Any:
    """A model, its optimizer and its handle; policy None: plain DDP."""
    torch.manual_seed(3)
    net = Net() if net is None else net
    model = DistributedDataParallel(net, bucket_cap_mb=0.005, **ddp)
    chosen = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) if optimizer is None else optimizer(model)
    handle = None if policy is None else gradzip.attach(model, chosen, policy, timeout=TIMEOUT)
    return model, chosen, handle


Loop = Callable[[Any, Any, Any], None]


def parameters(loop: Loop, policy: Any, **options: Any) -> list[torch.Tensor]:
    model, optimizer, handle = make(policy, **options)
    loop(model, optimizer, handle)
    return [p.detach().clone() for p in model.parameters()]


def outcome(loop: Loop, **options: Any) -> dict[str, Any]:
    """Whether lossless is plain DDP to the bit, and where lossy codecs end: far off, and alike on all ranks."""
    plain = parameters(loop, None, **options)
    out: dict[str, Any] = {"lossless": same(parameters(loop, LOSSLESS, **options), plain)}
    flat = torch.cat([p.flatten() for p in plain])
    for name, policy in LOSSY.items():
        ours = torch.cat([p.flatten() for p in parameters(loop, policy, **options)])
        out[name] = float((ours - flat).norm() / flat.norm())
        other = ours.clone()
        dist.broadcast(other, 0)
        out[f"{name} replicas"] = torch.equal(ours, other)
    return out


def backward(model: Any, step: int, factor: float = 1.0) -> None:
    (model(data(step)).square().mean() * factor).backward()


# -- loops -------------------------------------------------------------------------------------------------------------


def accumulation(model: Any, optimizer: Any, handle: Any) -> None:
    for step in range(4):
        optimizer.zero_grad()
        with model.no_sync():
            backward(model, 10 * step)
            backward(model, 10 * step + 1)
        backward(model, 10 * step + 2)
        optimizer.step()


def synced_accumulation(model: Any, optimizer: Any, handle: Any) -> None:
    """Without no_sync: what is there already is averaged again."""
    for step in range(4):
        optimizer.zero_grad()
        backward(model, 10 * step)
        backward(model, 10 * step + 1)
        optimizer.step()


def clipping(model: Any, optimizer: Any, handle: Any) -> None:
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def autocast(model: Any, optimizer: Any, handle: Any) -> None:
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(data(step)).float().square().mean()
        loss.backward()
        optimizer.step()


def schedule(model: Any, optimizer: Any, handle: Any) -> None:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
    for step in range(5):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        scheduler.step()


def evaluation(model: Any, optimizer: Any, handle: Any) -> None:
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(data(99))
            if dist.get_rank() == 0:
                model.module(data(98))
        model.train()


def own_all_reduce(model: Any, optimizer: Any, handle: Any) -> None:
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        loss = torch.tensor([float(step + dist.get_rank())])
        dist.all_reduce(loss)
        assert float(loss) == 2 * step + 1
        optimizer.step()


def some_unused(model: Any, optimizer: Any, handle: Any) -> None:
    """Ranks use other branches, then all leave one out for a while."""
    for step, use in enumerate(("both", "left", "left", "both", "right")):
        model.module.use = use if step < 4 or dist.get_rank() else "both"
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def plain_loop(model: Any, optimizer: Any, handle: Any) -> None:
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def groups(model: Any) -> torch.optim.Optimizer:
    vectors = [p for p in model.parameters() if p.dim() < 2]
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    first = {"params": matrices, "weight_decay": 0.1}
    return torch.optim.AdamW([first, {"params": vectors, "lr": 1e-2}], lr=1e-3)


def frozen() -> nn.Module:
    net = Net()
    net.left.requires_grad_(False)
    return net


def training_loops(rank: int) -> dict[str, Any]:
    logging.getLogger("gradzip").setLevel(logging.WARNING)
    return {
        "accumulation": outcome(accumulation),
        "accumulation without no_sync": outcome(synced_accumulation),
        "clipping": outcome(clipping),
        "autocast": outcome(autocast),
        "schedule": outcome(schedule),
        "evaluation": outcome(evaluation),
        "own all_reduce": outcome(own_all_reduce),
        "unused": outcome(some_unused, find_unused_parameters=True),
        "static graph": outcome(plain_loop, static_graph=True),
        "bucket views": outcome(plain_loop, gradient_as_bucket_view=True),
        "groups": outcome(plain_loop, optimizer=groups),
        "frozen layer": {"frozen": _frozen_layer()},
        "own gradients": {loop.__name__: own_gradients(loop) for loop in (plain_loop, autocast)},
        "held for later": held_for_later(),
        "join": joined(),
        "scaler": overflow(),
        "two models": two_models(),
        "compiled": compiled(),
        "premises": broken_premises(),
    }


def own_gradients(loop: Loop) -> dict[str, Any]:
    """What near mode found out about them, by matrix, and the ratio."""
    model, optimizer, handle = make(Fixed("gcomp"))
    loop(model, optimizer, handle)
    found = {key: value for key, value in handle.state_dict().items() if key.endswith("weight/own_lossless")}
    return {"lossless": found, "ratio": handle.stats()["ratio"]}


def held_for_later() -> dict[str, bool]:
    """No rank uses a branch for a step: what is held back of it stays, and goes out later."""
    out = {}
    for name, policy in HELD_BACK.items():
        model, optimizer, handle = make(policy, find_unused_parameters=True)
        held = []
        for step, use in enumerate(("both", "both", "left", "both")):
            model.module.use = use
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            state = handle.state_dict()
            held.append({k: v for k, v in state.items() if "/residual/" in k and k.endswith("right.weight")})
        stays = held[1].keys() == held[2].keys() and all(torch.equal(v, held[2][k]) for k, v in held[1].items())
        goes = any(not torch.equal(v, held[3].get(k, v * 0)) for k, v in held[2].items())
        out[name] = bool(held[1]) and stays and goes
    return out


def _frozen_layer() -> bool:
    """A layer without gradients, and one that is frozen after attach: it stays where it is."""
    plain, ours = [], []
    for policy, out in ((None, plain), (LOSSLESS, ours)):
        model, optimizer, _ = make(policy, net=_seeded(frozen), find_unused_parameters=True)
        plain_loop(model, optimizer, None)
        model.module.right.requires_grad_(False)
        plain_loop(model, optimizer, None)
        out += [p.detach().clone() for p in model.parameters()]
    return same(plain, ours)


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


def joined() -> dict[str, Any]:
    """Rank 0 has 2 inputs, rank 1 has 6. Near mode is lossless then; a policy learns while all are there."""
    out: dict[str, Any] = {}
    plain: list[torch.Tensor] = []
    accordion = gradzip.Accordion("topk:ratio=0.5", "topk:ratio=0.1", window=2)
    policies = {"plain": None, "lossless": LOSSLESS, "near": NEAR, "topk": TOPK, "accordion": accordion}
    for name, policy in policies.items():
        model, optimizer, handle = make(policy)
        out[f"{name} said"] = []
        with said(out[f"{name} said"]):
            with Join([model]):
                for step in range(2 if dist.get_rank() == 0 else 6):
                    optimizer.zero_grad()
                    backward(model, step)
                    optimizer.step()
            if handle is not None:
                out[f"{name} steps"] = handle.stats()["steps"]
        ours = [p.detach().clone() for p in model.parameters()]
        plain = plain or ours
        out[name] = same(ours, plain)
    out["learnt"] = accordion._steps
    return out


def unchanged(before: dict[str, Any], after: dict[str, Any]) -> bool:
    pairs = [(value, after[key]) for key, value in before.items() if key != "steps"]
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


def overflow() -> dict[str, Any]:
    """A GradScaler, and an infinity on rank 1 alone: all skip, and nothing is kept."""
    out: dict[str, Any] = {}
    for name, policy in {"lossless": LOSSLESS, **LOSSY}.items():
        torch.manual_seed(3)
        model = DistributedDataParallel(Net(), bucket_cap_mb=0.005)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        handle = gradzip.attach(model, optimizer, policy, scaler=scaler, timeout=TIMEOUT)
        scales, kept = [], True
        for step in range(6):
            optimizer.zero_grad()
            loss = model(data(step)).square().mean()
            if step == 3 and dist.get_rank() == 1:
                loss = loss * torch.inf
            before = handle.state_dict(), [p.detach().clone() for p in model.parameters()]
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            if step == 3:
                kept = unchanged(before[0], handle.state_dict())
                kept &= same(before[1], [p.detach().clone() for p in model.parameters()])
        good = all(bool(p.isfinite().all()) for p in model.parameters())
        out[name] = {"scales": scales, "kept": kept, "good": good}
    return out


def two_models() -> bool:
    """In turns and together, each with its own policy; the second is that of plain DDP."""
    results = []
    for policies in ((None, None), (LOSSLESS, LOSSLESS)):
        pair = [make(policy) for policy in policies]
        for step in range(3):
            for _, optimizer, _ in pair:
                optimizer.zero_grad()
            (pair[0][0](data(step)).square().mean() + pair[1][0](data(step + 50)).square().mean()).backward()
            for _, optimizer, _ in pair:
                optimizer.step()
            backward(pair[1][0], step)
            pair[1][1].step()
        results.append([p.detach().clone() for model, *_ in pair for p in model.parameters()])
    return same(*results)


def compiled() -> dict[str, Any]:
    out: dict[str, Any] = {}
    plain = parameters(plain_loop, None)
    for name in ("outside", "inside"):
        torch.manual_seed(3)
        net: Any = Net()
        net = torch.compile(net, backend="eager") if name == "inside" else net
        model: Any = DistributedDataParallel(net)  # torch.compile wants a first bucket below the others: the default
        model = torch.compile(model, backend="eager") if name == "outside" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        handle = gradzip.attach(model, optimizer, LOSSLESS, timeout=TIMEOUT)
        plain_loop(model, optimizer, handle)
        out[name] = same([p.detach().clone() for p in model.parameters()], plain)
        out[f"{name} names"] = sorted(handle.stats()["tensors"])
        out[f"{name} steps"] = handle.stats()["steps"]
    return out


@contextlib.contextmanager
def said(into: list[str]) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GradzipWarning)
        yield
    into += [str(w.message) for w in caught if issubclass(w.category, GradzipWarning)]


def broken_premises() -> dict[str, list[str]]:
    """Things between backward and step that let dropped bits matter; and some that do not."""
    out: dict[str, list[str]] = {}
    changes: dict[str, Callable[[Any, Any], object]] = {
        "lr up": lambda model, optimizer: optimizer.param_groups[0].update(lr=0.1),
        "lr down": lambda model, optimizer: optimizer.param_groups[0].update(lr=0.01),
        "momentum": lambda model, optimizer: optimizer.param_groups[0].update(nesterov=True),
        "scaled up": lambda model, optimizer: [p.grad.mul_(3) for p in model.parameters()] and None,
        "clipped": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1e-3) and None,
        "nothing": lambda model, optimizer: None,
    }
    for name, change in changes.items():
        model, optimizer, handle = make(NEAR)
        out[name] = []
        with said(out[name]):
            for step in range(2):
                optimizer.zero_grad()
                backward(model, step)
                change(model, optimizer)
                optimizer.step()
                optimizer.param_groups[0].update(lr=0.05)
            handle.stats()
        handle.detach()
    return out


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_ranks(2, training_loops, deadline=400)


LOOPS = (
    *("accumulation", "accumulation without no_sync", "clipping", "autocast", "schedule", "evaluation"),
    *("own all_reduce", "unused", "static graph", "bucket views", "groups"),
)


@pytest.mark.timeout(420)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_goes_as_without_compression(seen: list[dict[str, Any]], loop: str) -> None:
    for found in seen:
        assert found[loop]["lossless"], "lossless is not plain DDP to the bit"
        for name in LOSSY:
            assert 0 < found[loop][name] < 0.2, name
            assert found[loop][f"{name} replicas"], name


@pytest.mark.parametrize("name", HELD_BACK)
def test_what_is_held_back_of_an_unused_branch_waits_for_it(seen: list[dict[str, Any]], name: str) -> None:
    assert all(found["held for later"][name] for found in seen)


def test_own_gradients_go_lossless_under_autocast(seen: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(seen):
        names = [f"rank{rank}/codec/gcomp/{layer}.weight/own_lossless" for layer in ("first", "left", "right")]
        plain, rounded = found["own gradients"]["plain_loop"], found["own gradients"]["autocast"]
        assert plain["lossless"] == dict.fromkeys(names, 0)
        assert rounded["lossless"] == dict.fromkeys(names, 1)
        assert rounded["ratio"] > 1.1 * plain["ratio"]


def test_frozen_layers_stay_where_they_are(seen: list[dict[str, Any]]) -> None:
    assert all(found["frozen layer"]["frozen"] for found in seen)


def test_ranks_without_inputs_keep_the_others_company(seen: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(seen):
        join = found["join"]
        assert join["lossless"]
        assert join["lossless said"] == join["topk said"] == []
        assert not join["near"], "the first steps, with all ranks there, are rounded"
        assert join["near steps"] == 6
        assert join["near said"] == ["rank 0 has no more inputs: while others go on, gradients are sent lossless"]
        assert join["learnt"] == 2, f"rank {rank} learnt from steps that not all took"


def test_all_ranks_skip_a_step_that_overflows_on_one(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        for name, run in found["scaler"].items():
            assert run["scales"] == [1024, 2048, 2048, 1024, 1024, 2048], name
            assert run["kept"], name
            assert run["good"], name


def test_two_models_in_one_process(seen: list[dict[str, Any]]) -> None:
    assert all(found["two models"] for found in seen)


def test_compiled_models(seen: list[dict[str, Any]]) -> None:
    names = sorted(name for name, _ in Net().named_parameters())
    for found in seen:
        for where in ("outside", "inside"):
            assert found["compiled"][where]
            assert found["compiled"][f"{where} names"] == names
            assert found["compiled"][f"{where} steps"] == 4


def test_premises_of_near_mode_are_watched(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        told = found["premises"]
        assert len(told["lr up"]) == 1, "once, not at each step"
        assert "lr was 0.05 in backward and is 0.1" in told["lr up"][0]
        assert "nesterov" in told["momentum"][0]
        assert "made larger" in told["scaled up"][0]
        assert told["lr down"] == told["clipped"] == told["nothing"] == []

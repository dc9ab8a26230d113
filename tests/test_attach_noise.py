"""attach(model, optimizer, "noise") on CPU ranks: what is promised of it, and what training loops do to it."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import same_bits
from ranks import TIMEOUT, run_ranks
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from training import same

sys.path.append(str(Path(__file__).parents[1] / "experiments"))
from workers.optimizers import Lion

import gradzip
from gradzip import Fixed, GradzipWarning, Rules, Unsupported
from gradzip.hooks import report

OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9),
    "Lion": lambda ps: Lion(ps, lr=1e-4),
    "Muon": lambda ps: torch.optim.Muon(ps, lr=1e-3),  # of matrices alone
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-3),
    "none": lambda ps: torch.optim.SGD(ps, lr=0.01),  # that attach is not told of
}
SHAPED = {"AdamW": 4, "SGD": 0, "Lion": 2, "Muon": 2, "Adafactor": 4, "none": 0}  # tensors; vectors have no rows
if not hasattr(torch.optim, "Muon"):
    del OPTIMIZERS["Muon"]
TARGET = torch.randn(20, 8, generator=torch.Generator().manual_seed(11))


class Task:
    """A perceptron on data that each rank draws for itself."""

    def __init__(self, policy: Any = "noise", optimizer: str = "AdamW", bucket_mb: float = 0.005, **ddp: Any) -> None:
        torch.manual_seed(5)
        bias = optimizer != "Muon"
        net = nn.Sequential(nn.Linear(20, 48, bias), nn.Tanh(), nn.Linear(48, 8, bias))
        net.to(ddp.pop("dtype", torch.float32))
        self.model = DistributedDataParallel(net, bucket_cap_mb=bucket_mb, **ddp)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        known = self.optimizer if optimizer != "none" else None
        self.handle = gradzip.attach(self.model, known, policy, timeout=TIMEOUT)

    def backward(self, number: int, factor: float | torch.Tensor = 1.0) -> None:
        draw = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        x = torch.randn(8, 20, generator=draw)
        y = x @ TARGET + torch.randn(8, 8, generator=draw)
        kind = next(self.model.parameters()).dtype
        (nn.functional.mse_loss(self.model(x.to(kind)).float(), y) * factor).backward()

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.backward(number)
        self.optimizer.step()

    def train(self, first: int, last: int) -> None:
        for number in range(first, last):
            self.step(number)

    def gradients(self) -> torch.Tensor:
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])

    def parameters(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def quiet() -> None:
    logging.getLogger("gradzip").setLevel(logging.WARNING)


# --- The promise -----------------------------------------------------------------------------------------------------


def shares(rank: int, optimizer: str, steps: int) -> dict[str, Any]:
    """The true share of the noise in each step: against the mean of what the ranks had, in float64."""
    quiet()
    task, found = Task(optimizer=optimizer), []
    for number in range(steps):
        task.optimizer.zero_grad()
        with task.model.no_sync():
            task.backward(number)
        exact = task.gradients().double()
        dist.all_reduce(exact)
        exact /= dist.get_world_size()
        task.optimizer.zero_grad()
        task.backward(number)
        noise = task.gradients().double() - exact
        found.append(float(noise.square().sum() / exact.square().sum()))
        task.optimizer.step()
    return {"shares": found, "parameters": task.parameters(), "stats": task.handle.stats()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_share_of_noise_is_at_most_the_budget_on_average_and_twice_that_in_any_step(optimizer: str) -> None:
    ranks = run_ranks(4, shares, optimizer, 25)
    for found in ranks:
        assert same(found["parameters"], ranks[0]["parameters"]), "replicas are bit-identical"
        assert found["shares"] == ranks[0]["shares"]
    seen, stats = ranks[0]["shares"], ranks[0]["stats"]["noise"]
    mean = sum(seen) / len(seen)
    assert 0 < mean <= 0.01
    assert max(seen) <= 0.02
    assert mean / 2 < stats["share"] < 2 * mean, "the estimate, which does not know the true mean"
    assert stats["share"] <= stats["worst"] <= 0.02
    assert stats["coarser"] == 0
    assert 3 < stats["bits"] < 12, "much of these small frames is headers"
    assert ranks[0]["stats"]["runner"] == "host"


# --- Resume and buckets ----------------------------------------------------------------------------------------------


def resumed(rank: int, optimizer: str) -> dict[str, Any]:
    """Stopped after two steps and after seven, with second moments in use by then; and with other buckets."""
    quiet()
    whole = Task(optimizer=optimizer)
    out: dict[str, Any] = {}
    for number in range(10):
        if number in (2, 7):
            parts = {"model": whole.model.module, "optimizer": whole.optimizer, "handle": whole.handle}
            saved = {name: torch.utils._pytree.tree_map(_copied, part.state_dict()) for name, part in parts.items()}
            again = Task(optimizer=optimizer)
            again.model.module.load_state_dict(saved["model"])
            again.optimizer.load_state_dict(saved["optimizer"])
            again.handle.load_state_dict(saved["handle"])
            again.train(number, 10)
            out[f"from {number}"] = again.parameters()
        whole.step(number)
    one_bucket = Task(optimizer=optimizer, bucket_mb=25, gradient_as_bucket_view=True)
    one_bucket.train(0, 10)
    other_draws = Task(optimizer=optimizer)
    other_draws.handle.load_state_dict(other_draws.handle.state_dict() | {"steps": 100})
    other_draws.train(0, 10)
    return out | {
        "whole": whole.parameters(),
        "one bucket": one_bucket.parameters(),
        "other draws": other_draws.parameters(),
        "shaped": whole.handle._shapes.names,
    }


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resume_is_bit_identical_and_buckets_change_nothing(optimizer: str) -> None:
    ranks = run_ranks(4, resumed, optimizer)
    for found in ranks:
        assert same(found["whole"], ranks[0]["whole"]), "replicas are bit-identical"
        for case in ("from 2", "from 7", "one bucket"):
            assert same(found[case], found["whole"]), case
        assert not same(found["other draws"], found["whole"]), "draws follow the step that is saved"
        assert len(found["shaped"]) == SHAPED[optimizer]


# --- Training loops --------------------------------------------------------------------------------------------------


def loops(rank: int) -> dict[str, Any]:
    quiet()
    out: dict[str, Any] = {}

    task = Task()
    for number in range(6):
        task.optimizer.zero_grad()
        with task.model.no_sync():
            task.backward(10 * number)
        task.backward(10 * number + 1)
        task.optimizer.step()
    out["accumulation"] = task.parameters(), task.handle.stats()["steps"]

    task = Task(static_graph=True)
    task.train(0, 6)
    out["static graph"] = task.parameters(), task.handle.stats()["steps"]

    task = Task(find_unused_parameters=True)
    task.train(0, 6)
    out["unused"] = task.parameters(), task.handle.stats()["steps"]

    task, caught = Task(), list[str]()
    with warnings.catch_warnings(record=True) as said, Join([task.model]):
        warnings.simplefilter("always", GradzipWarning)
        for number in range(6 if rank == 0 else 8):
            task.step(number)
    task.handle.stats()
    caught += [str(one.message) for one in said if issubclass(one.category, GradzipWarning)]
    out["join"] = task.parameters(), caught

    task = Task()
    with warnings.catch_warnings(), Join([task.model]):
        warnings.simplefilter("ignore", GradzipWarning)
        for number in range(2 if rank == 0 else 8):  # before second moments count
            task.step(number)
    out["join early"] = task.parameters(), task.handle.stats()["steps"]

    task = Task(dtype=torch.bfloat16)
    task.train(0, 6)
    out["bfloat16"] = task.parameters(), task.handle.stats()["noise"]["share"]

    task = Task()
    task.train(0, 3)
    task.handle.set_policy(Fixed("gcomp:mode=lossless"))
    task.train(3, 5)
    task.handle.set_policy("noise:share=3%")
    task.train(5, 7)
    kinds = sorted(task.handle.stats()["codecs"])
    task.handle.detach()
    task.train(7, 8)
    out["set_policy"] = task.parameters(), kinds

    mixed = Rules({"0.weight": "noise", "2.weight": "powersgd:rank=2", "0.bias": "topk:ratio=0.5"}, small=True)
    task = Task(mixed)
    task.train(0, 6)
    out["mixed"] = task.parameters(), sorted(task.handle.stats()["codecs"])
    return out


def test_training_loops() -> None:
    ranks = run_ranks(3, loops)
    for found in ranks:
        for case, (parameters, _) in found.items():
            assert all(bool(p.isfinite().all()) for p in parameters), case
            if not case.startswith("join"):  # a rank that has joined takes no more steps
                assert same(parameters, ranks[0][case][0]), f"{case}: replicas differ"
        for case in ("accumulation", "static graph", "unused"):
            assert found[case][1] == 6, case
        assert same(found["static graph"][0], found["unused"][0])
        assert found["join early"][1] == 8
        assert found["bfloat16"][1] <= 0.02
        assert found["set_policy"][1] == [
            "gcomp:mode=lossless/alltoall",
            "noise/alltoall",
            "noise:share=0.03/alltoall",
        ]
        assert found["mixed"][1] == [
            "noise/alltoall",
            "powersgd:rank=2/factors",
            "topk:ratio=0.5/allgather",
        ]
    same_grid = "while others go on, the codec noise rounds all values of a tensor to the same grid"
    for rank in (1, 2):
        assert any(same_grid in text for text in ranks[rank]["join"][1])
        assert same(ranks[rank]["join"][0], ranks[1]["join"][0])


def overflow(rank: int) -> dict[str, Any]:
    quiet()
    task = Task()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    scales = []
    for number in range(6):
        task.optimizer.zero_grad()
        before = task.parameters()
        task.backward(number, scaler.scale(torch.tensor(torch.inf if number == 4 and rank == 1 else 1.0)))
        scaler.step(task.optimizer)
        scaler.update()
        scales.append((scaler.get_scale(), same(before, task.parameters())))
    return {"scales": scales, "parameters": task.parameters(), "noise": task.handle.stats()["noise"]}


def test_an_overflow_on_one_rank_is_skipped_by_all() -> None:
    ranks = run_ranks(2, overflow)
    for found in ranks:
        assert found["scales"] == [(1024, False)] * 4 + [(512, True), (512, False)]
        assert same(found["parameters"], ranks[0]["parameters"])
        assert found["noise"]["worst"] <= 0.02, "the step that overflowed does not count"


# --- What goes wrong -------------------------------------------------------------------------------------------------


def differing(rank: int) -> dict[str, str]:
    quiet()
    said = {}
    for name, policies in {
        "budgets": ("noise:share=1%", "noise:share=3%"),
        "codecs": ("noise", Fixed("gcomp:mode=lossless")),
    }.items():
        try:
            Task(policies[rank]).train(0, 2)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return said


def test_ranks_with_other_budgets_or_codecs_are_told_at_attach() -> None:
    for rank, said in enumerate(run_ranks(2, differing)):
        assert said["budgets"].startswith("PeerError: ranks disagree. Rank ")
        assert "4 x noise/alltoall" in said["budgets"]
        assert "4 x noise:share=0.03/alltoall" in said["budgets"]
        assert "4 x noise/alltoall" in said["codecs"]
        assert "gcomp:mode=lossless" in said["codecs"]
        assert said["codecs"].startswith("PeerError" if rank == 0 else ("PeerError", "RuntimeError"))


def other_state(rank: int) -> dict[str, Any]:
    """The second moments of one parameter are not the same on all ranks."""
    quiet()
    task = Task()
    task.train(0, 5)
    if rank == 1:
        state = task.optimizer.state[next(task.model.parameters())]
        state["exp_avg_sq"] *= torch.logspace(-6, 0, state["exp_avg_sq"].numel()).view_as(state["exp_avg_sq"])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", GradzipWarning)
        task.optimizer.zero_grad()
        task.backward(5)
        task.handle.stats()
    return {"said": [str(one.message) for one in said], "gradients": task.gradients()}


def test_other_second_moments_on_one_rank_are_noticed_and_do_no_harm() -> None:
    ranks = run_ranks(2, other_state)
    assert same_bits(ranks[0]["gradients"], ranks[1]["gradients"])
    for rank, found in enumerate(ranks):
        assert any(f"rank {1 - rank} would round '0.weight' to another grid" in text for text in found["said"])


def cancelling(rank: int) -> list[str]:
    """Ranks' gradients are opposite: what is left of them is small beside the noise."""
    quiet()
    task = Task(optimizer="SGD")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", GradzipWarning)
        for _ in range(3):
            task.optimizer.zero_grad()
            draw = torch.Generator().manual_seed(1)
            x = torch.randn(8, 20, generator=draw)
            (task.model(x).square().sum() * (1.0 if rank == 0 else -0.99)).backward()
        task.handle.stats()
    return [str(one.message) for one in said]


def test_a_step_above_twice_the_budget_is_told_once() -> None:
    for said in run_ranks(2, cancelling):
        (text,) = [text for text in said if "more than twice its budget of 1.0%" in text]
        assert "of the averaged gradient in a step" in text


def leaving(rank: int) -> str:
    quiet()
    task = Task()
    try:
        task.train(0, 3 if rank == 2 else 1000)
    except Exception as error:
        return str(error)
    return "left"


def test_a_rank_that_is_gone_ends_training_on_the_others() -> None:
    *others, gone = run_ranks(3, leaving)
    assert gone == "left"
    for said in others:
        assert "rank 2" in said


def refused(rank: int) -> dict[str, str]:
    quiet()
    said = {}
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "float64": ("noise", {"dtype": torch.float64}),
        "route": (Fixed("noise/hierarchical"), {}),
        "none": ("noise:share=0", {}),
    }
    for name, (policy, options) in cases.items():
        with pytest.raises(Unsupported) as raised:
            Task(policy, **options)
        said[name] = str(raised.value)
    return said


def test_the_log_line_has_bits_and_share() -> None:
    numbers = {"steps": 500, "steps_here": 500, "bytes_sent": 5e6, "bytes_raw": 3e7, "ratio": 6.0, "memory": 0}
    numbers |= {"coding_seconds": 1.0, "exposed_seconds": 1.0}
    noise = {"bits": 4.63, "share": 0.0085, "worst": 0.0124, "coarser": 0}
    said = report.in_steps({**numbers, "noise": noise})
    assert said.endswith("; noise 0.85% of the gradient, 1.24% in the worst step, at 4.6 bits a value")
    assert "noise" not in report.in_steps({**numbers, "noise": {}})


def test_what_cannot_be_is_refused_at_attach() -> None:
    for said in run_ranks(2, refused):
        assert "noise codes values of 16 and 32 bits, and '0.weight' is torch.float64" in said["float64"]
        assert "noise goes by 'alltoall' alone, and not by 'hierarchical'" in said["route"]
        assert "noise:share=0: choose 0.01% to 30%" in said["none"]

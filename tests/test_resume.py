"""Four ranks, stopped at a random step and resumed in new processes; and other things that four ranks show."""

from __future__ import annotations

import logging
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import TIMEOUT, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Run, same, start

import gradzip
from gradzip import Accordion, Fixed, GradzipWarning, Rules

STEPS = 9


def policies() -> dict[str, Any]:
    """Made anew for each run: some learn."""
    return {
        "gcomp": "gcomp",
        "gcomp far": Fixed("gcomp:ulps=4096"),
        "gcomp shared": Fixed("gcomp:mode=lossless,book=shared"),
        "powersgd": "powersgd:rank=2",
        "topk": Fixed("topk:ratio=0.05"),
        "topk bf16": Fixed("topk:ratio=0.05,feedback=bf16"),
        "dgc": Fixed("dgc:ratio=0.05"),
        "noise": "noise",
        "accordion": Accordion("powersgd:rank=4", "powersgd:rank=1", window=2),
        "accordion topk": Accordion(Rules({"*": "topk:ratio=0.5"}), Fixed("topk:ratio=0.05"), window=3, threshold=0.2),
    }


def stopped(rank: int, folder: str, at: int) -> dict[str, Any]:
    """Trains through; on the way everything is saved, by torch.distributed.checkpoint."""
    logging.getLogger("gradzip").setLevel(logging.WARNING)
    out: dict[str, Any] = {}
    for name, policy in policies().items():
        run = start(policy)
        assert run.handle is not None
        run.train(0, at)
        saved = {
            "model": run.model.module.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "gradzip": run.handle.state_dict(),
        }
        dcp.save(saved, checkpoint_id=Path(folder) / name)
        own = {k: v for k, v in saved["gradzip"].items() if k.startswith("rank") and isinstance(v, torch.Tensor)}
        run.train(at, STEPS)
        stats = run.handle.stats()
        out[name] = {"parameters": run.parameters(), "own": own, "history": stats["history"], "memory": stats["memory"]}
    return out


def resumed(rank: int, folder: str, at: int) -> dict[str, Any]:
    logging.getLogger("gradzip").setLevel(logging.WARNING)
    out: dict[str, Any] = {}
    for name, policy in policies().items():
        run = start(policy)
        assert run.handle is not None
        path = Path(folder) / name
        if name == "topk":
            # dcp.load into a new handle's own dictionary would leave the residuals out: that is noticed.
            partly = {"gradzip": run.handle.state_dict()}
            dcp.load(partly, checkpoint_id=path)
            with pytest.raises(gradzip.Unsupported, match="load_checkpoint"):
                run.handle.load_state_dict(partly["gradzip"])
        _fill(run, path)
        run.handle.load_checkpoint(path, "gradzip")
        run.train(at, STEPS)
        out[name] = {"parameters": run.parameters(), "history": run.handle.stats()["history"]}
    return out


def _fill(run: Run, path: Path) -> None:
    """Model and optimizer, whose momenta have to be there before they can be loaded."""
    for p in run.model.parameters():
        p.grad = torch.zeros_like(p)
    run.optimizer.step()
    saved: dict[str, Any] = {"model": run.model.module.state_dict(), "optimizer": run.optimizer.state_dict()}
    dcp.load(saved, checkpoint_id=path)
    run.model.module.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(saved["optimizer"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def runs(folder: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    at = random.SystemRandom().randrange(1, STEPS - 1)
    print(f"stopped before step {at}")  # pytest shows it where a test fails
    return run_ranks(4, stopped, folder, at, deadline=300), run_ranks(4, resumed, folder, at, deadline=300)


@pytest.mark.timeout(620)
@pytest.mark.parametrize("name", policies())
def test_four_ranks_stopped_at_a_random_step_go_on_identically(runs: Any, name: str) -> None:
    whole, again = runs
    for before, after in zip(whole, again):
        assert same(after[name]["parameters"], before[name]["parameters"])
        assert same(before[name]["parameters"], whole[0][name]["parameters"]), "replicas differ"


@pytest.mark.parametrize("name", ["topk", "dgc", "powersgd", "gcomp far"])
def test_what_was_saved_differs_between_ranks(runs: Any, name: str) -> None:
    saved = [found[name]["own"] for found in runs[0]]
    for rank, own in enumerate(saved):
        assert own
        assert all(key.startswith(f"rank{rank}/") for key in own)
    first, second = (torch.cat([v.flatten().float() for v in own.values()]) for own in saved[:2])
    assert first.shape != second.shape or not torch.equal(first, second)


def _sorted(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry | {"critical": sorted(entry["critical"])} for entry in history]


def test_accordion_decides_alike_and_remembers(runs: Any) -> None:
    whole, again = runs
    for name in ("accordion", "accordion topk"):
        for before, after in zip(whole, again):
            history = _sorted(before[name]["history"])
            assert [entry["step"] for entry in history] == ([2, 4, 6, 8] if name == "accordion" else [3, 6, 9])
            assert history == _sorted(whole[0][name]["history"])
            later = _sorted(after[name]["history"])
            assert later == history[len(history) - len(later) :]
    assert whole[0]["topk bf16"]["memory"] * 2 == whole[0]["topk"]["memory"] > 0


# -- other numbers of ranks --------------------------------------------------------------------------------------------


def fewer_ranks(rank: int, folder: str) -> dict[str, Any]:
    """Goes on from what four ranks have left."""
    out: dict[str, Any] = {}
    for name in ("topk", "powersgd", "gcomp far", "dgc", "accordion"):
        run = start(policies()[name])
        assert run.handle is not None
        _fill(run, Path(folder) / name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", GradzipWarning)
            run.handle.load_checkpoint(Path(folder) / name, "gradzip")
        saved = run.handle.state_dict()
        run.train(STEPS, STEPS + 3)
        told = [str(w.message) for w in caught if issubclass(w.category, GradzipWarning)]
        out[name] = {"told": told, "parameters": run.parameters(), "own": [k for k in saved if k.startswith("rank")]}
    return out


def test_another_number_of_ranks_goes_on_with_one_warning(runs: Any, folder: str) -> None:
    found = run_ranks(3, fewer_ranks, folder)
    for rank, seen in enumerate(found):
        for name, result in seen.items():
            assert len(result["told"]) == 1
            assert "saved by 4 ranks and is loaded by 3" in result["told"][0]
            assert same(result["parameters"], found[0][name]["parameters"]), "replicas differ"
            assert all(bool(p.isfinite().all()) for p in result["parameters"])
            assert len(result["own"]) > 1
            assert all(key.startswith(f"rank{rank}/") for key in result["own"])


# -- identity ----------------------------------------------------------------------------------------------------------


def plain_and_identity(rank: int) -> bool:
    logging.getLogger("gradzip").setLevel(logging.WARNING)
    plain, ours = start(None), start(Fixed("identity"))
    plain.train(0, 5)
    ours.train(0, 5)
    return same(plain.parameters(), ours.parameters())


@pytest.mark.parametrize("world", [2, 3, 4])
def test_identity_is_plain_ddp_to_the_bit(world: int) -> None:
    assert all(run_ranks(world, plain_and_identity))


# -- powersgd ----------------------------------------------------------------------------------------------------------


class WithZeroLayer(nn.Module):
    """One layer's gradient is always zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.silent, self.last = nn.Linear(64, 300), nn.Linear(300, 300), nn.Linear(300, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        return self.last(x + 0 * self.silent(x))


def long_powersgd(rank: int, steps: int) -> dict[str, Any]:
    """Default buckets, 4 ranks over Gloo: a regression that is learnt."""
    logging.getLogger("gradzip").setLevel(logging.WARNING)
    torch.manual_seed(5)
    model = DistributedDataParallel(WithZeroLayer())
    truth = torch.randn(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    handle = gradzip.attach(model, optimizer, "powersgd:rank=2", timeout=TIMEOUT)
    losses = []
    rng = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(16, 64, generator=rng)
        optimizer.zero_grad()
        loss = (model(x) - x @ truth).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    finite = all(bool(p.isfinite().all()) and bool(p.grad.isfinite().all()) for p in model.parameters())
    stats = handle.stats()
    return {
        "losses": losses,
        "finite": finite,
        "silent": bool((model.module.silent.weight.grad == 0).all()),
        "parameters": [p.detach().clone() for p in model.parameters()],
        "collectives": stats["collectives"],
    }


def _check_powersgd(steps: int) -> None:
    found = run_ranks(4, long_powersgd, steps, deadline=900)
    for result in found:
        assert result["finite"]
        assert result["silent"]
        assert result["collectives"] == 3 * steps
        assert same(result["parameters"], found[0]["parameters"])
        assert sum(result["losses"][-5:]) < 0.5 * sum(result["losses"][:5])
    print(f"loss {found[0]['losses'][0]:.3f} -> {found[0]['losses'][-1]:.3f}")


def test_powersgd_survives_a_layer_of_zeros() -> None:
    _check_powersgd(40)


@pytest.mark.slow
@pytest.mark.timeout(920)
def test_powersgd_for_a_thousand_steps_over_gloo() -> None:
    _check_powersgd(1000)

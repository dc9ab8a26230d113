"""Handle.resume: the states of two ranks on three, and ranks for which nothing was saved."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from training import Run, same, save, start

from gradzip import Accordion, Fixed, GradzipWarning

SAVED_AT, STEPS = 3, 6


def policies() -> dict[str, Any]:
    """Made anew for each run: one learns."""
    return {
        "gcomp": Fixed("gcomp:ulps=4096"),
        "gcomp shared": Fixed("gcomp:mode=lossless,book=shared"),
        "powersgd": "powersgd:rank=2",
        "topk": Fixed("topk:ratio=0.05"),
        "dgc": Fixed("dgc:ratio=0.05"),
        "accordion": Accordion("powersgd:rank=4", "powersgd:rank=1", window=2),
    }


def saved(rank: int, folder: str) -> dict[str, Any]:
    """Trains through, and saves on the way."""
    logging.getLogger("gradzip").setLevel(logging.WARNING)
    out = {}
    for name, policy in policies().items():
        run = start(policy)
        run.train(0, SAVED_AT)
        torch.save(save(run), Path(folder) / f"{name}-{rank}.pt")
        run.train(SAVED_AT, STEPS)
        out[name] = run.parameters()
    return out


def resumed(rank: int, folder: str, without: list[int], stale: bool = False) -> dict[str, Any]:
    """All ranks have the model and the optimizer; those `without` have no state of the handle, or an old one."""
    lines: list[str] = []
    heard = logging.Handler()
    heard.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradzip").addHandler(heard)
    out = {}
    for name, policy in policies().items():
        state = torch.load(Path(folder) / f"{name}-{0 if rank in without else rank}.pt", weights_only=True)
        run = _started(policy, state)
        assert run.handle is not None
        lines.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", GradzipWarning)
            older = state["handle"] | {"steps": 1} if stale else None
            run.handle.resume(older if rank in without else state["handle"])
        held = run.handle.stats()["memory"] if name == "topk" else None
        run.train(SAVED_AT, STEPS)
        told = [str(w.message) for w in caught if issubclass(w.category, GradzipWarning)]
        out[name] = {"parameters": run.parameters(), "steps": run.handle.stats()["steps"], "held": held}
        out[name] |= {"lines": [line for line in lines if "resumed" in line or "holds no" in line], "warned": told}
        run.handle.detach()
    return out


def _started(policy: Any, state: dict[str, Any]) -> Run:
    run = start(policy)
    run.model.module.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def whole(folder: str) -> list[dict[str, Any]]:
    return run_ranks(2, saved, folder)


def check(found: list[dict[str, Any]], steps: int, line: str) -> None:
    for rank, seen in enumerate(found):
        for name, result in seen.items():
            assert result["steps"] == steps, name
            assert same(result["parameters"], found[0][name]["parameters"]), f"{name}: replicas differ"
            assert all(bool(p.isfinite().all()) for p in result["parameters"])
            assert result["lines"] == ([line] if line and rank == 0 else []), name
            assert result["warned"] == []


def test_with_every_state_it_is_load_state_dict(whole: list[dict[str, Any]], folder: str) -> None:
    found = run_ranks(2, resumed, folder, [])
    check(found, STEPS, "")
    for before, after in zip(whole, found):
        for name, parameters in before.items():
            assert same(after[name]["parameters"], parameters), name


def test_a_third_rank_starts_with_empty_residuals(whole: list[dict[str, Any]], folder: str) -> None:
    found = run_ranks(3, resumed, folder, [2])
    check(
        found,
        STEPS,
        "resumed at step 3 on 3 ranks; the state was saved by 2; "
        "no state was saved for rank 2, which starts with empty residuals",
    )
    assert [rank["topk"]["held"] > 0 for rank in found] == [True, True, False]


def test_a_lost_file_costs_that_ranks_residuals_alone(whole: list[dict[str, Any]], folder: str) -> None:
    found = run_ranks(2, resumed, folder, [0])
    check(
        found, STEPS, "resumed at step 3 on 2 ranks; no state was saved for rank 0, which starts with empty residuals"
    )
    assert [rank["topk"]["held"] > 0 for rank in found] == [False, True]


def test_a_file_that_an_older_run_left_is_not_loaded(whole: list[dict[str, Any]], folder: str) -> None:
    found = run_ranks(2, resumed, folder, [1], True)
    line = "resumed at step 3 on 2 ranks; no state was saved for rank 1, which starts with empty residuals"
    check(found, STEPS, line)
    assert [rank["topk"]["held"] > 0 for rank in found] == [True, False]


def test_fewer_ranks_lose_the_residuals_of_the_others(whole: list[dict[str, Any]], folder: str) -> None:
    found = run_ranks(1, resumed, folder, [])
    check(found, STEPS, "resumed at step 3 on 1 rank; the state was saved by 2; the residuals of rank 1 are lost")


def test_a_checkpoint_without_any_state_starts_at_step_0(whole: list[dict[str, Any]], folder: str) -> None:
    found = run_ranks(2, resumed, folder, [0, 1])
    line = "the checkpoint holds no gradzip state: all ranks start at step 0 with empty residuals"
    check(found, STEPS - SAVED_AT, line)


def test_under_gradzip_off_a_state_passes_through(
    whole: list[dict[str, Any]], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADZIP", "off")
    assert run_ranks(2, passed_through, folder) == [True, True]


def passed_through(rank: int, folder: str) -> bool:
    state = torch.load(Path(folder) / f"topk-{rank}.pt", weights_only=True)["handle"]
    handle = start("topk:ratio=0.05").handle
    assert handle is not None
    handle.resume(None)
    empty = handle.state_dict() == {}
    handle.resume(state)
    return empty and handle.state_dict().keys() == state.keys()

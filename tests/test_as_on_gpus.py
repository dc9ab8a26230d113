"""Models as on GPUs whose gradients the host runner carries: kernels and streams are emulated (fake_gpu.py)."""

from __future__ import annotations

import os
import warnings
from typing import Any

import emulated
import fake_gpu
import pytest
import test_failures
import test_hook_cost
from ranks import run_ranks
from torch.distributed.algorithms.join import Join
from training import same, start

from gradzip import Accordion, Fixed, GradzipWarning, Policy, Rules

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
STEPS = 5
EXACT = ("identity", "gcomp:mode=lossless", "gcomp:mode=lossless,book=shared,refresh=3")


def policies() -> dict[str, str | Policy]:
    found: dict[str, str | Policy] = {text: Fixed(text) for text in EXACT}
    found |= {text: text for text in ("gcomp", "gcomp:keep=7", "topk:ratio=0.1", "randomk:ratio=0.2")}
    found["powersgd"] = "powersgd:rank=1"
    found["learns"] = Accordion("topk:ratio=0.5", "topk:ratio=0.1", window=2)
    found["several"] = Rules({"0.weight": "powersgd:rank=1", "2.weight": "gcomp", "*": "sign"}, small=True)
    return found


def trained(rank: int, check: str) -> dict[str, Any]:
    os.environ["GRADZIP_CHECK"] = check
    reference, out = start(Fixed("gcomp:mode=lossless")), dict[str, Any]()
    reference.train(0, STEPS)
    fake_gpu.install()
    for name, policy in policies().items():
        run = start(policy)
        assert run.handle is not None
        run.train(0, STEPS)
        stats = run.handle.stats()
        assert stats["runner"] == ("torch" if name == "identity" and not check else "host"), name
        out[name] = run.parameters(), stats["steps"], len(stats["history"])
        run.handle.detach()
    out["reference"] = reference.parameters(), STEPS, 0
    assert fake_gpu.overwritten == []
    return out


@pytest.mark.parametrize("check", ["", "1"])
def test_all_kinds_of_codecs_train_by_the_host_runner(check: str) -> None:
    first, second = run_ranks(2, trained, check, deadline=250)
    for name, (parameters, steps, history) in first.items():
        assert same(parameters, second[name][0]), f"{name}: replicas differ"
        assert steps == second[name][1] == STEPS
        assert bool(history) == (name == "learns")
        assert all(bool(p.isfinite().all()) for p in parameters)
    for name in EXACT:
        assert same(first[name][0], first["reference"][0]), name


def failing(rank: int) -> dict[str, dict[str, str]]:
    fake_gpu.install()
    return test_failures.failing(rank)


def test_every_rank_learns_the_cause() -> None:
    failures = run_ranks(2, failing)
    for kind in test_failures.FAILURES:
        test_failures.test_every_rank_learns_the_cause(failures, kind)


def other_settings(rank: int) -> dict[str, Any]:
    fake_gpu.install()
    return test_failures.other_settings(rank)


def test_ranks_with_other_settings_send_lossless_until_they_agree() -> None:
    for rank, seen in enumerate(run_ranks(2, other_settings)):
        assert len(seen["said"]) == 1, "once, not at each step"
        assert f"rank {1 - rank} would round '0.weight'" in seen["said"][0]
        assert seen["same"] == (False, True, False)


def plainly(rank: int) -> dict[str, Any]:
    fake_gpu.install()
    return test_hook_cost.plainly(rank)


def test_plain_steps_go_by_torch_itself() -> None:
    for seen in run_ranks(2, plainly):
        assert seen["same"][:3] == [True] * 3
        assert not any(seen["same"][3:])
        assert seen["went"] == [1, 2, 7, 8, 9]
        assert seen["sum"] == 1
        assert "ranks disagree" in seen["alone"]["said"]


def joined(rank: int) -> list[str]:
    """Rank 0 runs out of inputs before rank 1."""
    fake_gpu.install()
    run = start("gcomp:ulps=4096")
    assert run.handle is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GradzipWarning)
        with Join([run.model]):
            run.train(0, 2 + rank)
        run.handle.stats()
    return [str(one.message) for one in caught if issubclass(one.category, GradzipWarning)]


def test_a_rank_without_inputs_is_named() -> None:
    for said in run_ranks(2, joined):
        assert said == ["rank 0 has no more inputs: while others go on, gradients are sent lossless"]

"""Ranks that disagree or fail: every rank raises, and says why."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from ranks import TIMEOUT, free_port, run_ranks
from training import same, start

from gradzip import Context, Fixed, GradzipWarning, Option, Policy, Rules
from gradzip.codecs import register
from gradzip.codecs.baseline import Identity
from gradzip.exchange.on_host import generic
from gradzip.exchange.peers import channel

FAILURES = {  # what rank 0 and rank 1 keep as the error, and what both are told
    "codecs differ": ("PeerError", "PeerError", ["Rank 0: plain averaging", "Rank 1: topk:ratio=0.05"]),
    "one rule differs": ("PeerError", "PeerError", ["Rank 0: ", "Rank 1: ", "x identity", "x topk"]),
    "steps differ": ("PeerError", "PeerError", ["at step 0", "at step 7"]),
    "sizes differ": ("PeerError", "PeerError", ["Rank 0: onebit", "Rank 1: topk:ratio=0.9"]),
    "encode fails": ("PeerError", "OverflowError", ["cannot encode", "weight"]),
    "decode fails": ("PeerError", "OverflowError", ["cannot decode", "weight"]),
    "policy fails": ("PeerError", "ZeroDivisionError", ["divides by zero"]),
}


class Broken(Policy):
    """Works for a while, then not."""

    def __init__(self, works: int) -> None:
        self.works = works

    def option(self, name: str, shape: Any) -> Option:
        self.works -= 1
        if self.works < 0:
            raise ZeroDivisionError("the policy divides by zero")
        return Option("identity")


@dataclass(frozen=True)
class Faulty(Identity):
    """Identity that fails on rank 1. Registered in the ranks' processes only."""

    name: ClassVar[str] = "faulty"
    wire_id: ClassVar[int] = 250
    summable: ClassVar[bool] = False
    where: str = "encode"

    def _encode(self, x: torch.Tensor, ctx: Context, body: torch.Tensor) -> int:
        if ctx.rank == 1 and self.where == "encode":
            raise OverflowError(f"cannot encode {ctx.name}")
        return super()._encode(x, ctx, body)

    def _decode(self, body: torch.Tensor, ctx: Context, out: torch.Tensor, add: bool) -> None:
        if ctx.rank == 1 and self.where == "decode":
            raise OverflowError(f"cannot decode {ctx.name}")
        super()._decode(body, ctx, out, add)


def late_to_agree(what: str, stage: int, number: int) -> None:
    if what == "agree":
        time.sleep(0.3)


def failing(rank: int) -> dict[str, dict[str, str]]:
    register(Faulty)
    policies: dict[str, str | Policy] = {
        "codecs differ": Fixed("identity" if rank == 0 else "topk:ratio=0.05"),
        "one rule differs": Rules({"0.weight": "topk" if rank == 0 else "identity", "*": "topk"}),
        "steps differ": "topk",
        "sizes differ": Fixed("onebit" if rank == 0 else "topk:ratio=0.9"),
        "encode fails": Fixed("faulty:where=encode"),
        "decode fails": Fixed("faulty:where=decode"),
        "policy fails": Broken(9 if rank == 1 else 1000),
    }
    out = {}
    for kind in FAILURES:
        # Data is there before ranks find out that they disagree: what is too long for a buffer must not meet it.
        channel._probe = late_to_agree if kind == "sizes differ" else None
        run = start(policies[kind])
        assert run.handle is not None
        if rank == 1 and kind == "steps differ":
            run.handle.load_state_dict(run.handle.state_dict() | {"steps": 7})
        said = {}
        for when in ("raised", "again"):
            try:
                if when == "raised":
                    run.train(0, 3)
                else:
                    run.handle.reduce(None)  # what a further backward would meet
            except Exception as error:
                said[when] = str(error)
        said["kept"] = f"{type(run.handle.error).__name__}: {run.handle.error}"
        out[kind] = said
    return out


@pytest.fixture(scope="module")
def failures() -> list[dict[str, dict[str, str]]]:
    return run_ranks(2, failing)


@pytest.mark.parametrize("kind", FAILURES)
def test_every_rank_learns_the_cause(failures: list[dict[str, dict[str, str]]], kind: str) -> None:
    *types, cause = FAILURES[kind]
    for rank in (0, 1):
        said = failures[rank][kind]
        assert said["kept"].startswith(types[rank])
        assert rank == 1 or types[0] == types[1] or "rank 1 failed" in said["kept"]
        for word in cause:
            assert word in said["kept"]
            assert word in said["raised"], "backward did not say it"
            assert word in said["again"], "a further backward did not say it"


def with_the_store(rank: int, port: int, where: str) -> str:
    """Rank 0 fails and is gone at once, and with it the store, before rank 1 has exchanged anything."""
    dist.barrier()  # all have connected
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=TIMEOUT)
    policy = Broken(1000)
    run = start(policy if where == "policy" else "gcomp:mode=lossless")
    if rank == 0:
        channel._TO_HEAR = TIMEOUT.total_seconds()  # where much else runs, a heart may beat late
        policy.works = 0
        if where == "codec":
            generic.GenericCoder.encode = divide_by_zero  # type: ignore[method-assign]
    else:
        time.sleep(0.4)
    with pytest.raises((RuntimeError, ZeroDivisionError)) as raised:
        run.train(0, 3)
    if rank == 0:
        assert run.handle is not None
        assert run.handle._channel.health._get("heard/1"), "it did not wait until rank 1 knew"
    return str(raised.value)


def divide_by_zero(*_: Any) -> Any:
    raise ZeroDivisionError("the codec divides by zero")


@pytest.mark.parametrize("where", ["policy", "codec"])
def test_the_cause_is_known_when_the_store_is_gone(where: str) -> None:
    said = run_ranks(2, with_the_store, free_port(), where)
    assert all(f"the {where} divides by zero" in words for words in said)


def other_settings(rank: int) -> dict[str, Any]:
    """One rank with another learning rate, hence another grid; then it is put right."""
    run, lossless = start("gcomp:ulps=4096"), start("gcomp:mode=lossless")
    assert run.handle is not None
    for r in (run, lossless):
        r.step(0)
    fine = same(run.gradients(), lossless.gradients())
    run.optimizer.param_groups[0]["lr"] = 0.05 if rank == 0 else 1e-5
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GradzipWarning)
        for number in (1, 2):  # no steps of the optimizer: the parameters stay equal
            run.step(number)
            lossless.step(number)
        run.handle.stats()
    differing = same(run.gradients(), lossless.gradients())
    run.optimizer.param_groups[0]["lr"] = 0.05
    run.step(3)
    lossless.step(3)
    return {
        "said": [str(w.message) for w in caught],
        "same": (fine, differing, same(run.gradients(), lossless.gradients())),
    }


def test_ranks_with_other_settings_send_lossless_until_they_agree() -> None:
    for rank, seen in enumerate(run_ranks(2, other_settings)):
        assert len(seen["said"]) == 1, "once, not at each step"
        assert f"rank {1 - rank} would round '0.weight'" in seen["said"][0]
        assert seen["same"] == (False, True, False)


def no_sync_alone(rank: int) -> str:
    """Rank 0 leaves out an exchange, and is through with its steps when rank 1 still waits for it."""
    run = start("topk:ratio=0.1")
    run.train(0, 3)
    if rank == 0:
        with run.model.no_sync():
            run.step(3)
        assert run.handle is not None
        run.handle.detach()
        return ""
    with pytest.raises(RuntimeError) as raised:
        run.step(3)
    return str(raised.value)


def test_no_sync_on_one_rank_is_named_as_a_cause() -> None:
    _, said = run_ranks(2, no_sync_alone)
    assert "rank 0 closed its connections" in said
    assert "if it alone uses no_sync()" in said

"""attach: the environment, what it refuses and leaves untouched, what it says, and what it counts."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from ranks import TIMEOUT, run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import Run, same, start

import gradzip
from gradzip import Accordion, Fixed, GradzipWarning, Plan, Rules
from gradzip.errors import GradzipError
from gradzip.hooks import report
from gradzip.option import Option


class Wrapper:
    """As frameworks wrap optimizers."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def environment(folder: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    patch = pytest.MonkeyPatch()
    patch.setenv("GRADZIP", "off")
    off, plain = start("topk"), start(None)
    assert off.handle is not None
    for run in (off, plain):
        run.train(0, 3)
    off.handle.load_state_dict({"version": 0, "steps": 7})
    off.handle.set_policy("gcomp")
    off.handle.end_epoch()
    off.handle.detach()
    out["off stats"] = sorted(off.handle.stats())
    out["off"] = same(off.parameters(), plain.parameters()) and not off.model._comm_hooks
    out["off state"] = off.handle.state_dict()
    patch.setenv("GRADZIP", "of")
    out["of"] = refusal(lambda: start("topk"))
    patch.setenv("GRADZIP", "on")
    patch.setenv("GRADZIP_POLICY", "cast")
    out["policy"] = options(start("topk"))["0.weight"]
    named = {name: p.shape for name, p in plain.model.module.named_parameters()}
    Plan(dict.fromkeys(named, Option("zlib")), named).save(Path(folder) / "plan.json")
    patch.setenv("GRADZIP_POLICY", str(Path(folder) / "plan.json"))
    out["plan"] = options(start("topk"))["0.weight"]
    patch.setenv("GRADZIP_POLICY", "tokp")
    out["tokp"] = refusal(lambda: start("topk"))
    patch.undo()
    return out


def options(run: Run) -> dict[str, str]:
    assert run.handle is not None
    return {name: tensor["option"] for name, tensor in run.handle.stats()["tensors"].items()}


def refusal(case: Callable[[], object]) -> str:
    with pytest.raises(GradzipError) as caught:
        case()
    return f"{type(caught.value).__name__}: {caught.value}"


def mistakes() -> dict[str, Any]:
    """Each is refused, and the model trains on as if nobody had tried."""
    run, plain = start(None), start(None)
    model, optimizer = run.model, run.optimizer
    sharded = nn.Linear(8, 8)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    engine = type("DeepSpeedEngine", (nn.Module,), {})
    fsdp = type("FullyShardedDataParallel", (nn.Module,), {})
    hooked = DistributedDataParallel(nn.Linear(4, 4))
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    torch._dynamo.config.optimize_ddp = "python_reducer"
    compiled = DistributedDataParallel(nn.Linear(4, 4))
    torch._dynamo.config.optimize_ddp = True
    skipping = DistributedDataParallel(nn.Linear(4, 4))
    skipping.skip_all_reduce_unused_params = True  # older versions of torch have no such argument
    stranger = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    cases: dict[str, Callable[[], object]] = {
        "bare": lambda: gradzip.attach(nn.Linear(2, 2), optimizer),
        "bare compiled": lambda: gradzip.attach(cast(nn.Module, torch.compile(nn.Linear(2, 2))), optimizer),
        "fsdp2": lambda: gradzip.attach(sharded),
        "fsdp": lambda: gradzip.attach(fsdp()),
        "deepspeed": lambda: gradzip.attach(engine()),
        "hooked": lambda: gradzip.attach(hooked),
        "python reducer": lambda: gradzip.attach(compiled),
        "skips buckets": lambda: gradzip.attach(skipping),
        "optimizer": lambda: gradzip.attach(model, "adam"),  # type: ignore[arg-type]
        "other optimizer": lambda: gradzip.attach(model, stranger),
        "no optimizer": lambda: gradzip.attach(model, None, "gcomp"),
        "pattern": lambda: gradzip.attach(model, optimizer, Rules({"0.wieght": "topk", "*": "gcomp"})),
        "inner pattern": lambda: gradzip.attach(model, optimizer, Accordion(Rules({"9.*": "topk"}), "gcomp")),
        "policy": lambda: gradzip.attach(model, optimizer, 7),  # type: ignore[arg-type]
    }
    out: dict[str, Any] = {name: refusal(case) for name, case in cases.items()}
    out["hooks"] = len(model._comm_hooks)
    for r in (run, plain):
        r.train(0, 3)
    out["untouched"] = same(run.parameters(), plain.parameters())
    wrapped = Wrapper(Wrapper(optimizer))  # type: ignore[arg-type]
    run.handle = gradzip.attach(model, wrapped, Fixed("gcomp"), timeout=TIMEOUT)  # type: ignore[arg-type]
    run.train(3, 5)
    out["wrapped"] = sorted(run.handle.stats()["codecs"])
    return out


def other_checkpoints() -> dict[str, Any]:
    """States that do not fit are refused, and the run goes on as if nobody had tried."""
    states: dict[str, Any] = {}
    makers: dict[str, Any] = {
        "topk": lambda: Fixed("topk:ratio=0.1"),
        "accordion": lambda: Accordion(Fixed("topk:ratio=0.5"), Fixed("topk:ratio=0.1"), window=2),
    }
    for name, make in makers.items():
        run = start(make())
        assert run.handle is not None
        run.train(0, 3)
        states[name] = run.handle.state_dict()
    run, twin = start(makers["topk"]()), start(makers["topk"]())
    assert run.handle is not None
    for r in (run, twin):
        r.train(0, 2)
    other = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64)))
    handle = gradzip.attach(other, None, Fixed("topk:ratio=0.1"), timeout=TIMEOUT)
    lossless = start(Fixed("gcomp:mode=lossless")).handle
    learning = start(makers["accordion"]()).handle
    assert lossless is not None
    assert learning is not None
    current = run.handle
    out: dict[str, Any] = {
        "codec": refusal(lambda: lossless.load_state_dict(states["topk"])),
        "model": refusal(lambda: handle.load_state_dict(states["topk"])),
        "learns": refusal(lambda: current.load_state_dict(states["accordion"])),
        "does not learn": refusal(lambda: learning.load_state_dict(states["topk"])),
        "version": refusal(lambda: current.load_state_dict(states["topk"] | {"version": 99})),
    }
    for r in (run, twin):
        r.train(2, 4)
    out["untouched"] = same(run.parameters(), twin.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GradzipWarning)
        current.load_state_dict(states["topk"] | {"world_size": 3})
    out["world"] = [str(w.message) for w in caught]
    run.train(4, 5)
    out["options changed"] = _options_changed(states["topk"])
    return out


def _options_changed(state: dict[str, Any]) -> bool:
    """The same codec with another ratio goes on with its residuals."""
    run = start(Fixed("topk:ratio=0.3"))
    assert run.handle is not None
    run.handle.load_state_dict(state)
    run.train(3, 4)
    return run.handle.stats()["steps"] == 4


def words() -> dict[str, Any]:
    """What rank 0 says and what all count."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gradzip")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    report.EVERY = 3
    run = start(Rules({"0.*": "topk:ratio=0.1", "2.*": "topk:ratio=0.1,feedback=bf16", "4.*": "gcomp:mode=lossless"}))
    assert run.handle is not None
    run.train(0, 5)
    stats = run.handle.stats()
    count = len(lines)
    logger.setLevel(logging.WARNING)
    start("topk")
    return {"lines": lines, "silent": len(lines) == count, "stats": stats}


def epochs() -> dict[str, Any]:
    """A policy that counts epochs, of which the user tells it."""
    policy = Accordion(Fixed("topk:ratio=0.5"), Fixed("topk:ratio=0.1"), epochs=2, threshold=1e9)
    run = start(policy)
    assert run.handle is not None
    used = []
    for epoch in range(4):
        run.train(3 * epoch, 3 * epoch + 3)
        used.append(options(run)["0.weight"])
        run.handle.end_epoch()
    stats = run.handle.stats()
    start("topk").handle.end_epoch()  # type: ignore[union-attr]  # which does not care
    return {"used": used, "history": [entry["step"] for entry in stats["history"]], "memory": stats["memory"]}


def settings(rank: int, folder: str) -> dict[str, Any]:
    said = words()
    return {
        "words": said,
        "environment": environment(folder),
        "mistakes": mistakes(),
        "checkpoints": other_checkpoints(),
        "epochs": epochs(),
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, settings, str(tmp_path_factory.mktemp("plans")), deadline=200)


@pytest.mark.timeout(220)
def test_the_environment_has_the_last_word(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        said = found["environment"]
        assert said["off"], "GRADZIP=off is not plain DDP"
        assert said["off state"] == {"version": 0, "steps": 7}
        assert said["off stats"] == sorted(found["words"]["stats"])
        assert "did you mean 'off'" in said["of"] or "set it to off" in said["of"]
        assert said["policy"] == "cast"
        assert said["plan"] == "zlib"
        assert "Did you mean 'topk'" in said["tokp"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("bare", "needs a DistributedDataParallel model, not Linear: wrap it first"),
        ("bare compiled", "needs a DistributedDataParallel model, not Linear"),
        ("fsdp2", "What works today: FSDP2"),
        ("fsdp", "What works today: FSDP reduces"),
        ("deepspeed", "What works today: DeepSpeed"),
        ("hooked", "another hook, allreduce_hook"),
        ("python reducer", "optimize_ddp"),
        ("skips buckets", "find_unused_parameters=True takes care"),
        ("optimizer", "str is no torch.optim.Optimizer"),
        ("other optimizer", "none of the model's parameters"),
        ("no optimizer", "asks the optimizer which bits matter"),
        ("pattern", "without `module.`, did you mean '0.weight'"),
        ("inner pattern", "'9.*', and no parameter is called so"),
        ("policy", "is not a policy"),
    ],
)
def test_what_cannot_work_is_refused(seen: list[dict[str, Any]], case: str, words: str) -> None:
    for found in seen:
        assert words in found["mistakes"][case]
        assert found["mistakes"][case].startswith("Unsupported: ")


def test_a_refusal_leaves_the_model_as_it_was(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        assert found["mistakes"]["hooks"] == 0
        assert found["mistakes"]["untouched"]
        assert found["mistakes"]["wrapped"] == ["gcomp/alltoall"], "the optimizer inside was not found"


def test_a_checkpoint_of_something_else_is_refused(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        said = found["checkpoints"]
        assert "another codec: '0.weight' had topk and has gcomp now" in said["codec"]
        assert "another model" in said["model"]
        assert "a policy that learns" in said["learns"]
        assert "another policy" in said["does not learn"]
        assert "version 99" in said["version"]
        assert said["untouched"]
        assert len(said["world"]) == 1
        assert "3 ranks and is loaded by 2" in said["world"][0]
        assert said["options changed"]


def test_rank_0_says_a_line_at_attach_and_every_few_hundred_steps(seen: list[dict[str, Any]]) -> None:
    first, second = (found["words"] for found in seen)
    assert second["lines"] == []
    assert first["silent"]
    attached, later = first["lines"]
    assert attached.startswith("6 tensors, 24.1 KB of gradients in each step of 2 ranks: ")
    assert "; 3 x identity by allreduce; " in attached
    assert "1 x topk:ratio=0.1 by allgather (8.2x smaller); " in attached
    assert "Error feedback will hold 11.3 KB" in attached  # 20 * 64 * 4 + 64 * 48 * 2
    assert re.match(r"step 3: sent [\d.]+ KB per step instead of [\d.]+ KB \([\d.]+x\); ", later)
    assert later.endswith("holds 11.3 KB")


def test_stats_count_memory_and_codecs(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        stats = found["words"]["stats"]
        memory = {name: tensor["memory"] for name, tensor in stats["tensors"].items()}
        assert memory["0.weight"] == 4 * 64 * 20
        assert memory["2.weight"] == 2 * 64 * 48
        assert memory["4.weight"] == 0
        assert stats["memory"] == sum(memory.values())
        assert stats["tensors"]["2.weight"]["option"] == "topk:ratio=0.1,feedback=bf16"
        assert set(stats["codecs"]) == {
            *("identity/allreduce", "topk:ratio=0.1/allgather"),
            *("topk:ratio=0.1,feedback=bf16/allgather", "gcomp:mode=lossless/alltoall"),
        }
        assert sum(codec["bytes_sent"] for codec in stats["codecs"].values()) == stats["bytes_sent"]
        assert stats["exposed_seconds"] > 0


def test_epochs_are_told_by_the_user(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        told = found["epochs"]
        assert told["used"] == ["topk:ratio=0.5"] * 3 + ["topk:ratio=0.1"], "the second measured epoch settles it"
        assert told["history"] == [3, 9]
        assert told["memory"] > 0

"""Models on CPUs go by the host runner and its threads alone, whatever is attached to them."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from scripts import run_scripts

POLICIES = {
    "near": "gcomp",
    "rounded": "gcomp:keep=7",
    "noise": "noise",
    "low rank": "powersgd:rank=1",
    "sparse": "topk:ratio=0.1",
    "averaged frames": "randomk:ratio=0.2",
    "plain": "identity",
    "shared book": "gcomp:mode=lossless,book=shared,refresh=3",
    "learns": "accordion",
    "several": "rules",
}
STEPS = 4
RUNNER = [f"gradzip-exchange-{number}" for number in range(3)]


def rank_main() -> None:
    import torch.distributed as dist
    from training import start

    from gradzip import Accordion, Fixed, Rules
    from gradzip.policy import Policy

    special: dict[str, Policy] = {
        "accordion": Accordion("topk:ratio=0.5", "topk:ratio=0.1", window=2),
        "rules": Rules({"0.weight": "powersgd:rank=1", "2.weight": "noise", "*": "gcomp"}, small=True),
    }
    dist.init_process_group("gloo")
    for name, text in POLICIES.items():
        run = start(special.get(text) or Fixed(text))
        assert run.handle is not None
        run.train(0, STEPS)
        stats = run.handle.stats()
        run.handle.load_state_dict(run.handle.state_dict())
        run.handle.set_policy(Fixed("cast"))
        run.train(STEPS, STEPS + 2)
        threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("gradzip-"))
        loaded = [module for module in sys.modules if module.startswith("gradzip.exchange.on_host.gcomp_from_device")]
        print(name, stats["steps"], stats["runner"], loaded, *threads, sep="; ")
        run.handle.detach()
    dist.destroy_process_group()


@pytest.mark.parametrize("check", ["0", "1"])
def test_models_on_cpus_load_nothing_for_gpus(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADZIP_CHECK", check)
    threads = [*RUNNER, "gradzip-heart", "gradzip-rows", "gradzip-watch"]
    for rank in run_scripts(2, Path(__file__)):
        assert rank.code == 0, rank.err
        found = [line.split("; ") for line in rank.out.splitlines()]
        by_torch = {"plain"} if check == "0" else set()  # else the means are looked at
        runner = {name: "torch" if name in by_torch else "host" for name in POLICIES}
        assert found == [[name, str(STEPS), runner[name], "[]", *threads] for name in POLICIES]


if __name__ == "__main__":
    rank_main()

"""A rank that is stopped for longer than the heartbeat and then goes on: who is blamed, and how all ranks end.

No rank ends by os._exit here: what a thread does while Python shuts down is part of it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from ranks import DEADLINE
from scripts import start_scripts

WORLD, HEARTBEAT, STOPPED = 3, 3, 8  # seconds
CODE = 7


def rank_main() -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import gradzip

    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(256, 256))
    handle = gradzip.attach(model, None, "gcomp:mode=lossless", heartbeat=timedelta(seconds=HEARTBEAT))
    for _ in range(3):
        model(torch.randn(8, 256)).sum().backward()
    print("ready", flush=True)
    try:
        while True:
            model(torch.randn(8, 256)).sum().backward()
    except RuntimeError:
        print(handle.error, flush=True)
        sys.exit(CODE)


@pytest.mark.parametrize("victim", [0, 2])  # the rank that has the store, and one that has not
def test_all_ranks_end_with_their_exit_code_and_the_right_cause(victim: int) -> None:
    ranks = start_scripts(WORLD, Path(__file__))
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        os.kill(ranks[victim].pid, signal.SIGSTOP)
        time.sleep(STOPPED)
        os.kill(ranks[victim].pid, signal.SIGCONT)
        said = [rank.communicate(timeout=DEADLINE) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, (rank, (out, err)) in enumerate(zip(ranks, said)):
        assert rank.returncode == CODE, f"rank {number}: {err[-2000:]}"
        assert "terminate called" not in err
        if victim == 0 and number != victim:
            assert "has not reached the store on rank 0 for 3 s" in out
        else:
            known = f"rank {victim} stood still" in out or f"rank {victim} has shown no sign of life" in out
            assert known, f"rank {number} says {out}"


if __name__ == "__main__":
    rank_main()

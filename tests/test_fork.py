"""A process forked from a rank may end in any way: the connections are the parent's, and training goes on."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from scripts import run_scripts

from gradzip.exchange import plain
from gradzip.planner import measure

WAYS_TO_END = ("sys.exit", "exception")
CHILD_MAY_TAKE = 4.0  # seconds; with plain DDP over Gloo a child waits for ever in torch's own clean-up


def rank_main(way: str) -> None:
    import torch.distributed as dist
    from training import start

    dist.init_process_group("gloo")
    run = start("topk:ratio=0.1")
    run.train(0, 3)
    child = os.fork()
    if child == 0:
        if way == "sys.exit":
            sys.exit(3)
        raise ValueError("the child fails")
    time.sleep(CHILD_MAY_TAKE)
    run.train(3, 6)
    os.kill(child, signal.SIGKILL)
    assert run.handle is not None
    assert run.handle.error is None
    print(f"{run.handle.stats()['steps']} steps")
    run.handle.detach()
    dist.destroy_process_group()


@pytest.mark.parametrize("way", WAYS_TO_END)
def test_training_goes_on_after_a_forked_child_ends(way: str) -> None:
    for rank in run_scripts(2, Path(__file__), way):
        assert (rank.code, rank.out.strip()) == (0, "6 steps"), rank.err


def connections_main() -> None:
    """gradzip's connections alone, as torch's own would hold up the child."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from gradzip.exchange.peers import channel
    from gradzip.exchange.peers.gloo import Gloo

    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0)
    gloo = Gloo(store, rank, 2, timedelta(seconds=60))
    owner = channel.Channel.__new__(channel.Channel)
    owner.gloo = gloo
    channel._open.add(owner)
    child = os.fork()
    if child == 0:
        sys.exit(3)
    _, status = os.waitpid(child, 0)
    row = torch.tensor([rank])
    rows = gloo.send_row(row, [1 - rank], [1 - rank], 1)
    rows.wait()
    channel._open.discard(owner)
    print(f"child {os.waitstatus_to_exitcode(status)}, received {rows.received[1 - rank].item()}", flush=True)
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < 2:
        time.sleep(0.01)


def test_forked_child_ends_with_its_own_exit_code() -> None:
    for number, rank in enumerate(run_scripts(2, Path(__file__), "connections")):
        assert (rank.code, rank.out.strip()) == (0, f"child 3, received {1 - number}"), rank.err


def test_profile_is_left_to_the_parent() -> None:
    session = measure._Session(measure.Settings(out="unused.json"))
    session.stopped = True  # the parent ends here with code 0
    child = os.fork()
    if child == 0:
        session.at_exit()
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_forked_child_waits_for_no_exchange_of_the_parent() -> None:
    plain._count(1)
    try:
        with plain._changed:
            child = os.fork()
            if child == 0:
                signal.alarm(3)  # ends a child that waits
                plain._wait_for_the_end()
                os._exit(3)
    finally:
        plain._count(-1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


if __name__ == "__main__":
    connections_main() if sys.argv[1] == "connections" else rank_main(sys.argv[1])

"""A process that ends right after a step on streams: nobody will ask what became of that step."""

from __future__ import annotations

import sys
from pathlib import Path

import emulated
import pytest
from scripts import run_scripts

kept: list[object] = []  # a script's model lives until the process ends


def rank_main(how: str) -> None:
    import streams
    import torch.distributed as dist
    from test_attach_noise import Task

    from gradzip.exchange.on_stream import runner as on_stream

    dist.init_process_group("gloo")
    streams.install()
    task, exchange = Task(bucket_mb=25), on_stream.all_to_all
    kept.append(task)
    task.train(0, 4)

    def damage(out, sent, group):  # type: ignore[no-untyped-def]
        sent.view(2, -1)[0, 26] ^= 0xFF  # in the head of the frame for rank 0
        return exchange(out, sent, group)

    if how == "damaged" and dist.get_rank() == 1:
        on_stream.all_to_all = damage
    task.step(4)
    dist.barrier()


@pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("how", ["damaged", "sound"])
def test_a_bad_last_step_is_told_when_the_process_ends(how: str) -> None:
    first, second = run_scripts(2, Path(__file__), how)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert ("at step 4 rank 1 sent a frame of '" in first.err) == (how == "damaged")
    assert second.err.count("at step 4") == 0, "one rank says it for all"


if __name__ == "__main__":
    rank_main(sys.argv[1])

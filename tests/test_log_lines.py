"""The lines that rank 0 logs at attach, after ten steps and at the end."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from scripts import run_scripts

STEPS = 12
LATER = r"step {}: sent [\d.]+ K?B per step instead of [\d.]+ KB \([\d.]+x\); .*"


def rank_main(how: str) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import gradzip

    dist.init_process_group("gloo")
    net = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 30), nn.Linear(30, 40))
    net[0].requires_grad_(False)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net[1].parameters(), lr=0.0 if how == "warm-up" else 0.1)
    handle = gradzip.attach(model, optimizer)
    for _ in range(STEPS):
        model(torch.ones(2, 40)).sum().backward()
    if how == "detach":
        handle.detach()
    elif how == "exception":
        dist.barrier()
        raise ValueError("the script fails")
    if how != "no destroy":
        dist.destroy_process_group()


@pytest.mark.parametrize("how", ["detach", "exit", "no destroy", "exception", "warm-up"])
def test_rank_0_logs_at_attach_after_ten_steps_and_at_the_end(how: str) -> None:
    first, second = run_scripts(2, Path(__file__), how)
    assert first.code == second.code == (1 if how == "exception" else 0), first.err
    assert not re.search("^gradzip: ", second.err, re.MULTILINE)
    attached, unheld, tenth, last = re.findall("^gradzip: (.*)", first.err, re.MULTILINE)
    assert attached.startswith("4 tensors, 9.9 KB of gradients in each step of 2 ranks: "), "frozen ones do not count"
    assert ". 2 frozen parameters have no gradients" in attached
    assert unheld.startswith("no optimizer that attach was given holds '2.weight': ")
    zero = ". 1 tensor goes lossless for now, as the learning rate is 0: near mode begins when it is not"
    assert (zero in attached) == (how == "warm-up")
    assert re.fullmatch(LATER.format(10), tenth)
    assert re.fullmatch("ended: " + LATER.format(STEPS), last)


if __name__ == "__main__":
    rank_main(sys.argv[1])

"""What PowerSGD costs the host in a step, without a GPU: kernels whose launches do nothing, and everything around them.

    torchrun --nproc-per-node 1 bench/host_cost.py

GPT-2's 148 tensors, narrow, in as many buckets as DDP makes of the real ones; one rank that codes as among others. CPU
time of each piece in microseconds a step, which other work on the machine changes little (lower quartiles; the clock
itself takes about 2 of them per call of a hook): the first hook, those between, the last one; the coding thread until
all is launched, in all, and at the end of the job. Not in it: what CUDA's own calls take.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import struct
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from steps import Gpt2
from torch.nn.parallel import DistributedDataParallel

import gradzip
from gradzip.collectives import pipeline
from gradzip.collectives.backward import PipelineBackward
from gradzip.engines.cuda import launch, pack_select

_FLAWED_AT = 10 * 8  # the address in kernels' arguments where they say that a mean is not finite


class Idle:
    """A device whose kernels do nothing but say that all means are finite."""

    def bind(
        self, kernel: str, arguments: ctypes.Array[ctypes.c_char], groups: int, threads: int, stream: int
    ) -> Callable[[], None]:
        if kernel.startswith("lowrank_starts"):
            return lambda: ctypes.memset(struct.unpack_from("<Q", arguments, _FLAWED_AT)[0], 0, 4) and None
        return lambda: None

    def load(self, kernel: str, threads: int, shared: int, least: int = 1) -> int:
        return 2

    def fits(self, shared: int) -> bool:
        return True

    def warps(self, shared: int) -> int:
        return 2

    def stream(self) -> int:
        return 0

    def wait(self, stream: int) -> None:
        pass


_spent: dict[str, float] = defaultdict(float)
_began = 0.0  # when the coding thread began with a job, on its own clock


def count(owner: Any, name: str, what: Callable[..., str]) -> None:
    """Adds up the CPU time that a function takes on its thread."""
    inner = getattr(owner, name)

    def counted(*args: Any) -> Any:
        global _began
        begin = time.thread_time()
        if name == "_advance":
            _began = begin
        try:
            return inner(*args)
        finally:
            _spent[what(*args)] += time.thread_time() - begin

    setattr(owner, name, counted)


def count_all() -> None:
    count(gradzip.Handle, "reduce", lambda _, b: "last" if b.is_last() else "between" if b.index() else "first")
    count(pipeline.Pipeline, "_advance", lambda *_: "coding")
    count(pipeline.Pipeline, "_finish", lambda *_: "end")
    inner = PipelineBackward._means_follow

    def follow(self: PipelineBackward) -> None:
        _spent["launched"] += time.thread_time() - _began
        inner(self)

    PipelineBackward._means_follow = follow  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="powersgd:rank=4")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    os.environ["GRADZIP_ALONE"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    launch.emulator = Idle()
    pack_select.serves = lambda tensor: tensor.is_contiguous()  # type: ignore[assignment]
    count_all()
    torch.manual_seed(0)
    model = DistributedDataParallel(Gpt2(width=48, blocks=12, heads=4, vocabulary=100, length=16), bucket_cap_mb=0.12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    handle = gradzip.attach(model, optimizer, options.policy)
    x = torch.randint(0, 100, (1, 16))
    steps = []
    for _ in range(options.steps + 15):
        loss = model(x)
        optimizer.zero_grad()
        _spent.clear()
        loss.backward()
        handle._channel.drain()
        steps.append(dict(_spent))
        optimizer.step()
    names = ("first", "between", "last", "launched", "coding", "end")
    if any(set(step) != set(names) for step in steps[15:]):
        raise SystemExit("kernels were not launched: this is not what a GPU would do")
    row = {name: 1e6 * statistics.quantiles([step[name] for step in steps[15:]], n=4)[0] for name in names}
    row["in_all"] = row["first"] + row["between"] + row["last"] + row["coding"] + row["end"]
    print("  ".join(f"{name}={value:.0f}" for name, value in row.items()))
    handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

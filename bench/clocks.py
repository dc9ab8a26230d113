"""Where the time of a step goes after its last bucket: moments on every thread, and kernels of the GPU.

    torchrun --nproc-per-node 1 bench/clocks.py --model gpt2 --policy powersgd:rank=4
    torchrun --nproc-per-node 1 bench/clocks.py --model small --policy powersgd:rank=4            (a CPU, Gloo)

One rank that codes as it would among others (GRADZIP_ALONE=1). Of the step with the median time between the last bucket
and the end of backward: a line for each moment, in milliseconds since the last bucket came. What is listed after the
end of backward takes Python's lock from the user's next lines. Then, of a step under torch.profiler, which is slower:
what ran on the GPU since the message's first stage began.
"""

from __future__ import annotations

import argparse
import functools
import os
import threading
import time
from collections import defaultdict
from typing import Any

import hook_cost
import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import gradzip
from gradzip.codecs import lowrank
from gradzip.collectives import message, pipeline
from gradzip.collectives.backward import PipelineBackward
from gradzip.engines.cuda import factors

Moment = tuple[float, str, str]  # when, on which thread, what
_moments: list[Moment] = []


def note(what: str) -> None:
    _moments.append((time.perf_counter(), threading.current_thread().name, what))


def watch(owner: Any, name: str, what: str, detail: Any = lambda *_: "") -> None:
    """Notes when a function begins and ends."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def noted(*args: Any, **options: Any) -> Any:
        words = f"{what} {detail(*args)}".rstrip()
        note(f"{words} ...")
        try:
            return inner(*args, **options)
        finally:
            note(words)

    setattr(owner, name, noted)


def watch_all() -> None:
    watch(gradzip.Handle, "reduce", "hook", lambda _, bucket: "of the last bucket" if bucket.is_last() else "")
    watch(pipeline.Pipeline, "_advance", "stage", lambda _, stage, job, *__: f"{stage} of {job.agreement.what[:16]}")
    watch(pipeline.Pipeline, "_finish", "end", lambda _, job, __: f"of {job.agreement.what[:16]}")
    watch(pipeline.Pipeline, "exchange", "exchange")
    for owner in (lowrank.PowerSGD, lowrank.Fused):
        watch(owner, "reduce", "powersgd")
    watch(PipelineBackward, "_means_follow", "means follow")
    watch(factors._Bound, "launch", "kernels", lambda _, first, end: f"{first} to {end - 1}")
    watch(lowrank.PowerSGD, "_starts", "starts")
    watch(lowrank, "_orthonormal", "orthonormal")
    watch(message, "all_finite", "look for NaN")


def since_last_bucket(began: float, ended: float) -> tuple[float, list[Moment]]:
    """How long a step took after its last bucket had come, and what happened then."""
    start = next(when for when, _, what in _moments if what == "hook of the last bucket ...")
    seen = [(when - start, thread, what) for when, thread, what in _moments if when >= start]
    hooks = [when for when, _, what in _moments if what.startswith("hook")]
    spent = sum(b - a for a, b in zip(hooks[::2], hooks[1::2]))
    words = (
        f"end of backward, begun {1e3 * (start - began):.1f} before; {len(hooks) // 2} hooks, {1e3 * spent:.2f} in all"
    )
    seen.append((ended - start, "", words))
    return ended - start, sorted(seen)


def kernels(run: hook_cost.Run, x: torch.Tensor, device: torch.device, policy: str) -> None:
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], experimental_config=config) as seen:
        run.step(x, device)
    events = seen.events() or []
    begun = min(e.time_range.start for e in events if e.name.startswith(f"gradzip: code {policy}"))
    totals: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.device_type == DeviceType.CUDA and event.time_range.start >= begun:
            totals[event.name[:80]].append(event.time_range.end - event.time_range.start)
    print(f"GPU: {sum(map(sum, totals.values())) / 1e3:.2f} ms in {sum(map(len, totals.values()))} kernels and copies")
    for name, times in sorted(totals.items(), key=lambda item: -sum(item[1]))[:25]:
        print(f"{sum(times):10.1f} us {len(times):4} x {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt2", "small"), default="small")
    parser.add_argument("--policy", default="powersgd:rank=4")
    parser.add_argument("--batch", type=int, default=4, help="of gpt2")
    parser.add_argument("--length", type=int, help="words in a sequence of gpt2; 256 if not given")
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    os.environ["GRADZIP_ALONE"] = "1"
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    watch_all()
    run = hook_cost.start(options.policy, argparse.Namespace(model=options.model, fused=False), device)
    model = run.model.module
    shape = options.batch if cuda else 1, options.length or model.length
    x = torch.randint(0, model.vocabulary, shape).to(device)
    assert run.handle is not None
    steps = []
    for number in range(options.steps + 5):
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            loss = run.model(x)
        run.optimizer.zero_grad()
        hook_cost._now(device)
        _moments.clear()
        began = time.perf_counter()
        loss.backward()
        ended = hook_cost._now(device)
        run.handle._channel.drain()
        if number >= 5:
            steps.append(since_last_bucket(began, ended))
        run.optimizer.step()
    steps.sort(key=lambda step: step[0])
    for when, thread, what in steps[len(steps) // 2][1]:
        print(f"{1e3 * when:8.3f}  {thread:18} {what}")
    if cuda:
        kernels(run, x, device, options.policy)
    run.handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

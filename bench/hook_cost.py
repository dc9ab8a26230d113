"""What attach costs a step by itself: backward of one rank, plain and under policies, and the hook's own share of it.

    torchrun --nproc-per-node 1 bench/hook_cost.py --model gpt2 --csv hook_cost.csv            (a GPU, NCCL)
    torchrun --nproc-per-node 1 bench/hook_cost.py --model small --csv hook_cost.csv           (a CPU, Gloo)

One rank sends nothing, so that what is left is the work around the exchange. With --alone it codes all the same
(GRADZIP_ALONE=1), as it would among others, and only the wire is missing. Policies take turns, round after round, so
that whatever else the machine does meets all of them; a row has the median over all its steps, in milliseconds. The
gradients of a step must be those of plain DDP, bit for bit, where nothing is coded; with --alone they must be finite.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from steps import Gpt2
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import gradzip

POLICIES = "identity;gcomp;gcomp:mode=lossless;powersgd:rank=4"


@dataclass
class Run:
    """A model under one policy, and what its steps took."""

    what: str
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    handle: gradzip.Handle | None
    times: dict[str, list[float]] = field(default_factory=lambda: {"forward": [], "backward": [], "optimizer": []})
    hook: list[float] = field(default_factory=list)

    def step(self, x: torch.Tensor, device: torch.device) -> None:
        hook_before = _hook_seconds
        moments = [_now(device)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = self.model(x)
        self.optimizer.zero_grad()
        moments.append(_now(device))
        loss.backward()
        moments.append(_now(device))
        self.optimizer.step()
        moments.append(_now(device))
        for name, begin, end in zip(self.times, moments, moments[1:]):
            self.times[name].append(end - begin)
        self.hook.append(_hook_seconds - hook_before)

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


_hook_seconds = 0.0


def time_the_hook() -> None:
    """Adds up what passes inside of the handle while backward waits for it."""
    inner = gradzip.Handle.reduce

    def timed(handle: gradzip.Handle, bucket: dist.GradBucket) -> object:
        global _hook_seconds
        begin = time.perf_counter()
        try:
            return inner(handle, bucket)
        finally:
            _hook_seconds += time.perf_counter() - begin

    gradzip.Handle.reduce = timed  # type: ignore[assignment, method-assign]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def start(what: str, options: argparse.Namespace, device: torch.device) -> Run:
    torch.manual_seed(0)
    small = {"width": 48, "blocks": 12, "heads": 4, "vocabulary": 100, "length": 16}
    inner = Gpt2(**(small if options.model == "small" else {})).to(device)
    ids = [device.index] if device.type == "cuda" else None
    model = DistributedDataParallel(inner, device_ids=ids, bucket_cap_mb=0.02 if options.model == "small" else 25)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=options.fused or None)
    handle = None if what == "plain" else gradzip.attach(model, optimizer, what)
    return Run(what, model, optimizer, handle)


def operations(run: Run, x: torch.Tensor, device: torch.device) -> tuple[int, int]:
    """torch operations and kernels of a step, on all threads."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=kinds, experimental_config=config) as seen:
        run.step(x, device)
    events = seen.events() or []
    names = [event.name for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    kernels = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in events)
    return sum(name.startswith("aten::") for name in names), kernels


def verify(run: Run, plain: Run, alone: bool) -> str:
    """Of the first step, in which all start from the same parameters."""
    ours, theirs = run.gradients(), plain.gradients()
    if not alone:
        same = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    else:
        same = all(bool(a.isfinite().all()) for a in ours) and len(ours) == len(theirs)
    if not same:
        raise SystemExit(f"{run.what}: the gradients are not what they should be")
    return "same bits" if not alone else "finite"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt2", "small"), default="small", help="small: 148 tensors, little work")
    parser.add_argument("--policies", default=POLICIES, help="separated by ;")
    parser.add_argument("--alone", action="store_true", help="code although there is nobody to send to")
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True), which counts its steps on the device")
    parser.add_argument("--batch", type=int, default=4, help="sequences of gpt2; few of them wait for the host")
    parser.add_argument("--length", type=int, help="words in a sequence of gpt2, up to 1024; 256 if not given")
    parser.add_argument("--steps", type=int, default=10, help="in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    if options.alone:
        os.environ["GRADZIP_ALONE"] = "1"
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    if dist.get_world_size() != 1:
        raise SystemExit("one rank alone: torchrun --nproc-per-node 1")
    time_the_hook()
    runs = [start(what, options, device) for what in ["plain", *options.policies.split(";")]]
    model = runs[0].model.module
    assert isinstance(model, Gpt2)
    batch = options.batch if cuda else 1
    length = options.length or model.length
    x = torch.randint(0, model.vocabulary, (batch, length)).to(device)
    proofs = []
    for run in runs:
        run.step(x, device)
        proofs.append("" if run is runs[0] else verify(run, runs[0], options.alone))
    for number in range(options.rounds + 1):
        for run in runs:
            gc.collect()
            for _ in range(options.steps if number else options.warm):
                run.step(x, device)
            if not number:
                run.times, run.hook = {name: [] for name in run.times}, []
    middle = {run.what: {name: 1e3 * statistics.median(times) for name, times in run.times.items()} for run in runs}
    hooks = {run.what: 1e3 * statistics.median(run.hook) for run in runs}
    for run, proof in zip(runs, proofs, strict=True):
        found, kernels = operations(run, x, device)
        row = {
            "model": options.model, "policy": run.what, "alone": int(options.alone), "fused": int(options.fused),
            **{f"{name}_ms": round(value, 3) for name, value in middle[run.what].items()},
            "added_ms": round(sum(middle[run.what].values()) - sum(middle["plain"].values()), 3),
            "hook_ms": round(hooks[run.what], 3), "operations": found, "kernels": kernels,
            "verified": proof, "device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__,
            "batch": batch, "length": length,
        }  # fmt: skip
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        if options.csv:
            new = not options.csv.exists()
            with options.csv.open("a", newline="") as file:
                writer = csv.DictWriter(file, list(row))
                if new:
                    writer.writeheader()
                writer.writerow(row)
    for run in runs:
        if run.handle is not None:
            run.handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

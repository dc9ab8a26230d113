"""Trains a task by real ranks under DDP, once for each policy: step times, and loss and accuracy over wall time.

    gradzip emulate --gpu-share --hosts 4 --rate 10gbit -- python real_ranks.py --task gcomp-cifar \\
        --policies 'plain;torch bf16;gcomp' --epochs 3 --network '10 Gbit/s' --data DATA --csv gcomp/times.csv

Rank r takes worker r's batches of the task (workers/tasks.py). The clock starts after the first step, and evaluation
stops it. A policy is `plain` (DDP by itself), one of torch's own hooks (`torch bf16`, `torch powersgd 4`), `plan NAME`
(NAME.json of --plans), `auto`, or a policy of gradzip's. Rows that the file has already (task, network, policy) are not
run again. All replicas must have the same parameters in the end, or the row says how many differ.

Where the network is so slow that processors and GPU idle, several clusters may run side by side: with `--clusters 4` 16
ranks are four clusters of 4, which take the policies in turn and share nothing but the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradzip

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from series import append, read  # noqa: E402
from workers.running import policy_of  # noqa: E402
from workers.tasks import TASKS, Task  # noqa: E402
from workers.training import set_rate  # noqa: E402

FIELDS = (
    *("task", "network", "policy", "ranks", "steps", "seconds", "median_ms", "least_ms", "ratio", "beside"),
    *("metric", "value", "loss", "replicas_differing", "device", "limit", "evaluations", "losses"),
)
WARM = 5  # steps that do not count for the median


class Clock:
    """Seconds of training, as slow as the slowest rank: it runs between barriers."""

    def __init__(self, device: torch.device, group: Any) -> None:
        self._device, self._group, self.seconds, self._began = device, group, 0.0, 0.0

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier(group=self._group)

    def start(self) -> None:
        self._wait()
        self._began = time.perf_counter()

    def now(self) -> float:
        return self.seconds + time.perf_counter() - self._began

    def stop(self) -> None:
        self._wait()
        self.seconds = self.now()


def attach(what: str, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, plans: Path) -> Any:
    if what == "plain":
        return None
    if what == "torch bf16":

        def bf16(state, bucket):  # DDP reads annotations, and does not know postponed ones
            return default_hooks.bf16_compress_hook(state, bucket)

        model.register_comm_hook(None, bf16)
        return None
    if what.startswith("torch powersgd"):
        rank = int(what.rpartition(" ")[2])
        state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=2, min_compression_rate=0.5)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return None
    if what.startswith("plan "):
        return gradzip.attach(model, optimizer, gradzip.Plan.load(plans / f"{what.removeprefix('plan ')}.json"))
    return gradzip.attach(model, optimizer, "auto:save=" if what == "auto" else policy_of(what))


def train(what: str, options: argparse.Namespace, device: torch.device, group: Any) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    changes = {"workers": world} | ({"epochs": options.epochs} if options.epochs else {})
    base = TASKS[options.task]
    task: Task = type(base.__name__, (base,), changes)(options.data, device, options.seed, options.limit)
    torch.manual_seed(1000 * options.seed + rank)
    model = DistributedDataParallel(task.model, device_ids=[device.index] if device.type == "cuda" else None)
    task.model = model  # type: ignore[assignment]  # so that its loss goes through DDP
    handle = attach(what, model, task.optimizer, options.plans)
    total = round(task.epochs * task.steps)
    every = max(1, options.evaluate_every)
    clock, times, losses = Clock(device, group), list[float](), list[tuple[float, torch.Tensor]]()
    evaluations, step, going = list[tuple[float, float]](), 0, True
    while going and step < total:
        if step < 2:  # the first step, in which kernels are compiled and libraries find their ways, does not count
            clock.seconds = 0.0
            clock.start()
        began = time.perf_counter()
        set_rate(task.optimizer, task.rate(step / task.steps))
        batch = list(task.batches(step // task.steps, step % task.steps))[rank]
        loss = task.loss(*batch)
        task.optimizer.zero_grad()
        loss.backward()
        task.before_step()
        task.optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        losses.append((clock.now() if step else 0.0, loss.detach()))
        step += 1
        if step > 1 and step % options.check == 0:  # rank 0's clock decides
            flag = torch.tensor([float(clock.now() < options.seconds)])
            dist.broadcast(flag, 0, group=group)
            going = bool(flag)
        if step % every == 0 or not going or step == total:
            clock.stop()
            evaluations.append((clock.seconds, _evaluate(task, model, rank)))
            clock.start()
    mean = torch.stack([loss for _, loss in losses]).float().cpu()
    dist.all_reduce(mean, group=group)
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    milliseconds = [1e3 * t for t in slowest.tolist()[WARM if step > 2 * WARM else min(1, step - 1) :]]
    row = {
        "task": options.task, "network": options.network, "policy": what, "ranks": world, "steps": step,
        "seconds": round(clock.seconds, 2), "median_ms": round(statistics.median(milliseconds), 2),
        "least_ms": round(min(milliseconds), 2),
        "ratio": round(float(handle.stats()["ratio"]), 3) if handle is not None else "", "beside": options.clusters - 1,
        "metric": task.metric, "value": round(evaluations[-1][1], 4),
        "loss": round(float(mean[-10:].mean()) / world, 5), "replicas_differing": _differing(model, group),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "limit": options.limit or "",
        "evaluations": " ".join(f"{at:.2f}:{figure:.5g}" for at, figure in evaluations),
        "losses": _curve([at for at, _ in losses], (mean / world).tolist()),
    }  # fmt: skip
    if handle is not None:
        handle.detach()
    return row


def _evaluate(task: Task, model: DistributedDataParallel, rank: int) -> float:
    """Rank 0's; the others wait."""
    figure = torch.zeros(1, dtype=torch.float64)
    if rank == 0:
        task.model = model.module
        figure[0] = task.evaluate()
        task.model = model  # type: ignore[assignment]
    return float(figure)


def _curve(times: list[float], losses: list[float]) -> str:
    """At most 60 points of second:loss, each the mean of what lies between."""
    size = -(-len(losses) // 60)
    parts = [slice(i, i + size) for i in range(0, len(losses), size)]
    return " ".join(f"{times[part][-1]:.2f}:{statistics.fmean(losses[part]):.5g}" for part in parts)


def _differing(model: DistributedDataParallel, group: Any) -> int:
    bits = torch.stack([p.detach().view(torch.int32).to(torch.int64).sum() for p in model.parameters()]).cpu()
    gathered = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, bits, group=group)
    return sum(bool((other != gathered[0]).any()) for other in gathered)


@contextlib.contextmanager
def joined(backend: str, clusters: int) -> Iterator[int]:
    """In the process group of this rank's cluster; which of the clusters that is."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    size = world // clusters
    if size * clusters != world:
        raise SystemExit(f"{world} ranks cannot be {clusters} clusters of the same size")
    cluster, own = divmod(rank, size)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=rank == 0)
    dist.init_process_group(backend, store=dist.PrefixStore(f"cluster {cluster}", store), rank=own, world_size=size)
    yield cluster
    dist.destroy_process_group()
    store.set(f"rank {rank} is done", "")
    if rank == 0:  # the others still need what it stores
        store.wait([f"rank {other} is done" for other in range(world)], timedelta(hours=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), required=True)
    parser.add_argument("--policies", required=True, help="separated by ;")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--network", default="", help="what to call the network in the file")
    parser.add_argument("--seconds", type=float, default=1e6, help="of training, for each policy")
    parser.add_argument("--epochs", type=float, help="instead of the task's own; the schedule is stretched to it")
    parser.add_argument("--evaluate-every", type=int, default=10**9, metavar="STEPS", help="besides the end")
    parser.add_argument("--check", type=int, default=5, metavar="STEPS", help="look at the clock every so many steps")
    parser.add_argument("--clusters", type=int, default=1, metavar="N", help="side by side, each with 1/N of the ranks")
    parser.add_argument("--plans", type=Path, default=Path(), metavar="FOLDER", help="where the plans are")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="a tiny form of the task, to try it out")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    with joined("nccl" if cuda else "gloo", options.clusters) as cluster:
        group = dist.new_group(backend="gloo")
        done = [[(row["task"], row["network"], row["policy"]) for row in read(options.csv)]]
        dist.broadcast_object_list(done, 0, group=group)
        for what in [policy for policy in options.policies.split(";") if policy][cluster :: options.clusters]:
            if (options.task, options.network, what) in done[0]:
                continue
            row = train(what, options, device, group)
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()  # the others may need it
            if dist.get_rank() == 0:
                append(options.csv, [row], FIELDS)
                print("  ".join(f"{key}={row[key]}" for key in FIELDS[:-2]), flush=True)


if __name__ == "__main__":
    main()

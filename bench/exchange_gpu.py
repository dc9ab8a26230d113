"""Steps of DDP training on a GPU, beside torch's own hook: one launch for each model.

    gradzip emulate --gpu-share --no-measure --hosts 4 --rate 10gbit -- python bench/exchange_gpu.py --model resnet18 \
        --csv bench/results/exchange_gpu.csv

Every row trains the same model under BF16 autocast: medians over the steps, each as long as on the slowest rank.
host_ms is the time that all hooks of a step take on the host, cpu_ms the processor time of all threads of a step beyond
that of one without exchange. `bound` is the step over what it takes without exchange plus the bytes sent at the goodput
of torch's all-reduce of float32 values in the same run. The column `runner` says what carried the gradients: streams
where frames have a known size, else the host runner.

    ... bench/exchange_gpu.py --model resnet50 --policies "gcomp:keep=7;sign;topk:ratio=0.01"
    ... bench/exchange_gpu.py --model resnet50 --row-major --policies powersgd:rank=4
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import gradzip

sys.path.insert(0, str(Path(__file__).parent))
from steps import Gpt2

NO_SYNC, BF16 = "no_sync", "torch bf16"
DEFAULT_MB = 25.0  # DDP's own
COLUMNS = (
    *("model", "what", "runner", "ranks", "ms", "least_ms", "of_bf16_hook", "host_ms", "mb_sent", "bits", "share"),
    *("coarser", "goodput_gbit", "bound", "replicas_differing", "loss", "device"),
    *("cpu_ms", "bucket_mb", "hosts", "layout"),
)


def made(
    model: str, device: torch.device, layout: torch.memory_format
) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """A model, and its loss on a batch that each rank draws for itself."""
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(1 + dist.get_rank())
    if model == "gpt2":
        tokens = torch.randint(0, 50257, (8, 256), generator=rng).to(device)
        return Gpt2().to(device), lambda net: net(tokens)
    images = torch.randn(16, 3, 128, 128, generator=rng).to(device, memory_format=layout)
    labels = torch.randint(0, 1000, (16,), generator=rng).to(device)
    net = getattr(torchvision.models, model)().to(device, memory_format=layout)
    return net, lambda net: nn.functional.cross_entropy(net(images), labels)


def medians(run: Callable[[], Any], warm: int, steps: int, each: Callable[[bool], None] = lambda counts: None) -> Any:
    """Milliseconds of each step on the slowest rank; `each` is called after a step, and told whether it counts."""
    times = []
    for number in range(warm + steps):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        each(number >= warm)
    slowest = torch.tensor(times[warm:], dtype=torch.float64, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [1e3 * t for t in slowest.tolist()]


def goodput() -> float:
    """Of a 25 MiB all-reduce, in bytes a millisecond that each rank sends."""
    x, world = torch.randn(25 << 18, device="cuda"), dist.get_world_size()
    return 2 * (world - 1) / world * x.nbytes / statistics.median(medians(lambda: dist.all_reduce(x), 3, 8))


def measure(
    name: str, what: str, device: torch.device, warm: int, steps: int, layout: torch.memory_format, bucket_mb: float
) -> dict[str, Any]:
    inner, loss_of = made(name, device, layout)
    model = DistributedDataParallel(inner, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-4)
        if name == "gpt2"
        else torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    )
    handle, spent, hosts, processor, before = None, [0.0], [], [], [0.0]
    values, world = sum(p.numel() for p in model.parameters()), dist.get_world_size()
    if what == BF16:

        def timed(state, bucket):  # DDP reads annotations, and does not know postponed ones
            began = time.perf_counter()
            future = default_hooks.bf16_compress_hook(None, bucket)
            spent[0] += time.perf_counter() - began
            return future

        model.register_comm_hook(None, timed)
    elif what != NO_SYNC:
        # torch's hook casts small tensors, too; by default gradzip leaves them as they are.
        handle = gradzip.attach(model, optimizer, gradzip.Fixed(what) if what == "cast" else what)
        reduce = handle.reduce

        def reduced(bucket: Any) -> Any:
            began = time.perf_counter()
            future = reduce(bucket)
            spent[0] += time.perf_counter() - began
            return future

        handle.reduce = reduced  # type: ignore[method-assign]
    sent, last = [0, 0], torch.zeros(())

    def step() -> None:
        nonlocal last
        before[0] = time.process_time()
        optimizer.zero_grad()
        if what == NO_SYNC:
            with model.no_sync(), torch.autocast("cuda", torch.bfloat16):
                last = loss_of(model)
        else:
            with torch.autocast("cuda", torch.bfloat16):
                last = loss_of(model)
        last.backward()
        optimizer.step()

    def each(counts: bool) -> None:
        if counts:
            hosts.append(1e3 * spent[0])
            processor.append(1e3 * (time.process_time() - before[0]))
        elif handle is not None:
            handle._drain()  # DDP need not have waited for all of the step
            sent[0] = handle._totals.bytes_sent
        spent[0] = 0.0

    times = medians(step, warm, steps, each)
    stats = handle.stats() if handle is not None else {}
    if handle is not None:
        sent_a_step = (stats["bytes_sent"] - sent[0]) / steps
    else:
        sent_a_step = 2 * (world - 1) / world * 2 * values if what == BF16 else 0.0
    bits = torch.stack([p.detach().view(torch.int32).long().sum() for p in model.parameters()])
    everybodys = [torch.empty_like(bits) for _ in range(world)]
    dist.all_gather(everybodys, bits)
    differing = sum(bool((other != everybodys[0]).any()) for other in everybodys)
    if handle is not None:
        handle.detach()
    row = {
        "model": name, "what": what, "runner": stats.get("runner") or "", "ranks": world,
        "ms": round(statistics.median(times), 2), "least_ms": round(min(times), 2),
        "host_ms": round(statistics.median(hosts), 2), "mb_sent": round(sent_a_step / 1e6, 2),
        "bits": round(8 * sent_a_step / (values * 2 * (world - 1) / world), 2),
        "share": round(stats.get("noise", {}).get("share", 0.0), 5),
        "coarser": stats.get("noise", {}).get("coarser", 0),
        "replicas_differing": differing if what != NO_SYNC else "", "loss": round(last.item(), 4),
        "device": torch.cuda.get_device_name(), "cpu_ms": statistics.median(processor),
    }  # fmt: skip
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("resnet18", "resnet50", "gpt2"), default="resnet18")
    parser.add_argument("--policies", default="cast;noise;int8;int4;fp8;gcomp:keep=7", help="gradzip's, separated by ;")
    parser.add_argument("--warm", type=int, default=12, help="steps before those that count: slots shrink in step 9")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--row-major", action="store_true", help="not channels_last, which PowerSGD has no kernels for")
    parser.add_argument("--bucket-mb", type=float, default=DEFAULT_MB, help="DDP's bucket_cap_mb, of all rows")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    known = options.csv.open().readline() if options.csv and options.csv.exists() else "bucket_mb"
    if options.bucket_mb != DEFAULT_MB and "bucket_mb" not in known:
        parser.error(f"--bucket-mb {options.bucket_mb}: {options.csv} has no such column; name another file")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    device, rate = torch.device("cuda", 0), goodput()
    alone = hook = quiet = 0.0
    policies = filter(None, options.policies.split(";"))
    layout = torch.contiguous_format if options.row_major else torch.channels_last
    for what in (NO_SYNC, BF16, *policies):
        row = measure(options.model, what, device, options.warm, options.steps, layout, options.bucket_mb)
        row["bucket_mb"], row["layout"] = options.bucket_mb, "row-major" if options.row_major else "channels_last"
        row["hosts"] = dist.get_world_size() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        gc.collect()
        torch.cuda.empty_cache()
        alone = row["ms"] if what == NO_SYNC else alone
        quiet = row["cpu_ms"] if what == NO_SYNC else quiet
        row["cpu_ms"] = round(row["cpu_ms"] - quiet, 2)
        hook = row["ms"] if what == BF16 else hook
        row["of_bf16_hook"] = round(row["ms"] / hook, 3) if hook else ""
        row["goodput_gbit"] = round(rate * 8 / 1e6, 2)
        row["bound"] = round(row["ms"] / (alone + row["mb_sent"] * 1e6 / rate), 3)
        if dist.get_rank() == 0:
            print("  ".join(f"{key}={row[key]}" for key in COLUMNS), flush=True)
            if options.csv:
                new = not options.csv.exists()
                known = COLUMNS if new else tuple(options.csv.open().readline().strip().split(","))
                with options.csv.open("a", newline="") as file:
                    writer = csv.DictWriter(file, known, extrasaction="ignore")
                    if new:
                        writer.writeheader()
                    writer.writerow(row)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Where the time of a step on the stream runner goes: on the host by function, on the GPU by stage of each bucket.

    gradzip emulate --gpu-share --no-measure --hosts 4 --rate 10gbit -- python bench/stream_profile.py \
        --models resnet18,resnet50,gpt2 --codecs noise,cast

Host times are medians over steps, in microseconds a step: `own` without, `all` with what a function calls. Stages are
medians of GPU events, in milliseconds since the first bucket's hook; what ends late delays what comes after it.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradzip
from gradzip.engines.cuda import launch, noise_row
from gradzip.exchange.on_stream import checks
from gradzip.exchange.on_stream import message as on_device
from gradzip.exchange.on_stream import noise as noise_on_device
from gradzip.exchange.on_stream import runner as on_stream
from gradzip.exchange.on_stream import scaled as scaled_on_device
from gradzip.hooks import buckets, handle
from gradzip.sensitivity.shape import SecondMoments

sys.path.insert(0, str(Path(__file__).parent))


class Profile:
    """Times of functions, nested; and events behind what they enqueue."""

    def __init__(self, events: bool) -> None:
        self._own: dict[str, float] = defaultdict(float)  # of this step
        self._all: dict[str, float] = defaultdict(float)
        self._count: dict[str, int] = defaultdict(int)
        self._inner = [0.0]
        self._events = events
        self._marks: list[tuple[str, Any]] = []
        self.steps: list[tuple[dict[str, tuple[float, float, int]], list[tuple[str, float]]]] = []

    def wrap(self, owner: Any, name: str, label: str = "", mark: bool = False) -> None:
        found: Callable[..., Any] = getattr(owner, name)
        label = label or name

        def timed(*args: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return found(*args, **options)
            finally:
                spent = time.perf_counter() - began
                inner = self._inner.pop()
                self._inner[-1] += spent
                self._own[label] += spent - inner
                self._all[label] += spent
                self._count[label] += 1
                if mark and self._events:
                    self.mark(label)

        setattr(owner, name, timed)

    def mark(self, label: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((label, event))

    def end_step(self, counts: bool) -> None:
        """The device is idle. What was measured becomes a step, if it counts."""
        if counts:
            host = {label: (1e6 * self._own[label], 1e6 * self._all[label], self._count[label]) for label in self._all}
            first = self._marks[0][1] if self._marks else None
            stages = [(label, first.elapsed_time(event)) for label, event in self._marks] if first else []
            self.steps.append((host, stages))
        self._own.clear(), self._all.clear(), self._count.clear(), self._marks.clear()

    def report(self) -> str:
        lines = []
        labels = sorted({label for host, _ in self.steps for label in host})
        table = {
            label: [statistics.median(host.get(label, (0.0, 0.0, 0))[i] for host, _ in self.steps) for i in range(3)]
            for label in labels
        }
        lines.append(f"{'host, us a step':34} {'own':>8} {'all':>8} {'calls':>6}")
        for label, (own, whole, count) in sorted(table.items(), key=lambda row: -row[1][0]):
            lines.append(f"{label:34} {own:8.0f} {whole:8.0f} {count:6.0f}")
        stages = [marks for _, marks in self.steps]
        if stages and len({len(marks) for marks in stages}) == 1:
            lines.append("GPU, ms since the first hook (rank 0)")
            row: list[str] = []
            for number, (label, _) in enumerate(stages[0]):
                if label == "hook" and row:
                    lines.append("  ".join(row))
                    row = []
                row.append(f"{label} {statistics.median(marks[number][1] for marks in stages):.2f}")
            lines.append("  ".join(row))
        return "\n".join(lines)


def instrument(profile: Profile) -> None:
    """Wraps what a step calls. The order of inner and outer functions does not matter."""
    profile.wrap(handle.Handle, "_begin")
    profile.wrap(handle.Ways, "of", "Ways.of")
    profile.wrap(handle.report.Journal, "step", "Journal.step")
    profile.wrap(buckets.Buckets, "named", "Buckets.named")
    profile.wrap(on_stream.StreamRunner, "begin", "runner.begin")
    profile.wrap(on_stream.StreamRunner, "_read", "runner._read")
    profile.wrap(on_stream.StreamRunner, "take", "runner.take")
    profile.wrap(on_stream.StreamRunner, "_message", "runner._message")
    profile.wrap(on_stream.StreamRunner, "_send_row", "runner._send_row", mark=True)
    profile.wrap(SecondMoments, "renew", "shapes.renew", mark=True)
    profile.wrap(SecondMoments, "total", "shapes.total")
    profile.wrap(checks.Checks, "send", "checks.send")
    profile.wrap(on_stream, "all_to_all")
    profile.wrap(on_stream, "all_gather")
    profile.wrap(dist.Work, "wait", "work.wait")
    profile.wrap(launch.Stage, "__call__", "kernel launches")
    profile.wrap(noise_row.RowCall, "__call__", "row launch")
    for kind in (on_device.RawMessage, noise_on_device.NoiseMessage, scaled_on_device.ScaledMessage):
        for name in ("encode", "reduce", "decode"):
            profile.wrap(kind, name, f"message.{name}", mark=True)
    profile.wrap(on_device.DeviceMessage, "norm", "message.norm", mark=True)
    if torch.cuda.is_available():
        profile.wrap(on_stream.StreamRunner, "_wait", "runner._wait")
        profile.wrap(torch.cuda, "set_stream", "set_stream")
    profile.wrap(torch.futures.Future, "__init__", "Future()")
    profile.wrap(torch.futures.Future, "set_result", "Future.set_result")


def run(
    name: str, codec: str, profile: Profile, device: torch.device, warm: int, steps: int, bucket_mb: float
) -> list[float]:
    from exchange_gpu import made, medians

    inner, loss_of = made(name, device, torch.channels_last)
    model = DistributedDataParallel(inner, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-4)
        if name == "gpt2"
        else torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    )
    attached = gradzip.attach(model, optimizer, gradzip.Fixed(codec) if codec == "cast" else codec)
    reduce = attached.reduce

    def reduced(bucket: Any) -> Any:
        if profile._events:
            profile.mark("hook")
        return reduce(bucket)

    attached.reduce = reduced  # type: ignore[method-assign]
    profile.wrap(attached, "reduce", "hook")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(model)
        loss.backward()
        if profile._events:
            profile.mark("backward")
        optimizer.step()

    times = medians(step, warm, steps, profile.end_step)
    attached.detach()
    return sorted(times)


def primitives(device: torch.device) -> str:
    """What single calls cost the host when nothing else runs, in microseconds."""
    small, streams = torch.zeros(1024, device=device), [torch.cuda.Stream(priority=-1) for _ in range(2)]
    world = dist.get_world_size()
    sent, received = (torch.zeros(world * 1024, dtype=torch.uint8, device=device) for _ in range(2))
    event = torch.cuda.Event()

    def enter() -> None:
        with torch.cuda.stream(streams[0]):
            pass

    calls: dict[str, Callable[[], Any]] = {
        "torch op (add_)": lambda: small.add_(1.0),
        "event.record": event.record,
        "event.wait": event.wait,
        "Event() and record": lambda: torch.cuda.Event().record(),
        "wait_stream": lambda: streams[0].wait_stream(streams[1]),
        "the same by a kept event": lambda: (event.record(streams[1]), event.wait(streams[0])),
        "with stream": enter,
        "Future(devices), set_result": lambda: torch.futures.Future[Any](devices=[device]).set_result(small),
        "all_to_all, wait": lambda: dist.all_to_all_single(received, sent, async_op=True).wait(),
        "all_to_all of the group, wait": lambda: on_stream.all_to_all(received, sent, dist.group.WORLD).wait(),
        "all_gather of the group, wait": lambda: on_stream.all_gather(received, sent[:1024], dist.group.WORLD).wait(),
        "all_to_all on the current stream": lambda: dist.all_to_all_single(received, sent),
    }
    found = []
    for label, call in calls.items():
        for number in range(60):
            if number == 10:
                torch.cuda.synchronize()
                began = time.perf_counter()
            call()
        found.append(f"{label} {1e6 * (time.perf_counter() - began) / 50:.1f}")
        torch.cuda.synchronize()
    return "; ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet18,resnet50,gpt2")
    parser.add_argument("--codecs", default="noise,cast")
    parser.add_argument("--warm", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="DDP's bucket_cap_mb")
    options = parser.parse_args()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    device = torch.device("cuda", 0)
    said = primitives(device)
    if dist.get_rank() == 0:
        print(f"calls, us: {said}", flush=True)
    profile = Profile(events=False)
    instrument(profile)
    for model in options.models.split(","):
        for codec in options.codecs.split(","):
            profile.steps.clear()
            profile._events = False
            unmarked = run(model, codec, profile, device, options.warm, options.steps, options.bucket_mb)
            host = profile.report()
            profile.steps.clear()
            profile._events = True  # these cost host time of their own
            marked = run(model, codec, profile, device, options.warm, options.steps, options.bucket_mb)
            stages = profile.report().partition("GPU, ")
            gc.collect()
            torch.cuda.empty_cache()
            if dist.get_rank() == 0:
                took, also = statistics.median(unmarked), statistics.median(marked)
                print(f"== {model} {codec}: {took:.1f} ms a step, {also:.1f} with events\n{host}")
                print("all steps, ms: " + " ".join(f"{ms:.1f}" for ms in unmarked))
                print("".join(stages[1:]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

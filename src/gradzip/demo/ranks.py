"""What every rank of the demo runs: `python -m gradzip.demo.ranks FOLDER`.

The same model, the same data and the same number of steps for every policy, one after the other.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._C._profiler import _ExperimentalConfig
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from .. import capture
from ..hooks import Handle, attach
from ..planner.measure import WARM, benchmarks
from ..planner.measure.record import Recorder as StepRecorder
from ..report import Recorder
from .settings import (
    DESCRIBED,
    PLAN,
    PLANNED_FROM,
    POLICIES,
    PROFILE,
    RUNS,
    SNAPSHOT,
    TRACE,
    WORDS,
    Progress,
    Settings,
)

BUCKET_MB = 25.0  # DDP's own default: every message costs processor time, which hosts share here
LENGTH = 32  # bytes of text per sequence: as on GPUs, computing takes less time than a slow network
TIMED = 5  # steps that decide how many there will be
LEAST_STEPS = 10


class Rank:
    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings
        self.text = capture.corpus()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def run(self) -> None:
        compute_s = self._timed(exchange=False)
        plain_s = self._timed(exchange=True)
        steps = self.settings.steps or max(
            LEAST_STEPS, int(self.settings.seconds / len(self.settings.policies) / plain_s)
        )
        if not self.settings.limit:
            self._profile()
        share = None if self.settings.steps else self.settings.seconds / len(self.settings.policies)
        for name in self.settings.policies:
            self._train(name, steps, compute_s, share)

    # -- one run ------------------------------------------------------------------------------------------------

    def _train(self, name: str, steps: int, compute_s: float, share: float | None) -> None:
        model, optimizer, rng = self._fresh()
        policy = POLICIES[name]
        handle = None if policy is None else attach(model, optimizer, policy)
        about: dict[str, Any] = {
            "policy": policy or "none",
            "words": WORDS[name],
            "hosts": self.world,
            "rate": self.settings.rate if self.settings.limit else "loopback, no limit",
            "compute_seconds": compute_s,
            "bucket_cap_mb": BUCKET_MB,
            "parameters": self.settings.size.parameters,
        }
        if handle is None:
            about["bytes_per_step"] = 2 * (self.world - 1) / self.world * 4 * self.settings.size.parameters
        dist.barrier()
        path = self.folder / RUNS
        recorder = Recorder(path, name, handle, **about)
        described = {2, max(3, steps // 2), steps} if name == DESCRIBED else set()
        losses: list[float] = []
        began, cpu = time.perf_counter(), time.process_time()
        for step in range(1, steps + 1):

            def look(loss: float, lr: float, step: int = step) -> None:
                if step in described:
                    recorder.gradients(model, optimizer, ("gcomp:mode=lossless", "gcomp", "gcomp:keep=7"))
                if handle is None and step == steps and self.rank == 0:
                    torch.save(vars(capture.snapshot(step, loss, lr, optimizer)), self.folder / SNAPSHOT)

            with self._traced() if name == DESCRIBED and step == min(steps, LEAST_STEPS) else nullcontext():
                loss = self._step(model, optimizer, rng, step, steps, look)
            recorder()
            losses.append(loss)
            if self.rank == 0:
                step_ms = (time.perf_counter() - began) / step * 1e3
                print(Progress(name, step, steps, loss, step_ms).line(), flush=True)
            # The plain run is what the others are measured against.
            if handle is not None and step % LEAST_STEPS == 0 and step < steps and self._late(began, share):
                recorder.note(stopped=step)
                break
        cpu = (time.process_time() - cpu) / len(losses)
        mean = torch.tensor(losses, dtype=torch.float64) / self.world
        dist.all_reduce(mean)  # after the run: it would be one more message in every step
        for step, loss in enumerate(mean.tolist(), 1):
            recorder.later(step, loss=loss)
        busy = torch.tensor(cpu, dtype=torch.float64)
        dist.all_reduce(busy)
        recorder.note(identical=self._identical(model), processor_seconds=float(busy))
        if handle is not None:
            self._keep_plan(handle)
            handle.detach()

    def _late(self, began: float, share: float | None) -> bool:
        """Whether rank 0 finds that a run has had its time; asked between steps, and all do what it says."""
        late = torch.tensor(float(share is not None and time.perf_counter() - began > self.settings.patience * share))
        dist.broadcast(late, 0)
        return bool(late)

    @contextmanager
    def _traced(self) -> Iterator[None]:
        """Rank 0 takes a trace of what happens in here."""
        if self.rank != 0:
            yield
            return
        try:
            config = _ExperimentalConfig(profile_all_threads=True)
        except TypeError:  # an older torch sees this thread alone, and the report says so
            config = None
        with profile(activities=[ProfilerActivity.CPU], experimental_config=config, acc_events=True) as profiler:
            yield
        profiler.export_chrome_trace(str(self.folder / TRACE))

    def _keep_plan(self, handle: Handle) -> None:
        """What `auto` decided, if its race is over, and from which measurements."""
        pilot = handle.pilot
        if self.rank != 0 or pilot is None or pilot.profile is None:
            return
        pilot.profile.save(self.folder / PLANNED_FROM)
        if pilot.plan is not None:
            pilot.plan.save(self.folder / PLAN)

    def _step(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.AdamW,
        rng: torch.Generator,
        step: int,
        steps: int,
        look: Callable[[float, float], None] | None = None,
    ) -> float:
        lr = capture.learning_rate(step, step / steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        inputs, targets = capture.batch(self.text, self.settings.batch, rng, LENGTH)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if look is not None:
            look(loss.item(), lr)
        optimizer.step()
        return loss.item()

    def _fresh(self) -> tuple[DistributedDataParallel, torch.optim.AdamW, torch.Generator]:
        torch.manual_seed(0)
        model = DistributedDataParallel(capture.ByteModel(self.settings.size), bucket_cap_mb=BUCKET_MB)
        rng = torch.Generator().manual_seed(self.rank)
        return model, torch.optim.AdamW(model.parameters(), lr=capture.PEAK_LR), rng

    def _identical(self, model: DistributedDataParallel) -> bool:
        """Whether all ranks hold the same parameters, to the bit."""
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, digest.hexdigest())
        return len(set(found)) == 1

    # -- what is measured beforehand ----------------------------------------------------------------------------

    def _timed(self, exchange: bool) -> float:
        """The median step of the slowest rank, all ranks at work; without exchange it is computing alone."""
        model, optimizer, rng = self._fresh()
        times = []
        with nullcontext() if exchange else model.no_sync():
            for step in range(1, TIMED + 3):
                dist.barrier()
                began = time.perf_counter()
                self._step(model, optimizer, rng, step, 100)
                times.append(time.perf_counter() - began)
        slowest = torch.tensor(statistics.median(times[2:]), dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    def _profile(self) -> None:
        """What the planner needs to predict other networks."""
        model, optimizer, rng = self._fresh()
        watch = StepRecorder(model)
        found: dict[str, Any] = {}
        for step in range(1, WARM + TIMED + 3):

            def look(loss: float, lr: float, step: int = step) -> None:
                watch.backward_is_over()
                if step == WARM:
                    codecs = tuple(p for p in POLICIES.values() if p is not None and not p.startswith("auto"))
                    found.update(benchmarks(model, optimizer, codecs, lambda text: None))

            self._step(model, optimizer, rng, step, 100, look)
            watch.end_step(count=step > WARM + 1)
        watch.remove()
        if self.rank == 0:
            watch.profile(**found).save(self.folder / PROFILE)


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    Rank(folder, Settings.load(folder)).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

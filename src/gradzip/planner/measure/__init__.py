"""Measures a training script that knows nothing of it, and writes profile.json.

    install     patches DistributedDataParallel and the optimizers' step, in every rank (see ../inject)
    record      when gradients become ready, and how long forward, backward and the optimizer take
    coding      what codecs cost, and save, on the script's own gradients
    mirror      the host runner without the other ranks, for that
    rounds      codecs of several rounds
    noise       what is different with noise
    wire        what collectives cost on the script's own ranks
    threads     what the runner's threads cost

All ranks count their optimizer steps, so all of them start the benchmarks at the same one.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..profile import Profile
from .coding import measure_codecs, measure_copies
from .record import Recorder
from .threads import measure_chunk
from .wire import measure_network, own_group

VARIABLE = "GRADZIP_PROFILE"
DEFAULT_CODECS = (
    *("gcomp", "gcomp:mode=lossless", "gcomp:keep=7", "gcomp:ulps=256"),
    *("noise", "cast:to=bf16", "topk", "powersgd:rank=4"),
)
QUIET = 5.0  # seconds between two lines that say how far it is
WARM = 3  # steps before anything counts: DDP forms its buckets anew after the first


@dataclass(frozen=True)
class Settings:
    steps: int = 50
    out: str = "profile.json"
    codecs: tuple[str, ...] = DEFAULT_CODECS
    inter_bits_per_s: float | None = None  # what the network between hosts is called
    keep_going: bool = False  # after the profile is written

    @classmethod
    def from_environment(cls) -> Settings:
        data = json.loads(os.environ[VARIABLE])
        return cls(**{**data, "codecs": tuple(data["codecs"])})

    def to_text(self) -> str:
        return json.dumps(asdict(self))


def install(settings: Settings) -> None:
    """From now on the first DistributedDataParallel model of this process is measured."""
    session = _Session(settings)
    original = DistributedDataParallel.__init__

    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        session.watch(self)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(lambda optimizer, *_: session.before_step(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, *_: session.after_step(optimizer))
    atexit.register(session.at_exit)


def benchmarks(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    codecs: Sequence[str],
    say: Callable[[str], None],
    inter_bits_per_s: float | None = None,
    own: Mapping[str, torch.Tensor] | None = None,
    spent: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """What a profile holds beside the times of steps. Call it on all ranks after the same backward.

    `own` are this rank's gradients before that averaged them; `spent` is told how long it took.
    """
    device, group = next(model.parameters()).device, model.process_group
    own_group(group)  # setting it up counts for none of these
    marks = [time.perf_counter()]

    def timed(result: Any) -> Any:
        marks.append(time.perf_counter())
        return result

    found = {
        "codecs": timed(measure_codecs(model, optimizer, codecs, say, own)),
        "copies": timed(measure_copies(device)),
        "chunk_s": timed(measure_chunk(group, device)),
        **timed(measure_network(group, device, inter_bits_per_s)),
    }
    seconds = [later - sooner for sooner, later in itertools.pairwise(marks)]
    parts = (f"{what} {s:.1f}" for what, s in zip(("codecs", "copies", "threads", "network"), seconds))
    spent(f"that took {sum(seconds):.1f} s: {', '.join(parts)}")
    return found


class _Session:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.process = os.getpid()  # a forked child ends without writing the profile
        self.recorder: Recorder | None = None
        self.benchmarks: dict[str, Any] | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.steps = 0
        self._said_at = 0.0
        self.written = False
        self.stopped = False  # the script, before its own end

    def watch(self, model: DistributedDataParallel) -> None:
        if self.recorder is None:
            self.recorder = Recorder(model)
            self._say(f"found the model; {self.settings.steps} steps will be measured")
            self._said_at = time.monotonic()

    def mine(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is the first optimizer that holds parameters of the model."""
        if self.recorder is None or self.written:
            return False
        if self.optimizer is None and self.recorder.has_parameters_of(optimizer):
            self.optimizer = optimizer
        return optimizer is self.optimizer

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.mine(optimizer):
            return
        assert self.recorder is not None
        self.recorder.backward_is_over()
        if self.steps == WARM:
            self._benchmark(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.mine(optimizer):
            return
        assert self.recorder is not None
        self.recorder.end_step(count=self.steps > WARM + 1)
        self.steps += 1
        self.recorder.keeps_own = self.steps == WARM
        if time.monotonic() - self._said_at > QUIET:
            self._say(f"step {self.steps} of {self.settings.steps}")
            self._said_at = time.monotonic()
        if self.steps >= self.settings.steps:
            self.end()
            if not self.settings.keep_going:
                self.stopped = True
                raise SystemExit(0)

    def _benchmark(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.recorder is not None
        model = self.recorder.model
        self._say(f"measuring codecs and network on {dist.get_world_size(model.process_group)} ranks")
        nominal = self.settings.inter_bits_per_s
        self.benchmarks = benchmarks(
            model, optimizer, self.settings.codecs, self._say, nominal, self.recorder.own, self._say
        )

    def end(self) -> None:
        """Writes what there is; also when the script ends early."""
        if self.written or self.recorder is None:
            return
        self.written = True
        if self.recorder.steps < 1 or self.benchmarks is None:
            self._say(f"the script ended after {self.steps} steps, before anything was measured: no profile")
            return
        if dist.is_initialized() and dist.get_rank(self.recorder.model.process_group) != 0:
            return
        profile = self._profile()
        profile.save(self.settings.out)
        ready = f"{len(profile.tensors)} tensors, {profile.size_bytes / 1e6:.1f} MB"
        self._say(f"{self.recorder.steps} steps measured, {ready}; the profile is in {self.settings.out}")

    def at_exit(self) -> None:
        """After the script's own clean-up. One that was stopped ends here.

        It has not closed its process group. If a thread of torch's calls back while Python shuts down, it aborts the
        process: that was seen once in some 50 runs.
        """
        if os.getpid() != self.process:
            return
        self.end()
        if self.stopped and not hasattr(sys, "last_value"):  # nothing went wrong on the way out
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _profile(self) -> Profile:
        assert self.recorder is not None and self.benchmarks is not None
        return self.recorder.profile(**self.benchmarks)

    def _say(self, text: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            print(f"gradzip profile: {text}", file=sys.stderr, flush=True)


__all__ = ["DEFAULT_CODECS", "VARIABLE", "Settings", "benchmarks", "install"]

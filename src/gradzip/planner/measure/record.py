"""When things happen in a training step: hooks on a DistributedDataParallel model and its parameters."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ...exchange.topology import Topology
from ...feedback import clean_name
from ..profile import Profile, Tensor

Mark = float | torch.cuda.Event


class Recorder:
    """Medians over steps. On a GPU events are recorded and read when the step is over."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model = model
        self.names = {p: clean_name(name) for name, p in model.named_parameters() if p.requires_grad}
        self.device = next(iter(self.names)).device
        self.steps = 0
        self.keeps_own = False  # for the codecs to be measured on: not in steps that are timed
        self.own: dict[str, torch.Tensor] = {}  # gradients of this rank, before they are averaged
        self._marks: dict[str, Mark] = {}
        self._ready: dict[str, Mark] = {}
        self._times: dict[str, list[float]] = {}
        self._previous: Mark | None = None
        self._hooks = [
            model.register_forward_pre_hook(self._forward_begins),
            model.register_forward_hook(self._forward_ends),
        ]
        for parameter, name in self.names.items():
            hook = parameter.register_post_accumulate_grad_hook(partial(self._gradient, name))  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def has_parameters_of(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(p in self.names for group in optimizer.param_groups for p in group["params"])

    # -- hooks --------------------------------------------------------------------------------------------------

    def _mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _forward_begins(self, *_: Any) -> None:
        self._marks.setdefault("forward", self._mark())

    def _forward_ends(self, module: Any, inputs: Any, output: Any) -> None:
        """Backward begins when the gradient of an output is there; the loss counts as forward."""
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._backward_begins())  # type: ignore[no-untyped-call]
                return

    def _backward_begins(self) -> None:
        self._marks["backward"] = self._mark()
        self._ready.clear()  # of gradient accumulation only the last pass counts

    def _gradient(self, name: str, parameter: torch.Tensor) -> None:
        self._ready[name] = self._mark()
        if self.keeps_own and parameter.grad is not None:  # DDP takes it after this hook
            self.own[name] = parameter.grad.detach().clone()

    def backward_is_over(self) -> None:
        self._marks["optimizer"] = self._mark()

    def end_step(self, count: bool) -> None:
        end = self._mark()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if count and {"forward", "backward", "optimizer"} <= set(self._marks) and self._ready:
            begin = self._marks["backward"]
            self._note("forward", _seconds(self._marks["forward"], begin))
            self._note("optimizer", _seconds(self._marks["optimizer"], end))
            ready = max(_seconds(begin, mark) for mark in self._ready.values())
            self._note("exposed", _seconds(begin, self._marks["optimizer"]) - ready)
            for name, mark in self._ready.items():
                self._note(f"ready {name}", _seconds(begin, mark))
            if self._previous is not None:
                self._note("step", _seconds(self._previous, end))
            self.steps += 1
        self._previous = end
        self._marks, self._ready, self.own = {}, {}, {}

    def _note(self, what: str, seconds: float) -> None:
        self._times.setdefault(what, []).append(max(0.0, seconds))

    def step_s(self) -> float:
        """The median of the whole steps so far."""
        return statistics.median(self._times["step"])

    def forget(self) -> None:
        """Starts to count steps anew."""
        self._times, self.steps, self._previous = {}, 0, None

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # -- the profile --------------------------------------------------------------------------------------------

    def profile(self, **benchmarks: Any) -> Profile:
        ranks = dist.get_process_group_ranks(self.model.process_group)
        hosts = Topology.of_ranks(dist.get_rank(self.model.process_group), ranks).hosts
        tensors = [
            Tensor(
                name,
                tuple(parameter.shape) or (1,),
                statistics.median(self._times[f"ready {name}"]),
                str(parameter.dtype).removeprefix("torch."),
            )
            for parameter, name in self.names.items()
            if f"ready {name}" in self._times
        ]
        step = self._times.get("step")
        bucket = getattr(self.model, "bucket_bytes_cap", None)
        return Profile(
            model=type(self.model.module).__name__,
            tensors=tuple(sorted(tensors, key=lambda t: t.ready_s)),
            forward_s=statistics.median(self._times["forward"]),
            backward_s=max(t.ready_s for t in tensors),
            optimizer_s=statistics.median(self._times["optimizer"]),
            hosts=len(hosts),
            ranks_per_host=len(hosts[0]),
            transport="host",
            step_s=statistics.median(step) if step else None,
            exposed_s=statistics.median(self._times["exposed"]),
            bucket_bytes=int(bucket) if bucket else None,
            steps=self.steps,
            origin={
                "made_by": "gradzip profile",
                "tensors": "measured on rank 0 under DDP: medians over steps",
                "codecs": "measured on the gradients of one step, on all ranks at once",
                "collectives": "measured on all ranks, nothing else running",
            },
            **benchmarks,
        )


def _seconds(begin: Mark, end: Mark) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float) and isinstance(end, float)
        return end - begin
    return float(begin.elapsed_time(end)) / 1e3


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        return [t for item in output.values() for t in _tensors(item)]
    if isinstance(output, list | tuple):
        return [t for item in output for t in _tensors(item)]
    return [t for t in vars(output).values() if isinstance(t, torch.Tensor)] if hasattr(output, "__dict__") else []

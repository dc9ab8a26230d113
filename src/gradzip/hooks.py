"""attach: gradient exchange for DistributedDataParallel.

DDP calls the hook for one bucket after the other, in the same order on all ranks. The hook hands the bucket's gradients
to the pass that is under way (backward.py), which sends them by the channel that all handles of these ranks share; DDP
waits for the futures at the end of backward.
"""
# Annotations are not postponed in this file: DDP looks at those of the hook and accepts classes only.

import os
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from . import collectives, sensitivity
from .backward import Backward, Future, Way
from .codecs import Codec, parse
from .codecs.gcomp import GComp
from .engines.layout import Floor
from .errors import GradzipWarning, PeerError, Unsupported
from .feedback import Memory, Value, clean_name
from .option import Option
from .policy import Fixed, Policy, as_policy, small
from .refresh import SharedBook
from .routes import NAMED, Route

if TYPE_CHECKING:
    from .planner.auto import Pilot

STATE_VERSION = 0
CHECK = "GRADZIP_CHECK"  # set to 1: all ranks compare their results after each step

_Floors = Mapping[torch.Tensor, Floor | torch.Tensor | None]


def attach(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | None = None,
    policy: str | Codec | Option | Policy | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    mesh: DeviceMesh | None = None,
    timeout: timedelta | None = None,
    heartbeat: timedelta | None = None,
) -> "Handle":
    """Compresses the gradients of a DDP model from its next backward on. Call it on all ranks.

    The policy is a codec's text form such as "powersgd:rank=2", a Codec, an Option or a Policy. The default is
    "gcomp", which sends the bits that the optimizer can feel; without an optimizer it is "gcomp:mode=lossless".
    `scaler` is the GradScaler of mixed-precision training. `mesh` tells which ranks share a host (two dimensions, hosts
    first); by default the launcher's LOCAL_WORLD_SIZE does. A rank counts as dead when its heartbeat stops for
    `heartbeat` (30 s), or one message takes longer than `timeout` (30 min).

    "auto" profiles the first steps of the run, plans, and uses the plan if it pays; "auto:lossy=true" and
    "auto:codecs=gcomp,powersgd" offer it more than near-lossless codecs (planner/auto.py).
    """
    if isinstance(policy, str) and policy.partition(":")[0] == "auto":
        return _automatic(model, optimizer, policy, scaler=scaler, mesh=mesh, timeout=timeout, heartbeat=heartbeat)
    if not isinstance(model, DistributedDataParallel):
        raise Unsupported(f"attach needs a DistributedDataParallel model, not {type(model).__name__}: wrap it first")
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1 or any(device.type not in ("cpu", "cuda") for device in devices):
        names = ", ".join(sorted(map(str, devices)))
        raise Unsupported(f"attach works on models on the CPU or on one GPU, and this one has parameters on {names}")
    if model not in _slots:
        slot = _Slot(model.process_group)
        model.register_comm_hook(slot, _hook)
        _slots[model] = slot
    if _slots[model].handle is not None:
        raise Unsupported("this model has a handle already: change its policy by set_policy, or detach it first")
    if policy is None:
        policy = "gcomp:mode=lossless" if optimizer is None else "gcomp"
    handle = Handle(model, optimizer, as_policy(policy), scaler, mesh, timeout, heartbeat)
    _slots[model].handle = handle
    return handle


def _automatic(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer | None, policy: str, **settings: Any
) -> "Handle":
    from .planner.auto import Auto, Pilot  # who does not plan need not load the planner

    wanted = Auto.parse(policy)
    if optimizer is None:
        raise Unsupported("auto counts the optimizer's steps: attach(model, optimizer, 'auto')")
    handle = attach(model, optimizer, Fixed("identity"), **settings)
    handle.pilot = Pilot(handle, model, optimizer, wanted)
    return handle


class Handle:
    """The compression of one model's gradients; what `attach` returns."""

    pilot: "Pilot | None" = None  # of the policy "auto"

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer | None,
        policy: Policy,
        scaler: torch.amp.GradScaler | None,
        mesh: DeviceMesh | None = None,
        timeout: timedelta | None = None,
        heartbeat: timedelta | None = None,
    ) -> None:
        self.error: BaseException | None = None  # why the exchange stopped; backward raises it as a RuntimeError
        self._names: dict[torch.Tensor, str] = {p: clean_name(name) for name, p in model.named_parameters()}
        twice = [name for name, count in Counter(self._names.values()).items() if count > 1]
        if twice:
            raise Unsupported(f"two parameters are called {twice[0]!r} once `module.` is taken out: rename a submodule")
        self._device = next(iter(self._names)).device if self._names else torch.device("cpu")
        self._optimizer = optimizer
        self._scaler = scaler
        self._policy = policy
        group = model.process_group
        ranks = dist.get_process_group_ranks(group)
        rank = dist.get_rank(group)
        self._topology = (
            collectives.Topology.of_ranks(rank, ranks)
            if mesh is None
            else collectives.Topology.of_mesh(rank, ranks, mesh)
        )
        self._ways(policy, 1.0)  # complains now rather than in backward
        self._channel = collectives.open_channel(group, self._device, mesh, timeout, heartbeat)
        self._memory = Memory(self._channel.rank)
        self._books = SharedBook()
        self._backward: Backward | None = None
        self._steps = 0
        self._totals, self._bytes_raw = collectives.Outcome(), 0
        self._to_warn: list[str] = []  # from the channel's threads; said on the user's
        self._told: set[str] = set()
        self._lock = threading.Lock()

    # -- for the user -------------------------------------------------------------------------------------------

    def set_policy(self, policy: str | Codec | Option | Policy) -> None:
        """Uses another policy from the next step on. Call it on all ranks at the same point."""
        chosen = as_policy(policy)
        self._ways(chosen, 1.0)
        self._drain()
        self._memory.fold()  # what sums lost on routes that may no longer be taken
        self._policy = chosen

    def stats(self) -> dict[str, float]:
        """Totals since attach, for this rank: bytes that it sent, and that a ring all-reduce would have sent."""
        self._drain()
        sent, raw, world = self._totals.bytes_sent, self._bytes_raw, self._channel.world
        raw = 2 * (world - 1) * raw // world
        return {
            "steps": self._steps,
            "bytes_sent": sent,
            "bytes_raw": raw,
            "ratio": raw / sent if sent else 1.0,
            "collectives": self._totals.collectives,
            "coding_seconds": self._totals.coding,
        }

    def state_dict(self) -> dict[str, Value]:
        """All that a resume needs: tensors and numbers, in one flat dictionary.

        Keys that start with `rank` belong to one rank: save the dictionary of every rank, or hand it to
        torch.distributed.checkpoint.
        """
        self._drain()
        fixed: dict[str, Value] = {"version": STATE_VERSION, "steps": self._steps, "world_size": self._channel.world}
        planned: dict[str, Value] = {} if self.pilot is None else self.pilot.state_dict()
        return fixed | planned | self._books.state_dict() | self._memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Value]) -> None:
        self._drain()
        if state.get("version") != STATE_VERSION:
            raise Unsupported(f"this state has version {state.get('version')}; this gradzip reads {STATE_VERSION}")
        if state["world_size"] != self._channel.world:
            warnings.warn(
                f"the state was saved by {state['world_size']} ranks and is loaded by {self._channel.world}: "
                "what error feedback held on ranks that are gone is lost",
                GradzipWarning,
                stacklevel=2,
            )
        self._steps = int(state["steps"])
        if self.pilot is not None:
            self.pilot.load_state_dict(state)
        self._memory.load_state_dict(state)
        self._books.load_state_dict(state)

    def detach(self) -> None:
        """Back to plain averaging, from the next step on. Call it on all ranks at the same point."""
        if self.pilot is not None:
            self.pilot.end()
        for slot in _slots.values():
            if slot.handle is self:
                slot.handle = None
                self._drain()
                self._channel.leave()

    def _drain(self) -> None:
        """Waits for what is under way, and says what has to be said."""
        self._channel.pipeline.drain()
        self._say()

    def _say(self) -> None:
        while self._to_warn:
            warnings.warn(self._to_warn.pop(0), GradzipWarning, stacklevel=3)

    def _warn(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._to_warn.append(text)

    # -- on the thread of backward ------------------------------------------------------------------------------

    def _ways(self, policy: Policy, scale: float) -> dict[str, Way]:
        """What each gradient goes through under a policy."""
        ways, cache = {}, dict[tuple[str, int], _Floors]()
        for parameter, name in self._names.items():
            option = policy.option(name, parameter.shape)
            if option.device == "gpu" and self._device.type == "cpu":
                raise Unsupported(f"{name!r} is on the CPU: {option} would have it coded on a GPU")
            codec, floor = parse(option.codec), None
            if isinstance(codec, GComp) and codec.mode in ("near", "paper"):
                key = codec.mode, codec.ulps
                if key not in cache:
                    cache[key] = self._floors(codec, scale)
                floor = cache[key].get(parameter)
                if floor is None:  # nothing is known about this parameter, so nothing may be dropped
                    codec = GComp(mode="lossless", limit=codec.limit, book=codec.book)
            route = self._route(codec, option)
            late = route == "factors" or (codec.name == "identity" and route == "allreduce" and small(parameter.shape))
            ways[name] = Way(codec, route, late, floor)
        return ways

    def _route(self, codec: Codec, option: Option) -> str:
        route = collectives.route_of(codec, option.route, self._topology.default_route)
        if route == "factors":
            return route
        self._topology.check(Route.parse(route))
        device = option.device or ("cpu" if self._device.type == "cpu" else "gpu")
        return str(NAMED[route].on(device)) if device == "gpu" and route in NAMED and route != "allreduce" else route

    def _floors(self, codec: GComp, scale: float) -> _Floors:
        """Where each parameter's gradient may be cut, for the step about to be taken."""
        if self._optimizer is None:
            raise Unsupported(
                f"{codec} asks the optimizer which bits matter: attach(model, optimizer), or take gcomp:mode=lossless"
            )
        if codec.mode == "near":
            return sensitivity.rules(self._optimizer, codec.ulps, scale)
        return {p: collectives.flatten(r, p) for p, r in sensitivity.reaches(self._optimizer, scale).items()}

    def _begin(self) -> Backward:
        self._memory.drop()  # what a backward that was broken off has left
        self._say()
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        ways = self._ways(self._policy, scale)
        counts = Counter(f"{way.codec}/{way.route}" for way in ways.values())
        words = ", ".join(f"{count} x {text}" for text, count in counts.items())
        plain = set(counts) == {"identity/allreduce"} and not self._memory.residuals
        check = os.environ.get(CHECK, "") not in ("", "0")
        begun = Backward(
            self._steps, scale, ways, plain, words, self._channel, self._memory, self._end, check, self._books
        )
        begun.compare_floors(self._warn)
        return begun

    def _reduce(self, bucket: GradBucket) -> Future:
        """Takes a bucket in hand and returns at once; the future is its averaged buffer."""
        self.error = self.error or self._channel.error
        if self.error is not None:
            raise PeerError(f"the exchange stopped at an earlier error: {self.error}") from self.error
        try:
            if bucket.index() == 0 or self._backward is None:
                self._backward = self._begin()
            # A gradient lies in memory as its parameter does, but DDP hands it out as if that were row-major.
            gradients = [collectives.unflatten(g.view(-1), p) for p, g in zip(bucket.parameters(), bucket.gradients())]
            named = [(self._names[p], g) for p, g in zip(bucket.parameters(), gradients)]
            future = self._backward.take(bucket.buffer(), named, bucket.is_last())
            if bucket.is_last():
                self._backward = None
        except Exception as error:
            self.error = self._channel.fail(error)  # tells the other ranks, which would wait for this one
            raise
        return future

    # -- on the channel's threads -------------------------------------------------------------------------------

    def _end(self, ended: Backward) -> None:
        """A backward pass is through, or has failed."""
        with self._lock:
            if ended.totals.error is not None:
                self.error = self.error or ended.totals.error
                return
            self._totals.add(ended.totals)
            self._bytes_raw += ended.raw_bytes
            self._steps += 1


@dataclass
class _Slot:
    """A model's hook. DDP takes one hook for good, so it outlives the handle and averages plainly without one."""

    group: dist.ProcessGroup
    handle: Handle | None = None


_slots: "weakref.WeakKeyDictionary[DistributedDataParallel, _Slot]" = weakref.WeakKeyDictionary()


def _hook(slot: _Slot, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return _plain_average(slot.group, bucket) if slot.handle is None else slot.handle._reduce(bucket)


def _plain_average(group: dist.ProcessGroup, bucket: GradBucket) -> Future:
    """What DDP does without a hook, to the bit."""
    buffer = bucket.buffer().mul_(1 / dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    averaged: Future = work.get_future().then(lambda future: future.value()[0])
    return averaged

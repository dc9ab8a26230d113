"""attach: gradient exchange for DistributedDataParallel.

DDP calls the hook for one bucket after the other, in the same order on all ranks. The hook sorts the bucket's
gradients into messages of equal codec and route and hands them to the worker; DDP waits for the futures at the end of
backward. Factors and small uncompressed tensors wait for the last bucket and travel together, in the order of
parameter names: a few collectives for the whole step, and the same result however DDP cuts its buckets.
"""
# Annotations are not postponed in this file: DDP looks at those of the hook and accepts classes only.

import warnings
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from . import collectives, sensitivity, worker
from .codecs import Codec, Context, parse
from .codecs.gcomp import GComp
from .engines.layout import Floor
from .errors import GradzipWarning, PeerError, Unsupported
from .feedback import Memory, Value, clean_name
from .option import Option
from .peers import Peers
from .policy import Policy, as_policy, small

STATE_VERSION = 0
PATIENCE = 5.0  # seconds that a failing rank gives the others to hear why, before backward raises

_Future = torch.futures.Future[torch.Tensor]
_Floors = Mapping[torch.Tensor, Floor | torch.Tensor | None]


def attach(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | None = None,
    policy: str | Codec | Option | Policy | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    timeout: timedelta | None = None,
) -> "Handle":
    """Compresses the gradients of a DDP model from its next backward on. Call it on all ranks.

    The policy is a codec's text form such as "powersgd:rank=2", a Codec, an Option or a Policy. The default is
    "gcomp", which sends the bits that the optimizer can feel; without an optimizer it is "gcomp:mode=lossless".
    `scaler` is the GradScaler of mixed-precision training. `timeout` bounds one exchange; torch's default is 30 min.
    """
    if not isinstance(model, DistributedDataParallel):
        raise Unsupported(f"attach needs a DistributedDataParallel model, not {type(model).__name__}: wrap it first")
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise Unsupported("attach works on models on the CPU so far, and this one has parameters elsewhere")
    if model not in _slots:
        slot = _Slot(model.process_group)
        model.register_comm_hook(slot, _hook)
        _slots[model] = slot
    if _slots[model].handle is not None:
        raise Unsupported("this model has a handle already: change its policy by set_policy, or detach it first")
    if policy is None:
        policy = "gcomp:mode=lossless" if optimizer is None else "gcomp"
    handle = Handle(model, optimizer, as_policy(policy), scaler, timeout)
    _slots[model].handle = handle
    return handle


@dataclass(frozen=True)
class _Way:
    """What one parameter's gradient goes through in a step."""

    codec: Codec
    route: str
    late: bool  # waits for the last bucket
    floor: Floor | torch.Tensor | None


@dataclass(frozen=True, eq=False)
class _Ticket:
    """A bucket that DDP waits for."""

    done: torch.futures.Future[Any]  # of the buffer, or of the exception that _result_or_raise raises
    buffer: torch.Tensor


@dataclass
class _Step:
    """One backward pass, from its first bucket to its last."""

    number: int
    scale: float
    ways: dict[str, _Way]  # by parameter name
    policy: str  # in words, for the agreement between ranks
    late: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    waiting: list[_Ticket] = field(default_factory=list)
    finite: bool = True


class Handle:
    """The compression of one model's gradients; what `attach` returns."""

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer | None,
        policy: Policy,
        scaler: torch.amp.GradScaler | None,
        timeout: timedelta | None,
    ) -> None:
        self.error: BaseException | None = None  # why the exchange stopped; backward raises it as a RuntimeError
        self._names: dict[torch.Tensor, str] = {p: clean_name(name) for name, p in model.named_parameters()}
        twice = [name for name, count in Counter(self._names.values()).items() if count > 1]
        if twice:
            raise Unsupported(f"two parameters are called {twice[0]!r} once `module.` is taken out: rename a submodule")
        self._optimizer = optimizer
        self._scaler = scaler
        self._policy = policy
        self._ways(policy, 1.0)  # complains now rather than in backward
        self._peers = Peers(model.process_group, timeout)
        self._memory = Memory(self._peers.rank)
        self._worker = worker.shared()
        self._step: _Step | None = None
        self._steps = 0
        self._bytes_raw = 0

    # -- for the user -------------------------------------------------------------------------------------------

    def set_policy(self, policy: str | Codec | Option | Policy) -> None:
        """Uses another policy from the next step on. Call it on all ranks at the same point."""
        chosen = as_policy(policy)
        self._ways(chosen, 1.0)
        self._policy = chosen

    def stats(self) -> dict[str, float]:
        """Totals since attach, for this rank: bytes that it sent, and that a ring all-reduce would have sent."""
        self._worker.drain()
        sent, raw = self._peers.bytes_sent, self._bytes_raw
        return {"steps": self._steps, "bytes_sent": sent, "bytes_raw": raw, "ratio": raw / sent if sent else 1.0}

    def state_dict(self) -> dict[str, Value]:
        """All that a resume needs: tensors and numbers, in one flat dictionary.

        Keys that start with `rank` belong to one rank: save the dictionary of every rank, or hand it to
        torch.distributed.checkpoint.
        """
        self._worker.drain()
        fixed: dict[str, Value] = {"version": STATE_VERSION, "steps": self._steps, "world_size": self._peers.size}
        return fixed | self._memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Value]) -> None:
        self._worker.drain()
        if state.get("version") != STATE_VERSION:
            raise Unsupported(f"this state has version {state.get('version')}; this gradzip reads {STATE_VERSION}")
        if state["world_size"] != self._peers.size:
            warnings.warn(
                f"the state was saved by {state['world_size']} ranks and is loaded by {self._peers.size}: "
                "what error feedback held on ranks that are gone is lost",
                GradzipWarning,
                stacklevel=2,
            )
        self._steps = int(state["steps"])
        self._memory.load_state_dict(state)

    def detach(self) -> None:
        """Back to plain averaging, from the next step on. Call it on all ranks at the same point."""
        for slot in _slots.values():
            if slot.handle is self:
                slot.handle = None
                self._worker.drain()
                if self.error is None:  # else it is in use until the others have heard why
                    self._peers.close()

    # -- on the thread of backward ------------------------------------------------------------------------------

    def _ways(self, policy: Policy, scale: float) -> dict[str, _Way]:
        """What each gradient goes through under a policy."""
        ways, cache = {}, dict[tuple[str, int], _Floors]()
        for parameter, name in self._names.items():
            option = policy.option(name, parameter.shape)
            if option.device == "gpu":
                raise Unsupported(f"{name!r} is on the CPU: {option} would have it coded on a GPU")
            codec, floor = parse(option.codec), None
            if isinstance(codec, GComp) and codec.mode in ("near", "paper"):
                key = codec.mode, codec.ulps
                if key not in cache:
                    cache[key] = self._floors(codec, scale)
                floor = cache[key].get(parameter)
                if floor is None:  # nothing is known about this parameter, so nothing may be dropped
                    codec = GComp(mode="lossless", limit=codec.limit, book=codec.book)
            route = collectives.route_of(codec, option.route)
            late = route == "factors" or (codec.name == "identity" and route == "allreduce" and small(parameter.shape))
            ways[name] = _Way(codec, route, late, floor)
        return ways

    def _floors(self, codec: GComp, scale: float) -> _Floors:
        """Where each parameter's gradient may be cut, for the step about to be taken."""
        if self._optimizer is None:
            raise Unsupported(
                f"{codec} asks the optimizer which bits matter: attach(model, optimizer), or take gcomp:mode=lossless"
            )
        if codec.mode == "near":
            return sensitivity.rules(self._optimizer, codec.ulps, scale)
        return {p: collectives.flatten(r, p) for p, r in sensitivity.reaches(self._optimizer, scale).items()}

    def _begin_step(self) -> _Step:
        self._memory.drop()  # what a backward that was broken off has left
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        ways = self._ways(self._policy, scale)
        counts = Counter(f"{way.codec}/{way.route}" for way in ways.values())
        return _Step(self._steps, scale, ways, ", ".join(f"{count} x {text}" for text, count in counts.items()))

    def _reduce(self, bucket: GradBucket) -> _Future:
        """Takes a bucket in hand and returns at once; the future is its averaged buffer."""
        if self.error is not None:
            raise PeerError(f"the exchange stopped at an earlier error: {self.error}") from self.error
        try:
            if bucket.index() == 0 or self._step is None:
                self._step = self._begin_step()
            step, last = self._step, bucket.is_last()
            # A gradient lies in memory as its parameter does, but DDP hands it out as if that were row-major.
            gradients = [collectives.unflatten(g.view(-1), p) for p, g in zip(bucket.parameters(), bucket.gradients())]
            named = [(self._names[p], g) for p, g in zip(bucket.parameters(), gradients)]
            late = [(name, g) for name, g in named if step.ways[name].late]
            step.late += late
            messages = self._messages(step, [(name, g) for name, g in named if not step.ways[name].late])
            if last:
                messages += self._messages(step, sorted(step.late, key=lambda item: item[0]))
                self._step = None
        except Exception as error:
            self.error = failure = error
            self._worker.submit(lambda: self._fail(failure, []))  # tells the other ranks, which would wait for this one
            self._worker.drain(patience=PATIENCE)
            raise
        ticket = _Ticket(torch.futures.Future(), bucket.buffer())
        future = ticket.done.then(_result_or_raise)
        self._worker.submit(lambda: self._run(step, messages, ticket, bool(late), last))
        return future

    def _messages(self, step: _Step, named: list[tuple[str, torch.Tensor]]) -> list[collectives.Message]:
        """The gradients in messages of equal codec and route, in the order of first appearance."""
        messages: dict[tuple[Codec, str], collectives.Message] = {}
        for name, gradient in named:
            way = step.ways[name]
            if (way.codec, way.route) not in messages:
                messages[way.codec, way.route] = collectives.Message(
                    way.codec, way.route, [], [], self._memory, step.scale, step.policy
                )
            message = messages[way.codec, way.route]
            state = self._memory.state(name, way.codec.name)
            message.tensors.append(gradient)
            message.contexts.append(Context(name, step.number, rank=self._peers.rank, floor=way.floor, state=state))
        return list(messages.values())

    # -- on the worker's thread ---------------------------------------------------------------------------------

    def _run(self, step: _Step, messages: list[collectives.Message], ticket: _Ticket, hold: bool, last: bool) -> None:
        """One bucket's messages; with the last bucket, the end of the step."""
        step.waiting.append(ticket)
        if self.error is not None:
            _complete(step.waiting, self.error)
            return
        try:
            for message in messages:
                step.finite &= collectives.exchange(message, self._peers)
            if last:  # a rank that failed after the last exchange must not leave the others alone with DDP
                self._peers.agree(f"the end of step {step.number}", 0)
        except Exception as error:
            self._fail(error, step.waiting)
            return
        self._bytes_raw += self._peers.ring_bytes(ticket.buffer.numel() * ticket.buffer.itemsize)
        if last:
            self._memory.commit() if step.finite else self._memory.drop()
            self._steps += 1
            _complete(step.waiting)
        elif not hold:
            step.waiting.remove(ticket)
            _complete([ticket])

    def _fail(self, error: Exception, waiting: list[_Ticket]) -> None:
        """Ends the exchange for good: DDP could not go on after a broken backward anyway."""
        self.error = error
        if not isinstance(error, PeerError):  # those are known to all ranks, or there is nobody left to tell
            self._peers.announce(error, PATIENCE)
        _complete(waiting, error)


def _complete(tickets: list[_Ticket], error: BaseException | None = None) -> None:
    for ticket in tickets:
        ticket.done.set_result(ticket.buffer if error is None else error)
    tickets.clear()


def _result_or_raise(done: torch.futures.Future[Any]) -> Any:
    """Raising here, in a callback, gives backward a RuntimeError with the text of the error; set_exception does not."""
    result = done.value()
    if isinstance(result, BaseException):
        raise result
    return result


@dataclass
class _Slot:
    """A model's hook. DDP takes one hook for good, so it outlives the handle and averages plainly without one."""

    group: dist.ProcessGroup
    handle: Handle | None = None


_slots: "weakref.WeakKeyDictionary[DistributedDataParallel, _Slot]" = weakref.WeakKeyDictionary()


def _hook(slot: _Slot, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return _plain_average(slot.group, bucket) if slot.handle is None else slot.handle._reduce(bucket)


def _plain_average(group: dist.ProcessGroup, bucket: GradBucket) -> _Future:
    """What DDP does without a hook, to the bit."""
    buffer = bucket.buffer().mul_(1 / dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    averaged: _Future = work.get_future().then(lambda future: future.value()[0])
    return averaged

"""Runs messages on CUDA streams over NCCL: all work of a bucket is enqueued from DDP's hook, and nobody waits for it.

    encode   frames for all other ranks                     on the first stream, behind the bucket's gradients
    scatter  all_to_all_single on DDP's own group
    reduce   decode, add in the order of ranks, encode      on the second stream, behind the all-to-all
    gather   all_gather_single
    decode   means into the bucket; DDP's stream goes on behind it

A small bucket waits for the next one, and NCCL moves the frames of both as one: a collective takes about a millisecond
beyond its bytes, and DDP's first bucket is often small.

The frames of a message have a size that all ranks know beforehand. PowerSGD's factors wait for the last bucket and are
averaged by all-reduces, on the second stream. Behind the last bucket goes a row of checks, which the host reads two
steps later: see checks.py.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from ... import saved
from ...engines.cuda.restore import Change
from ...errors import Unsupported
from ...feedback import Memory
from ...sensitivity.shape import SecondMoments
from .. import plain
from ..compiler import compile_route
from ..program import Program
from ..topology import Topology
from .checks import Checks, StepResult
from .factors import FactorMessage
from .message import Checked, DeviceMessage, StreamCodec
from .slots import LATE, OWN, SUM, Largest, Slots
from .times import ADD, ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, DECODE, ENCODE, FACTORS, Stages, Times, Waits

OLDEST_TORCH = (2, 8)
_STATE = "exchange/slots"  # key of the state
ENOUGH = 2 << 20  # bytes that a rank sends for buckets before they are exchanged: about what two collectives cost

Future = torch.futures.Future[torch.Tensor]
_Late = list[tuple[int, dict[str, dict[str, Largest]]]]  # sizes of a step, by the digest of a message's program
SavedSlots = tuple[dict[str, Slots], _Late]


_Group = dist.ProcessGroup
_scatter = getattr(_Group, "all_to_all_single", None) or _Group.alltoall_base  # their names before torch 2.13
_gather = getattr(_Group, "all_gather_single", None) or _Group._allgather_base
_scatter_options, _gather_options, _sum_options = AllToAllOptions(), AllgatherOptions(), dist.AllreduceOptions()
_scatter_options.asyncOp = _gather_options.asyncOp = _sum_options.asyncOp = True


# The group's own methods: the functions of torch.distributed spend some 20 us on checks.
def all_to_all(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    return _scatter(group, received, sent, [], [], _scatter_options)


def all_gather(gathered: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    return _gather(group, gathered, own, _gather_options)


def all_reduce(values: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """The sum, in the order that NCCL chooses: all ranks get the same."""
    return group.allreduce([values], _sum_options)


def together(collectives: Sequence[Callable[[], dist.Work]], group: dist.ProcessGroup, device: torch.device) -> Waits:
    """Starts them all, as one where the backend can; `wait` of what it returns is for all."""
    if len(collectives) < 2 or not group._get_backend(device).supports_coalescing:
        return _Works([start() for start in collectives])
    group._start_coalescing(device)
    try:
        for start in collectives:
            start()
    finally:
        work: dist.Work = group._end_coalescing(device)
    return work


class _Works(list[dist.Work]):
    def wait(self) -> None:
        for work in self:
            work.wait()


def reason_against(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why messages of this group cannot go by streams, and what to do; None: they can."""
    if device.type != "cuda":
        return f"the model is on {device}"
    if (backend := plain.backend_of(group, device)) != "nccl":
        return (
            f"the process group's backend for GPUs is {backend}, and GPU models on such groups are not supported yet: "
            "use init_process_group('nccl')"
        )
    return reason_against_torch()


def reason_against_torch() -> str | None:
    """Why this torch cannot run messages on streams, and what to do; None: it can."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST_TORCH:
        return f"this is torch {torch.__version__}: install torch {'.'.join(map(str, OLDEST_TORCH))} or newer"
    return None


class StreamMessage:
    """Gradients of a bucket that are coded as one message, and stay where they are."""

    def __init__(
        self,
        kind: str,
        codec: StreamCodec,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        shaped: Sequence[torch.Tensor] = (),
    ) -> None:
        """`shaped`: the same memory as the user's tensors have it; (): the flat ones."""
        self.kind, self.codec, self.names, self.tensors = kind, codec, tuple(names), tensors
        self.shaped = shaped or tensors
        self.contents: object = None  # what Memory held when these names were last looked up there
        self.program: Program | None = None
        self.version: object = None  # of the shapes that `message` was made for
        self.slots: dict[str, int] = {}  # and the sizes of its slots
        self.message: DeviceMessage | None = None
        self.bytes_sent = 0  # by this rank in a step


class _Taken(NamedTuple):
    """A bucket whose frames for other ranks are being made."""

    future: Future
    buffer: torch.Tensor
    waits: bool  # for the last bucket
    messages: Sequence[DeviceMessage]


class StreamRunner:
    """Runs the messages of one model, bucket by bucket, in the order in which DDP hands them out."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        topology: Topology,
        shapes: SecondMoments,
        memory: Memory | None = None,
    ) -> None:
        self._group, self._device, self._topology, self._shapes = group, device, topology, shapes
        self._rank = dist.get_rank(group)
        self._memory = Memory(self._rank) if memory is None else memory
        self._contents = object()  # another one when residuals may have come to Memory from elsewhere
        self._origin = object()  # another one when Memory has been loaded: with memory that streams know nothing of
        self._open: int | None = None  # the step that Memory waits for the host to know of
        self._divisor = torch.tensor(float(topology.world), device=device)  # as in RawMessage
        self._module = torch.get_device_module(device)
        self._encoding, self._decoding = (_stream(device) for _ in range(2))
        self._passed = self._module.Event()
        self._enter = torch.cuda.set_stream if device.type == "cuda" else _stay  # a context would take twice as long
        self._checks = Checks(group, device)
        self.times = Times(device, self._enter, _stream(device))
        self._slots: dict[str, Slots] = {}  # by the digest of a message's program
        # stats() may be asked for on any thread, and slots are to be alike on all ranks.
        self._reading = threading.Lock()
        self._late: _Late = []  # largest frames that slots do not know of yet
        self._step, self._shapes_version, self._wants_results = 0, object(), False
        self._uses_shapes = False
        self._scale = 1.0  # the loss scale that gradients carry
        self._messages: list[Checked] = []  # of this step
        self._norms: list[torch.Tensor] = []
        self._results: list[torch.Tensor] = []
        self._taken: list[_Taken] = []  # buckets that are not exchanged yet
        self._waiting: list[tuple[Future, torch.Tensor]] = []  # buckets, for the last one
        self._changes: list[Change] = []  # in what Memory holds
        self._by_host = False  # Memory is told by the host whether means are finite
        self._then: Callable[[torch.Tensor], None] | None = None
        self._alive: list[object] = []  # until the step is through
        self._agreed: tuple[object, int] = None, 0  # what all ranks must have alike in a step, and its digest
        self._warm_up()

    def _warm_up(self) -> None:
        """NCCL connects at first use: here, rather than in a step."""
        world = dist.get_world_size(self._group)
        small = torch.zeros(2, world, dtype=torch.uint8, device=self._device)
        all_to_all(small[0], small[1], self._group).wait()
        all_gather(small[0], small[1, :1], self._group).wait()

    # -- a step, on the thread of backward ----------------------------------------------------------------------

    def begin(
        self,
        step: int,
        use_shapes: bool = True,
        compare_results: bool = False,
        scale: float = 1.0,
        then: Callable[[torch.Tensor], None] | None = None,
    ) -> list[StepResult]:
        """Before the first bucket; returns what became known of earlier steps. PeerError: one of them was wrong.

        `scale` is the loss scale of the gradients. `then` is called when all is enqueued, before DDP gets any bucket,
        with the norms of all messages' means: they are finite on the device if the step is.
        """
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise Unsupported("gradients cannot be exchanged in a CUDA graph yet: capture forward and backward apart")
        rows = [*self.settle(), *self._read(step - LATE)]
        while self._late and self._late[0][0] <= step - LATE:
            for digest, sizes in self._late.pop(0)[1].items():
                self._slots[digest].note(sizes)
        self._step, self._wants_results = step, compare_results
        self._messages, self._norms, self._results, self._changes, self._alive = [], [], [], [], []
        self._taken, self._waiting, self._scale, self._then, self._by_host = [], [], scale, then, False
        self.times.begin(step)
        self._wait(self._encoding, self._decoding)  # the row of the last step reads what encoders write
        changed = False
        if use_shapes:
            before = self._module.current_stream(self._device)
            self._wait(self._encoding, before)
            self._enter(self._encoding)
            try:
                with torch.no_grad():
                    changed = self._shapes.renew()
            finally:
                self._enter(before)
        if changed or use_shapes != self._uses_shapes:
            self._shapes_version, self._uses_shapes = object(), use_shapes
        return rows

    def settle(self) -> list[StepResult]:
        """Waits for the step that decides what Memory holds, if there is one; what became known by that."""
        return [] if self._open is None else self._read(self._open)

    def take(
        self,
        buffer: torch.Tensor,
        streamed: Sequence[StreamMessage],
        last: bool,
        waits: bool = False,
        factors: Sequence[FactorMessage] = (),
    ) -> Future:
        """Enqueues the exchange of a bucket; the future is its averaged buffer.

        `waits`: not all of it is in `streamed`, the rest comes in the `factors` of the last bucket.
        """
        waits = waits or self._then is not None
        future: Future = (
            torch.futures.Future(devices=[self._device]) if self._device.type == "cuda" else torch.futures.Future()
        )
        before = self._module.current_stream(self._device)
        if last:
            self.times.arrived()
        self._wait(self._encoding, before)
        self._enter(self._encoding)
        try:
            with torch.no_grad():
                for each in streamed:
                    if each.contents is not self._contents and not each.codec.feeds_back:
                        self._add_left_over(each)
                messages = [self._message(each, buffer) for each in streamed]
                for each, message in zip(streamed, messages):
                    stages = self.times.of(message.program)
                    stages.start()
                    if message.residuals is not None:
                        message.residuals.begin(self._memory, each.shaped, self._scale)
                    message.encode(self._step)
                    stages.stop(ENCODE)
                self._taken.append(_Taken(future, buffer, waits, messages))
                if last or not messages or sum(m.bytes_sent for t in self._taken for m in t.messages) >= ENOUGH:
                    self._exchange()
                if last:
                    self._finish(factors)
        finally:
            self._enter(before)
        return future

    def _exchange(self) -> None:
        """Moves and decodes what has been encoded; then the current stream is the second one."""
        taken, self._taken = self._taken, []
        messages = [message for each in taken for message in each.messages]
        added = [message for message in messages if message.scatters]
        self._enter(self._encoding)
        on_the_wire = self.times.of(*(message.program for message in messages))
        on_the_wire.start()
        moved = together([functools.partial(self._first, message) for message in messages], self._group, self._device)
        self._enter(self._decoding)
        moved.wait()
        on_the_wire.carried(ALL_TO_ALL if added else ALL_GATHER, moved)
        for message in added:
            stages = self.times.of(message.program)
            stages.start()
            message.reduce(self._step)
            stages.stop(ADD)
        if added:
            on_the_wire.start()
            gathers = [functools.partial(self._gather, message) for message in added]
            moved = together(gathers, self._group, self._device)
            moved.wait()
            on_the_wire.carried(ALL_GATHER, moved)
        for message in messages:
            stages = self.times.of(message.program)
            stages.start()
            message.decode(self._step)
            if message.residuals is not None and (lost := message.lost()) is not None:
                self._note(*message.residuals.end(*lost))
            stages.stop(DECODE)
            if message.noise_kernels is None:
                self._norms.append(message.norm())
        self._messages += messages
        for each in taken:
            if each.waits:
                self._waiting.append((each.future, each.buffer))
            else:
                self._sum_up(each.buffer)
                each.future.set_result(each.buffer)  # who waits for it may write to it: nobody here reads it then

    def _first(self, message: DeviceMessage) -> dist.Work:
        if message.scatters:
            return all_to_all(message.received, message.sent, self._group)
        return self._gather(message)

    def _gather(self, message: DeviceMessage) -> dist.Work:
        return all_gather(message.gathered, message.sum_frame, self._group)

    def end(self, factors: Sequence[FactorMessage] = ()) -> None:
        """After the last bucket, where torch averages that one: `take` does the same by itself."""
        self.times.arrived()
        self._wait(self._encoding, self._module.current_stream(self._device))
        with torch.no_grad(), self._module.stream(self._decoding):
            if self._taken:
                self._exchange()
            self._finish(factors)

    def _wait(self, later: Any, earlier: Any) -> None:
        """One stream goes on when another has done what it was given so far; wait_stream makes an event each time."""
        self._passed.record(earlier)
        self._passed.wait(later)

    def _sum_up(self, buffer: torch.Tensor) -> None:
        if self._wants_results:
            self._results.append(buffer.view(torch.uint8).sum(dtype=torch.int64))

    def _finish(self, factors: Sequence[FactorMessage]) -> None:
        """On the second stream: what waited for the last bucket, and the row of checks."""
        if factors:
            self._wait(self._decoding, self._encoding)  # which is behind the gradients of all buckets
        for message in factors:
            stages = self.times.of(message.program)
            stages.start()
            average = functools.partial(self._average, self.times.of(message.program))
            self._note(*message.run(self._memory, self._step, self._scale, average))
            stages.stop(FACTORS)
            # What came from another stream must outlast the step: torch would give its memory to that stream at once.
            self._by_host |= message.origin is not self._origin
            message.origin = self._origin
            self._norms.append(message.norm())
            self._messages.append(message)
        for _, buffer in self._waiting:
            self._sum_up(buffer)
        if self._then is not None:
            self._send_row()
        self.times.done()
        for future, buffer in self._waiting:
            future.set_result(buffer)
        if self._then is None:  # else it is on its way
            self._send_row()

    def _note(self, changes: Sequence[Change] | None, alive: object) -> None:
        """What a message has noted in Memory; None: the host decides whether it is kept."""
        self._by_host |= changes is None
        self._changes += changes or []
        self._alive.append(alive)

    def _average(self, stages: Stages, values: torch.Tensor) -> None:
        stages.start()
        work = all_reduce(values, self._group)
        work.wait()
        stages.carried(ALL_REDUCE, work)
        values.div_(self._divisor)

    def _add_left_over(self, streamed: StreamMessage) -> None:
        """Adds residuals that another codec has left. Memory forgets them when the host knows that means are finite."""
        streamed.contents = self._contents
        held = {name: tensor for name, tensor in zip(streamed.names, streamed.shaped) if self._memory.holds(name)}
        if not held:
            return
        names, tensors = list(held), list(held.values())
        totals = self._memory.compensated_all(names, tensors, self._scale)
        for tensor, total in zip(tensors, totals):
            if total is not tensor:
                tensor.copy_(total)
        self._memory.lost_all(names, [None] * len(names))
        self._by_host = True
        self._alive.append(totals)

    def _message(self, streamed: StreamMessage, buffer: torch.Tensor) -> DeviceMessage:
        """Buffers and tables of a message; made when layout or shapes are new, or slots have outgrown the buffers."""
        if streamed.program is None:
            codec, sizes = streamed.codec, [tensor.numel() for tensor in streamed.tensors]
            streamed.program = compile_route(
                codec.text, codec.route, streamed.names, sizes, buffer.dtype, self._topology, codec.codes_sums
            )
        program = streamed.program
        slots = self._slots.get(program.digest) or streamed.codec.slots(program)
        is_new = streamed.message is None
        if slots is not None:
            self._slots[program.digest] = slots
            slots.begin()
            is_new |= streamed.version is not self._shapes_version
            if streamed.message is not None and not is_new and streamed.slots != slots.sizes:
                is_new = not streamed.message.resize(slots.sizes)
                streamed.slots, streamed.bytes_sent = dict(slots.sizes), streamed.message.bytes_sent
        if streamed.message is None or is_new:
            shapes = self._shapes.of(streamed.names) if self._uses_shapes else [None] * len(streamed.names)
            streamed.slots = {} if slots is None else dict(slots.sizes)
            streamed.message = None  # its memory is free for the next one
            streamed.message = streamed.codec.message(
                program, self._rank, buffer, streamed.tensors, shapes, streamed.slots
            )
            streamed.version, streamed.bytes_sent = self._shapes_version, streamed.message.bytes_sent
        return streamed.message

    def _send_row(self) -> None:
        if not self._messages:
            return
        shaped = self._shapes.names if self._uses_shapes else []
        said = [(m.program.digest, m.moved) for m in self._messages], shaped
        if said != self._agreed[0]:
            digest = hashlib.blake2b(repr(said).encode(), digest_size=7).digest()
            self._agreed = said, int.from_bytes(digest, "little")
        shapes = self._shapes.total() if shaped else None
        results = torch.stack(self._results).sum() if self._results else None
        changes = () if self._by_host else self._changes
        self._checks.send(
            self._step, self._agreed[1], self._messages, self._norms, shapes, results, changes, self._then
        )
        if self._by_host:
            self._open = self._step
        elif changes:
            self._memory.commit()  # the device takes back what it should not have noted

    # -- what became of it --------------------------------------------------------------------------------------

    def drain(self) -> list[StepResult]:
        """Waits for all that was enqueued; what became known of it. PeerError: something was wrong."""
        return self._read(None)

    def look(self) -> list[StepResult]:
        """The same without waiting: what is known by now."""
        return self._read(None, wait=False)

    def _read(self, last: int | None, wait: bool = True) -> list[StepResult]:
        with self._reading:
            rows = self._checks.read(last, wait)
            self._late += [(row.step, row.sizes) for row in rows]
            for row in rows:
                if row.step == self._open:
                    self._memory.commit() if row.outcome.finite else self._memory.drop()
                    self._open, self._contents, self._alive = None, object(), []
        return rows

    def free(self) -> None:
        """Lets go of all memory; the slots stay, for a state. To be drained before: then nothing uses it any more."""
        self._messages, self._taken, self._waiting, self._alive = [], [], [], []
        self._norms, self._results, self._changes, self._then = [], [], [], None
        self._checks.free()
        self.times.free()

    @property
    def unread(self) -> bool:
        """Whether it is not known yet what became of a step."""
        return self._checks.unread

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The slots, and what they do not know of yet: all ranks have the same. To be drained before."""
        slots = {digest: each.state_dict() for digest, each in self._slots.items()}
        text = json.dumps({"slots": slots, "late": self._late}, sort_keys=True)
        return {_STATE: torch.tensor(list(text.encode()), dtype=torch.uint8)}

    def go_on_from(self, read: SavedSlots) -> None:
        """Goes on with the slots of a state, as `read_state` gave them; Memory may hold something else now."""
        self._slots, self._late = read
        self._contents, self._origin = object(), object()


def described(loaded: SavedSlots) -> str:
    """What slots of a state all ranks must have alike, or NCCL would wait for bytes that nobody sends."""
    slots, late = loaded
    text = json.dumps([{digest: each.state_dict() for digest, each in slots.items()}, late], sort_keys=True)
    return f"slots of {len(slots)} messages with the digest {hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


def read_state(state: Mapping[str, Any]) -> SavedSlots:
    """What a state holds of slots; nothing, where another runner saved it. Unsupported: it is damaged."""
    if _STATE not in state:
        return {}, []
    text = saved.text(_STATE, state[_STATE])
    try:
        found = json.loads(text)
        slots = {digest: Slots.loaded(each) for digest, each in found["slots"].items()}
        late = [
            (int(step), {digest: {hop: Largest(*each[hop]) for hop in (OWN, SUM)} for digest, each in sizes.items()})
            for step, sizes in found["late"]
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Unsupported(f"the state's {_STATE!r} is damaged ({error}): {saved.CURE}") from None
    return slots, [(step, {d: each for d, each in sizes.items() if d in slots}) for step, sizes in late]


def _stay(stream: object) -> None:
    """In the place of torch.cuda.set_stream: the CPU has one stream."""


def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else torch.cpu.Stream()  # type: ignore[no-untyped-call]

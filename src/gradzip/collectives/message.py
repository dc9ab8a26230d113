"""Messages: gradients that travel together, and the jobs that they become.

    a route         cut into chunks, each carried out step by step (executor.py); names are in routes.NAMED
    allreduce       plain values are added in the order of ranks; the numbers inside summable frames likewise;
                    those of `cast` by one all-reduce of torch's, in 16 bits
    factors         for codecs of several rounds: the codec asks for one average after the other

Every way ends with the same bits on all ranks, and every encode that loses something leaves a residual in Memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..codecs import Codec, Context
from ..codecs.baseline import Cast, Identity
from ..exchange.finiteness import all_finite
from ..exchange.flattening import flatten, unflatten
from ..exchange.gradients import Prepared
from ..exchange.outcome import Outcome
from ..exchange.rounds import decode_mean, encoded
from ..feedback import Memory
from ..routes import FACTORS, NAMED, Route
from .blobs import Blob
from .channel import PipelineChannel
from .coder import TensorCoder, cuttable
from .executor import Executor
from .layout import PART, PART_ON_GPU, Layout, Piece, chunks, joined, numel
from .mean import WHERE, averaging
from .pipeline import Agreement, Job
from .terms import AllReduce, How, Parts, Steps

ALLREDUCE = "allreduce"


@dataclass(eq=False)
class Message:
    """Gradients of one type that travel together by one route; each is replaced by its mean over all ranks."""

    codec: Codec
    route: str
    tensors: list[torch.Tensor]
    contexts: list[Context]  # one for each tensor
    memory: Memory
    scale: float = 1.0  # the loss scale that the gradients carry
    policy: str = ""  # what the whole step does, so that a difference shows at its first message
    ready: torch.cuda.Event | None = None  # when the gradients are there
    counts: torch.Tensor | None = None  # where the exponents of the gradients are counted, for the next shared book
    must_be_lossless: Callable[[], bool] | None = None  # asked before the first encode in near or paper mode; may wait
    prepared: Prepared | None = None  # what the messages of these gradients have in common in all steps
    enqueued: Callable[[], None] | None = None  # told when the means are on the current stream, maybe still to be done

    def describe(self) -> str:
        """What all ranks must agree on."""
        if self.prepared is None:
            self.prepared = Prepared(self.codec, self.tensors, self.contexts)
        first, words = self.contexts[0], self.prepared.words
        return (
            f"{self.prepared.codec} by {self.route} at step {first.step} for {first.name!r} and "
            f"{len(self.tensors) - 1} more ({words}; {self.policy})"
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype


def submit(message: Message, channel: PipelineChannel, done: Callable[[Outcome], None]) -> None:
    """Sends a message on its way; `done` is called once, on one of the channel's threads."""
    jobs = list(jobs_of(message, channel))
    gathering = _Gathering(len(jobs), done)
    for job, outcome in jobs:
        job.done = gathering.one_done(outcome)
    for job, _ in jobs:
        channel.pipeline.submit(job)


class _Gathering:
    """Waits for all jobs of a message."""

    def __init__(self, count: int, done: Callable[[Outcome], None]) -> None:
        self._left, self._done, self._lock, self._total = count, done, threading.Lock(), Outcome()

    def one_done(self, outcome: Outcome) -> Callable[[Job, BaseException | None], None]:
        def ended(job: Job, error: BaseException | None) -> None:
            outcome.error, outcome.bytes_sent, outcome.bytes_out = error, job.bytes_sent, job.bytes_out
            outcome.coding, outcome.waiting = job.coding, job.waiting
            with self._lock:
                self._total.add(outcome)
                self._left -= 1
                last = self._left == 0
            if last:
                self._done(self._total)

        return ended


def _unset(job: Job, error: BaseException | None) -> None:
    raise AssertionError("a job without an end")


def jobs_of(message: Message, channel: PipelineChannel) -> list[tuple[Job, Outcome]]:
    """What a message becomes, chunk by chunk; nothing runs yet."""
    what = message.describe()
    if message.route == FACTORS:
        return [_one_job(what, message, channel, _factors)]
    if message.route == ALLREDUCE and not isinstance(message.codec, Identity | Cast):
        return [_one_job(what, message, channel, _addends)]
    if message.route == ALLREDUCE and isinstance(message.codec, Identity) and _is_small(message):
        return [_one_job(what, message, channel, _values)]
    return _chunk_jobs(what, message, channel)


def _chunk_jobs(what: str, message: Message, channel: PipelineChannel) -> list[tuple[Job, Outcome]]:
    route = Route.parse(message.route)
    channel.topology.check(route)
    coder = TensorCoder(
        message.codec, message.tensors, message.contexts, message.memory, channel.buffers, message.scale, channel.world
    )
    sizes = [t.numel() for t in message.tensors]
    part = PART_ON_GPU if channel.device.type == "cuda" else PART
    layouts = chunks(sizes, channel.world, _is_cut(message, route, channel), part)
    left = len(layouts)
    lock = threading.Lock()

    def run(job: Job, outcome: Outcome, layout: Layout, first: bool) -> Steps:
        nonlocal left
        if job.crossing is not None:
            job.crossing.append(coder)  # the last stage reads what was lost, which the first stage's stream made
        if first:
            _wait_for(message.ready)
            gate = message.must_be_lossless
            coder.prepare(coder.needs_floors and gate is not None and gate(), message.counts)
        carried = channel.carries(numel(layout) * message.dtype.itemsize)
        chunk = coder.for_chunk(job.taken, carried)
        if isinstance(message.codec, Cast) and not route.compresses:
            yield from _sum16(message.codec, layout, chunk, channel.world)
        else:
            yield from Executor(route, layout, chunk, channel.groups, channel.world, job.crossing, carried).steps()
        outcome.finite = coder.finite(layout)
        outcome.collectives = int(first)
        with lock:
            left -= 1
            last = left == 0
        if last:
            coder.finish()

    jobs, agreement = [], Agreement(what)
    for number, layout in enumerate(layouts):
        job, outcome = Job(agreement, no_steps(), _unset, crossing=_crossing(channel)), Outcome()
        job.steps = run(job, outcome, layout, first=number == 0)
        jobs.append((job, outcome))
    return jobs


def _is_cut(message: Message, route: Route, channel: PipelineChannel) -> bool:
    if isinstance(message.codec, Cast) and not route.compresses:
        size = sum(t.numel() for t in message.tensors) * message.codec.dtype.itemsize
        return not channel.carries(size)  # NCCL cuts up its sums by itself
    return cuttable(message.codec) or not route.compresses


def _crossing(channel: PipelineChannel) -> list[object] | None:
    return [] if channel.device.type == "cuda" else None


def no_steps() -> Steps:
    """Of a job that is done elsewhere, or whose steps are still to be set."""
    yield from ()


def _nobody() -> None:
    """Nobody has to be told."""


_Way = Callable[[Message, PipelineChannel, Job, Outcome], Steps]


def _one_job(what: str, message: Message, channel: PipelineChannel, way: _Way) -> tuple[Job, Outcome]:
    job, outcome = Job(Agreement(what), no_steps(), _unset, crossing=_crossing(channel)), Outcome()
    job.steps = way(message, channel, job, outcome)
    return job, outcome


def _sum16(codec: Cast, layout: Layout, coder: TensorCoder, world: int) -> Steps:
    """`cast` by allreduce: torch's own sum, in 16 bits."""
    half = coder.scratch(numel(layout), codec.dtype)
    torch.mul(joined(coder.load(layout)), 1 / world, out=half)  # divided before, or fp16 overflows
    coder.note_sent(layout, half, world)
    (total,) = yield AllReduce(half)
    assert total is not None
    coder.store(layout, total)


def _addends(message: Message, channel: PipelineChannel, job: Job, outcome: Outcome) -> Steps:
    """The numbers inside summable frames are averaged, then decoded once."""
    _wait_for(message.ready)
    about = message.codec, message.tensors, message.contexts
    frames = encoded(*about, message.memory, message.scale)
    if job.crossing is not None:
        job.crossing.append(frames)
    flat = torch.cat([message.codec.addends(frame) for frame in frames])
    plain, carried = _Plain(flat), channel.carries(flat.numel() * flat.itemsize)
    executor = Executor(NAMED[ALLREDUCE], plain.layout, plain, channel.groups, channel.world, job.crossing, carried)
    yield from executor.steps()
    decode_mean(*about, frames, flat)
    outcome.finite, outcome.collectives = all_finite(message.tensors), 1


def _is_small(message: Message) -> bool:
    return sum(t.numel() for t in message.tensors) <= PART


def _values(message: Message, channel: PipelineChannel, job: Job, outcome: Outcome) -> Steps:
    """Biases, norms and the like, as one: a hundred of them cost the host as much as one."""
    _wait_for(message.ready)
    names, tensors = [ctx.name for ctx in message.contexts], message.tensors
    inputs = message.memory.compensated_all(names, tensors, message.scale)
    flat = torch.cat([x if x.dim() == 1 else flatten(x, t) for x, t in zip(inputs, tensors)]).to(message.dtype)
    if job.crossing is not None:
        job.crossing.append(flat)
    plain, carried = _Plain(flat), channel.carries(flat.numel() * flat.itemsize)
    executor = Executor(NAMED[ALLREDUCE], plain.layout, plain, channel.groups, channel.world, job.crossing, carried)
    yield from executor.steps()
    means = flat.split_with_sizes([t.numel() for t in tensors])
    torch._foreach_copy_(tensors, [m if t.dim() == 1 else unflatten(m, t) for m, t in zip(means, tensors)])
    message.memory.lost_all(names, [None] * len(names))
    outcome.finite, outcome.collectives = all_finite([flat]), 1


def _factors(message: Message, channel: PipelineChannel, job: Job, outcome: Outcome) -> Steps:
    """The codec calls for averages and waits for them; other messages go on in other stages."""
    _wait_for(message.ready)
    assert message.prepared is not None
    names, fused = message.prepared.names, message.prepared.in_place
    sums = list[torch.Tensor]()

    def average(flat: torch.Tensor) -> None:
        steps = averaging(flat.view(-1), channel.groups[WHERE], channel.carries(flat.numel() * flat.itemsize))
        received: Parts | None = None
        while True:
            try:
                wanted = steps.send(received)  # type: ignore[arg-type]  # None starts a generator
            except StopIteration:
                break
            received = channel.pipeline.exchange(job, wanted)
        job.first_exchange += 4
        outcome.collectives += 1
        if fused is None:
            sums.append(torch.linalg.vector_norm(flat, 1, dtype=torch.float64))

    if fused is not None:
        name = message.codec.name
        before = message.memory.of_all(fused, names, name, message.tensors, message.scale)
        left = fused.reduce(before, message.scale, average, message.enqueued or _nobody)
        message.memory.keep_all(fused, names, name, left.kept)
        outcome.finite = left.finite
        return
    inputs = message.memory.compensated_all(names, message.tensors, message.scale)
    results = message.codec.reduce(inputs, message.contexts, average)
    message.memory.lost_all(names, [result.residual for result in results], message.scale)
    torch._foreach_copy_(message.tensors, [result.mean for result in results])
    limit = torch.finfo(message.dtype).max / 2
    outcome.finite = bool((torch.stack(sums) < limit).all()) or all_finite(message.tensors)
    yield from ()


def average_plainly(
    buffer: torch.Tensor,
    what: str,
    channel: PipelineChannel,
    done: Callable[[Outcome], None],
    ready: torch.cuda.Event | None = None,
) -> None:
    """What DDP does without a hook, to the bit: divided first, then one sum of torch's."""

    def run(job: Job, outcome: Outcome) -> Steps:
        _wait_for(ready)
        (total,) = yield AllReduce(buffer.mul_(1 / channel.world))
        assert total is not None
        if total.device != buffer.device:  # it went by the host's memory
            buffer.copy_(total)
        outcome.collectives = 1

    single(what, run, channel, done)


def single(
    what: str, run: Callable[[Job, Outcome], Steps], channel: PipelineChannel, done: Callable[[Outcome], None]
) -> None:
    """Sends a job of one's own on its way, among the messages."""
    outcome = Outcome()
    job = Job(Agreement(what), no_steps(), _Gathering(1, done).one_done(outcome))
    job.steps = run(job, outcome)
    channel.pipeline.submit(job)


def _wait_for(ready: torch.cuda.Event | None) -> None:
    if ready is not None:
        torch.cuda.current_stream().wait_event(ready)


class _Plain:
    """A flat tensor without any coding, replaced by its mean."""

    exact_grid = False

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat
        self.dtype, self.home = flat.dtype, flat.device
        self.layout: Layout = (Piece(0, 0, flat.numel()),)

    def load(self, layout: Layout) -> list[torch.Tensor]:
        (piece,) = layout
        return [self._flat[piece.start : piece.stop]]

    def store(self, layout: Layout, mean: torch.Tensor) -> None:
        (piece,) = layout
        self._flat[piece.start : piece.stop].copy_(mean)

    def targets(self, layout: Layout) -> None:
        return None

    def goes_plainly(self, leaf: Layout) -> None:
        pass

    def scratch(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=self.home)

    def bound(self, leaf: Layout) -> int:
        raise AssertionError("plain values are not coded")

    def encode(
        self, leaves: Sequence[Layout], values: Sequence[Sequence[torch.Tensor]], how: How, stays: int | None = None
    ) -> list[Blob]:
        raise AssertionError("plain values are not coded")

    def decode(
        self,
        leaves: Sequence[Layout],
        contributions: Sequence[Sequence[Blob]],
        how: How,
        outs: Sequence[Sequence[torch.Tensor]],
        add: bool,
    ) -> None:
        raise AssertionError("plain values are not coded")

    def lands(self, how: How) -> bool:
        return False

    def hop(self, leaf: Layout, blob: Blob, values: Sequence[torch.Tensor], how: How) -> Blob:
        raise AssertionError("plain values are not coded")

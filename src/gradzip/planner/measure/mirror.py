"""One rank's part of exchanges without the others: the host runner takes its chunks, and a mirror plays the wire.

Every other rank sends what this one sends it. All parts of a message are made equal, so these frames fit where those
that others would have made belong. So everything counts that the runner does around a codec's calls (buffers, sums,
error feedback, the look for NaN), and nothing of the wire or of the runner's threads. On the CPU it is counted in
seconds of a core, which other work on the machine does not change.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import cast

import torch

from ...codecs import Codec, Context
from ...engines.noise_layout import Shapes
from ...errors import Unsupported
from ...exchange.coding import Message, MessageCodec, Values
from ...exchange.compiler import compile_route
from ...exchange.message_codecs import codec_for_device, message_codec, route_of
from ...exchange.on_host.runner import HostProgram, HostRunner, Running, Sent
from ...exchange.outcome import Outcome
from ...exchange.parts import GRAIN
from ...exchange.peers.buffers import Buffers
from ...exchange.peers.channel import Channel
from ...exchange.topology import Topology
from ...feedback import Memory
from ...routes import NAMED, Route

ROUNDS, ROUNDS_ON_GPU = 3, 9  # a GPU that ranks share lets one of them wait now and then
# Of all messages: not a step that looks at gradients (codecs/local_lossless.py). The message that does not count does.
STEP = 3
_WHOLE = 1 << 62  # values of a chunk: none is cut

Arrived = Callable[[int, torch.Tensor], None]
Data = Sequence[tuple[int, torch.Tensor]]


def clock(device: torch.device) -> float:
    """Seconds: of this thread, or on a GPU by the clock once all is done there."""
    if device.type == "cpu":
        return time.thread_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


class Mirror:
    """What the host runner needs of a channel."""

    error = None

    def __init__(self, world: int, device: torch.device) -> None:
        self.rank, self.world, self.device = 0, world, device
        self.topology = Topology(0, tuple((rank,) for rank in range(world)))
        self.groups = self.topology.groups()
        self.buffers = Buffers(pinned=device.type == "cuda")
        self.gloo = self.watch = self
        self.waited = 0.0  # seconds that do not count

    def send(self, parts: Data, into: Data, tag: int) -> _Reflected:
        """Copies, as what comes from others does not lie where this rank has just written."""
        begun = clock(self.device)
        sent = dict(parts)
        for rank, buffer in into:
            buffer[: sent[rank].numel()] = sent[rank]
        self.waited += clock(self.device) - begun
        return _Reflected(into)

    def saw(self, *moment: object) -> None:
        """Nobody watches."""


class _Reflected:
    """What is under way, and has come already."""

    def __init__(self, into: Data) -> None:
        self._into = into

    def wait(self, arrived: Arrived | None = None) -> None:
        for rank, buffer in self._into:
            if arrived is not None:
                arrived(rank, buffer)


class TimedRunner(HostRunner):
    """Takes every chunk to its end when it is submitted, on this thread; `times` are the seconds of each stage."""

    def __init__(self, mirror: Mirror) -> None:
        super().__init__(cast(Channel, mirror))
        self.mirror = mirror
        self.times: list[float] = []

    def take(self, sent: Sent, done: Callable[[Outcome], None], chunks: Sequence[Callable[[int], Running]]) -> None:
        sent.done, self.times = done, []
        for number, chunk in enumerate(chunks):
            run = chunk(number)
            over = False
            while not over:
                self.mirror.waited, begun = 0.0, clock(self.mirror.device)
                with run.stream():
                    over = run.go_on()
                if over:
                    run.close()
                    run.sent.end()
                self.times.append(clock(self.mirror.device) - begun - self.mirror.waited)


class Stand:
    """Sends messages of one codec of one round, coded on one device, to the mirror."""

    grain = GRAIN  # values: each rank gets a multiple of it, or parts would not be equal

    def __init__(self, codec: Codec, device: str, place: torch.device, world: int) -> None:
        self.codec, self.place, self.world = codec, place, world
        wanted = "alltoall" if codec.cuttable else "allgather"
        route = route_of(codec, None if codec.routes else wanted)
        self.route = str(NAMED[route].on(device)) if device == "gpu" and route in NAMED else route
        self.contributions = world if route == "allgather" else 1  # that the last stage decodes
        self.runner = TimedRunner(Mirror(world, place))

    def stages(self, tensors: Sequence[torch.Tensor], contexts: Sequence[Context]) -> list[float]:
        """Seconds of each stage: the median of some messages, the second of which has residuals to add."""
        values, memory = [t.clone() for t in tensors], Memory(0)
        send = self.sender(values, contexts, memory)
        measured = []
        for _ in range(1 + (ROUNDS_ON_GPU if self.place.type == "cuda" else ROUNDS)):
            torch._foreach_copy_(values, list(tensors))
            measured.append(send())
            memory.commit()
        return [statistics.median(stage) for stage in zip(*measured[1:])]

    def sender(
        self, tensors: list[torch.Tensor], contexts: Sequence[Context], memory: Memory
    ) -> Callable[[], list[float]]:
        """What replaces tensors by their mean, and returns the seconds of each stage."""
        names, dtype = [context.name for context in contexts], tensors[0].dtype
        message = Message(names, dtype, 0, self.world, STEP, memory=memory)
        if any(context.floor is not None for context in contexts):
            message.floors = [context.floor for context in contexts]
        if any(context.shape is not None for context in contexts):
            message.shapes = Shapes([context.shape for context in contexts])
        values = Values([tensor.view(-1) for tensor in tensors], shaped=tensors)
        program = self.program(names, [tensor.numel() for tensor in tensors], dtype)

        def send() -> list[float]:
            self.runner.submit(program, values, message, _ended)
            return self.runner.times

        return send

    def program(self, names: Sequence[str], sizes: Sequence[int], dtype: torch.dtype) -> HostProgram:
        """The codec's, for messages that are not cut."""
        route, whole = Route.parse(self.route), self.messages()
        topology = self.runner.mirror.topology
        program = compile_route(whole.text, route, names, sizes, dtype, topology, whole.codes_sums)
        return HostProgram(program, whole, _WHOLE)

    def messages(self) -> MessageCodec:
        on_gpu = self.place.type == "cuda"
        found = codec_for_device(self.codec, Route.parse(self.route)) if on_gpu else message_codec(self.codec)
        if found is None:
            raise Unsupported(
                f"{self.codec} is not for the host runner on a GPU, and what streams take is not measured"
            )
        return found


def _ended(outcome: Outcome) -> None:
    if outcome.error is not None:
        raise outcome.error

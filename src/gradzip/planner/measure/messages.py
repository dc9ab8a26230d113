"""What codecs of whole messages cost: the steps of their program, as the host runner takes them, on one rank.

Other ranks are played by this one: what it made for their parts stands for what they would have made for its own. All
parts of the message are equal, so frames fit. Nothing of the wire counts, and nothing of the runner's threads.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...codecs import Codec, Context
from ...codecs.noise import LEAST, MOST, Noise
from ...engines import noise_layout
from ...exchange.codecs import message_codec
from ...exchange.coding import Coder, Message, MessageCodec, Values
from ...exchange.compiler import compile_route
from ...exchange.parts import GRAIN
from ...exchange.program import AllGather, AllToAll, Communicate, Decode, Encode, Program, Recode
from ...exchange.topology import Topology
from ...routes import NAMED
from ...sensitivity.shape import SecondMoments

ROUNDS = 3


class MessageStand:
    """Sends messages of one codec to itself; in place of `coding.Stand`."""

    contributions = 1  # that the last stage decodes
    grain = GRAIN  # values: each rank gets a multiple of it, or parts would not be equal

    def __init__(self, codec: Codec, world: int) -> None:
        found = message_codec(codec)
        assert found is not None
        self._codec: MessageCodec = found
        self.world = world

    def stages(self, tensors: Sequence[torch.Tensor], contexts: Sequence[Context]) -> list[float]:
        """Seconds of a core for each stage, which ends with an exchange: the median of some messages."""
        names = [context.name for context in contexts]
        sizes, topology = [t.numel() for t in tensors], Topology(0, tuple((rank,) for rank in range(self.world)))
        route, sums = NAMED["alltoall"], self._codec.codes_sums
        program = compile_route(self._codec.text, route, names, sizes, tensors[0].dtype, topology, sums)
        shapes = [context.shape for context in contexts]
        values = Values([t.clone() for t in tensors])
        rounds = []
        for step in range(3, 4 + ROUNDS):
            for ours, given in zip(values.tensors, tensors):
                ours.copy_(given)
            message = Message(names, tensors[0].dtype, 0, self.world, step)
            message.shapes = noise_layout.Shapes(shapes) if any(shape is not None for shape in shapes) else None
            rounds.append(_Sending(program, self._codec, values, message).stages())
        return [statistics.median(stage) for stage in zip(*rounds[1:])]


class _Sending:
    """One message of one step."""

    def __init__(self, program: Program, codec: MessageCodec, values: Values, message: Message) -> None:
        self._program, self._codec, self._values, self._message = program, codec, values, message
        self._frames: dict[str, list[torch.Tensor]] = {}  # of a buffer, by owner or by rank

    def stages(self) -> list[float]:
        """Seconds of each stage."""
        found = []
        begun = time.thread_time()
        coder = self._codec.coder(self._message)
        coder.measure(self._values)
        for step in self._program.steps:
            if isinstance(step, Communicate):
                found.append(time.thread_time() - begun)
                self._exchange(step)
                begun = time.thread_time()
            elif isinstance(step, Encode):
                self._encode(step, coder)
            elif isinstance(step, Recode):
                self._recode(step, coder)
            else:
                assert isinstance(step, Decode)
                self._decode(step, coder)
        coder.noisy(self._values)
        return [*found, time.thread_time() - begun]

    def _exchange(self, step: Communicate) -> None:
        """Copies, as what comes from others does not lie where this rank has just written."""
        frames, world = self._frames[step.source], self._program.world
        if isinstance(step, AllToAll):
            self._frames[step.target] = [frame.clone() for frame in frames]
        else:
            assert isinstance(step, AllGather)
            self._frames[step.target] = [frames[0].clone() for _ in range(world)]

    def _encode(self, step: Encode, coder: Coder) -> None:
        """For all others: its own part a rank takes as it is."""
        target = self._program.buffer(step.target)
        table, kind = self._program.table(0, target), self._program.dtype
        others = list(range(1, table.owners))
        rooms = [torch.empty(self._codec.bound(table, owner, kind), dtype=torch.uint8) for owner in others]
        sizes = coder.encode(table, others, self._values, self._program.hop(target.name), rooms)
        self._frames[target.name] = [room[:size] for room, size in zip(rooms, sizes)]

    def _recode(self, step: Recode, coder: Coder) -> None:
        source, target = self._program.buffer(step.source), self._program.buffer(step.target)
        table, by = self._program.table(0, source), self._program.world if step.divide else 1
        room = torch.empty(self._codec.bound(table, 0, torch.float32), dtype=torch.uint8)
        hops = [self._program.hop(buffer.name) for buffer in (source, target)]
        terms = [None, *self._frames[source.name]]
        size = coder.recode(table, 0, terms, self._values, hops[0], by, hops[1], room)
        self._frames[target.name] = [room[:size]]

    def _decode(self, step: Decode, coder: Coder) -> None:
        source = self._program.buffer(step.source)
        table, by = self._program.table(0, source), self._program.world if step.divide else 1
        for owner, frame in enumerate(self._frames[source.name]):
            coder.decode(table, owner, [frame], None, self._program.hop(source.name), self._values, by)


class Shapes(SecondMoments):
    """The shapes of gradients as they will be when second moments have seen enough steps, and what they cost."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        super().__init__([optimizer], names)
        times = []
        for _ in range(1 + ROUNDS):
            begun = time.thread_time()
            self.renew()
            times.append(time.thread_time() - begun)
        self.seconds_per_value = statistics.median(times[1:]) / max(1, sum(p.numel() for p in names))

    def _has_settled(self, parameter: torch.Tensor, name: str, second: torch.Tensor, state: Mapping[str, Any]) -> bool:
        return True


def as_sent(codec: Codec, own: torch.Tensor, mean: torch.Tensor, world: int) -> tuple[Codec, Codec]:
    """Codecs that make of a gradient, and of the mean of all ranks, frames as large as the exchange's.

    The exchange splits the noise between both, and the level of sums follows from those of all ranks: their noise is a
    share of the mean square of the ranks' gradients, not of their mean's.
    """
    if not isinstance(codec, Noise):
        return codec, codec
    share = float(codec.share)
    squares, of_mean = (float(x.double().square().sum()) for x in (own, mean))
    more = (world + 1) / (2 * world * world) * squares / of_mean if 0 < of_mean < math.inf else 1.0
    return (Noise(max(LEAST, share / 2)), Noise(min(MOST, max(LEAST, share / 2 * more))))

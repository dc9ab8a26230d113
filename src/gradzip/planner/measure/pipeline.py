"""What the runtime's threads take for each chunk, beside coding and sockets: small messages on a channel.

Without a GPU that is seconds of a core. Threads that wait for a GPU look again and again, which looks like work: there
it is the time by which one message after the other comes through, less that of coding.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ...codecs import Context, parse
from ...exchange.channel import Channel, open_channel
from ...exchange.codecs import message_codec
from ...exchange.coding import Message
from ...exchange.on_host import HostMessage, runner_of
from ...exchange.outcome import Outcome
from ...feedback import Memory
from .coding import Stand
from .messages import MessageStand
from .wire import own_group

VALUES = 1 << 10  # that each rank gets
MESSAGES, ROUNDS = 8, 5
CODEC = "cast"
_Send = Callable[[Callable[[Outcome], None]], None]  # sends a message; it tells when that is through


def measure_chunk(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds. Call it on all ranks at the same point."""
    gradient = torch.zeros(VALUES * dist.get_world_size(group), device=device)
    if device.type == "cpu":
        return _measured(group, open_channel(group, device), time.process_time, *_by_host_runner(group, gradient))
    from ...collectives import open_channel as open_pipeline

    channel = open_pipeline(group, device)
    return _measured(group, channel, time.perf_counter, *_by_pipeline(group, gradient))


def _measured(
    group: dist.ProcessGroup, channel: Channel, clock: Callable[[], float], coding_s: float, sends: Callable[..., _Send]
) -> float:
    send, worked = sends(channel), []
    for _ in range(1 + ROUNDS):
        done = threading.Semaphore(0)

        def one_is_through(outcome: Outcome, done: threading.Semaphore = done) -> None:
            done.release()

        dist.barrier(own_group(group))
        begun = clock()
        for _ in range(MESSAGES):
            send(one_is_through)
        for _ in range(MESSAGES):
            done.acquire()
        worked.append((clock() - begun) / MESSAGES)
    if channel.error is not None:
        raise channel.error
    channel.leave()
    return max(0.0, statistics.median(worked[1:]) - coding_s)


def _by_host_runner(group: dist.ProcessGroup, gradient: torch.Tensor) -> tuple[float, Callable[[Channel], _Send]]:
    """How long coding a message takes, and how one is sent."""
    rank, world, codec = dist.get_rank(group), dist.get_world_size(group), message_codec(parse(CODEC))
    assert codec is not None
    contexts = [Context("message", world=world, rank=rank)]

    again = itertools.cycle(HostMessage(codec, "alltoall", ["message"], [gradient.clone()]) for _ in range(MESSAGES))

    def sends(channel: Channel) -> _Send:
        def send(done: Callable[[Outcome], None]) -> None:
            message = next(again)
            about = Message(message.names, message.dtype, rank, world)
            runner_of(channel).submit(message.program(channel.topology), message.values, about, done)

        return send

    return sum(MessageStand(parse(CODEC), world).stages([gradient], contexts)), sends


def _by_pipeline(group: dist.ProcessGroup, gradient: torch.Tensor) -> tuple[float, Callable[..., _Send]]:
    """The same on a GPU."""
    from ...collectives import Message, PipelineChannel, submit

    world = dist.get_world_size(group)
    stand = Stand(parse(CODEC), "gpu", gradient.device, world)
    contexts = [Context("message", world=world, rank=dist.get_rank(group))]

    def sends(channel: PipelineChannel) -> _Send:
        def send(done: Callable[[Outcome], None]) -> None:
            submit(Message(parse(CODEC), stand.route, [gradient.clone()], contexts, Memory(0)), channel, done)

        return send

    return sum(stand.stages([gradient], contexts)), sends

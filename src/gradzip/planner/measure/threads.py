"""What the host runner's threads take for each chunk, beside coding and sockets: small messages on a channel.

Without a GPU that is seconds of a core. With one, where threads mostly wait for it, it is the time by which one message
after the other comes through, less that of coding.
"""

from __future__ import annotations

import statistics
import threading
import time

import torch
import torch.distributed as dist

from ...codecs import Context, parse
from ...exchange.coding import Message
from ...exchange.on_host.runner import HostMessage, runner_of
from ...exchange.outcome import Outcome
from ...exchange.peers.channel import open_channel
from .mirror import Stand
from .wire import own_group

VALUES = 1 << 10  # that each rank gets
MESSAGES, ROUNDS = 8, 5
CODEC = "cast"


def measure_chunk(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds. Call it on all ranks at the same point."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    gradients = [torch.zeros(VALUES * world, device=device) for _ in range(MESSAGES)]
    stand = Stand(parse(CODEC), "gpu" if device.type == "cuda" else "cpu", device, world)
    coding_s = sum(stand.stages(gradients[:1], [Context("message 0", world=world, rank=rank)]))
    channel = open_channel(group, device)
    messages = [
        HostMessage(stand.messages(), stand.route, [f"message {number}"], [gradient])
        for number, gradient in enumerate(gradients)
    ]
    prepared = [(message, message.program(channel.topology)) for message in messages]
    worked = []
    for step in range(1 + ROUNDS):
        done = threading.Semaphore(0)

        def one_is_through(outcome: Outcome, done: threading.Semaphore = done) -> None:
            done.release()

        dist.barrier(own_group(group))
        begun = clock()
        for message, program in prepared:
            about = Message(message.names, message.dtype, rank, world, step)
            runner_of(channel).submit(program, message.values, about, one_is_through)
        for _ in range(MESSAGES):
            done.acquire()
        worked.append((clock() - begun) / MESSAGES)
    if channel.error is not None:
        raise channel.error
    channel.leave()
    return max(0.0, statistics.median(worked[1:]) - coding_s)

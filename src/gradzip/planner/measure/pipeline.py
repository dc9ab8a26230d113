"""What the runtime's threads take for each chunk, beside coding and sockets: small messages on a channel.

Without a GPU that is seconds of a core. Threads that wait for a GPU look again and again, which looks like work: there
it is the time by which one message after the other comes through, less that of coding.
"""

from __future__ import annotations

import statistics
import threading
import time

import torch
import torch.distributed as dist

from ...codecs import Context, parse
from ...collectives import Message, open_channel, submit
from ...exchange.outcome import Outcome
from ...feedback import Memory
from .coding import Stand
from .wire import own_group

VALUES = 1 << 10  # that each rank gets
MESSAGES, ROUNDS = 8, 5
CODEC = "cast"


def measure_chunk(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds. Call it on all ranks at the same point."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    world = dist.get_world_size(group)
    gradient = torch.zeros(VALUES * world, device=device)
    stand = Stand(parse(CODEC), "gpu" if device.type == "cuda" else "cpu", device, world)
    contexts = [Context("message", world=world, rank=dist.get_rank(group))]
    coding_s = sum(stand.stages([gradient], contexts))
    channel = open_channel(group, device)
    worked = []
    for _ in range(1 + ROUNDS):
        done = threading.Semaphore(0)

        def one_is_through(outcome: Outcome, done: threading.Semaphore = done) -> None:
            done.release()

        dist.barrier(own_group(group))
        begun = clock()
        for _ in range(MESSAGES):
            submit(Message(parse(CODEC), stand.route, [gradient.clone()], contexts, Memory(0)), channel, one_is_through)
        for _ in range(MESSAGES):
            done.acquire()
        worked.append((clock() - begun) / MESSAGES)
    if channel.error is not None:
        raise channel.error
    channel.leave()
    return max(0.0, statistics.median(worked[1:]) - coding_s)

"""Uncompressed averaging through DDP's own process group, to the bit as DDP does it by itself.

No thread or connection of gradzip's carries data here. The channel counts what is sent, and finds out why where a sum
over Gloo fails; NCCL's do not say that they did.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..errors import PeerError
from .outcome import Outcome
from .peers.channel import Channel
from .peers.gloo import Broken

_AT_EXIT = 6.0  # seconds that peers have to come to their end, and with it to that of what is under way to them
_changed = threading.Condition()
_under_way = 0
_leaving = False  # there is no time for explanations


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """What carries a group's tensors on that kind of device."""
    try:
        return str(group._get_backend(device).name())
    except RuntimeError:
        return "none"


def average(
    buffer: torch.Tensor,
    group: dist.ProcessGroup,
    channel: Channel,
    done: Callable[[Outcome], None],
    wait: bool = False,
) -> torch.futures.Future[torch.Tensor]:
    """Divided first, then one sum of torch's. `done` is called when data has come, or at once on a GPU.

    There nobody waits on the host, unless told to: the future is of the device, as NCCL's are. (Gloo's are not before
    torch 2.11: what follows on another stream than the default one would not wait for the mean.)
    """
    size, world, groups = buffer.numel() * buffer.itemsize, channel.world, channel.groups
    sent = 2 * (world - 1) * size // world
    out = sent // (groups["intra"].size if "intra" in groups else 1)  # one rank of a host passes it on
    arrived = channel.watch.began_elsewhere(f"plain averaging of {size} bytes")

    def ended(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        arrived()
        outcome = Outcome(bytes_sent=sent, bytes_out=out, collectives=1)
        try:
            mean = future.value()[0]
            if wait and mean.device.type == "cuda":
                torch.cuda.current_stream(mean.device).synchronize()
            return mean
        except BaseException as error:
            outcome.error = error  # whatever becomes of the explanation
            if _leaving or not isinstance(error, Exception):
                raise
            outcome.error = channel.explained(Broken(None, error))
            raise PeerError(str(outcome.error)) from error
        finally:
            done(outcome)
            _count(-1)

    _count(1)
    try:
        work = dist.all_reduce(buffer.mul_(1 / world), group=group, async_op=True)
    except BaseException:  # it has not begun, and nobody should wait for its end
        arrived()
        _count(-1)
        raise
    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(ended)
    return averaged


def _count(more: int) -> None:
    global _under_way
    with _changed:
        _under_way += more
        _changed.notify_all()


@atexit.register
def _wait_for_the_end() -> None:
    """A sum that fails calls back: once Python has shut down, that would take the process down."""
    global _leaving
    _leaving = True
    with _changed:
        if _under_way <= 0:
            return
        _changed.wait_for(lambda: _under_way <= 0, _AT_EXIT)
    time.sleep(0.1)  # the last one is on its way back from here to torch


def _disown() -> None:
    """In a forked child nothing is under way: the sums, and the threads that wait for them, are the parent's."""
    global _changed, _under_way
    _changed, _under_way = threading.Condition(), 0


os.register_at_fork(after_in_child=_disown)

"""Stands in for a GPU with NCCL: the kernels run on the CPU, Gloo carries what they make, and streams do nothing."""

from __future__ import annotations

import logging

import emulated
import torch
import torch.distributed as dist

from gradzip.engines.cuda import launch, pack_select
from gradzip.exchange.on_stream import runner as on_stream
from gradzip.exchange.on_stream import slots


def install(room: float = 100.0) -> None:
    """From now on, attach takes models on the CPU for models on a GPU with NCCL.

    `room`: of the first slots. By default every frame fits, so that none is coarser than the interpreter's.
    """
    slots.FIRST_ROOM = room
    logging.getLogger("gradzip").setLevel(logging.WARNING)
    emulated.install()
    launch.load_once.cache_clear()
    on_stream.reason_against = lambda group, device: None  # type: ignore[assignment]
    on_stream.all_reduce = in_order
    pack_select.serves = lambda tensor: tensor.is_contiguous()  # type: ignore[assignment]


class Done:
    def wait(self) -> None:
        pass


def in_order(values: torch.Tensor, group: dist.ProcessGroup) -> Done:
    """Adds up in the order of ranks, as the host runner does; NCCL and Gloo have orders of their own."""
    everybodys = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybodys, values.contiguous(), group=group)
    for term in everybodys[1:]:
        everybodys[0].add_(term)
    values.copy_(everybodys[0])
    return Done()

"""Routes: how a message of gradients becomes their mean over all ranks.

    allgather   every rank sends its frames to all; each decodes and adds all of them, in the order of ranks
    allreduce   for summable codecs: the numbers inside the frames are averaged, then decoded once
    factors     for codecs of several rounds: the codec asks for one average after the other

Every route ends with the same bits on all ranks, and every encode that loses something leaves a residual in Memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .codecs.base import Codec, Context, wide
from .engines.layout import Floor
from .errors import CodecError, Corrupt, Unsupported, nearest
from .feedback import Memory
from .peers import Peers
from .sensitivity.near import memory_order

_TABLE_ENTRY = 8  # bytes per frame size


@dataclass
class Message:
    """Gradients that travel together by one route; `exchange` replaces them by their mean over all ranks."""

    codec: Codec
    route: str
    tensors: list[torch.Tensor]
    contexts: list[Context]  # one for each tensor
    memory: Memory
    scale: float = 1.0  # the loss scale that the gradients carry
    policy: str = ""  # what the whole step does, so that a difference shows at its first message

    def describe(self) -> str:
        """What all ranks must agree on."""
        layout = [f"{ctx.name}{tuple(t.shape)}{t.dtype}" for ctx, t in zip(self.contexts, self.tensors)]
        grid = [(f.c0, f.c1, f.c2) for ctx in self.contexts if isinstance(f := ctx.floor, Floor)]
        first = self.contexts[0]
        return (
            f"{self.codec} by {self.route} at step {first.step} for {first.name!r} and {len(layout) - 1} more "
            f"(layout {_digest(layout)}, grid {_digest(grid)}; {self.policy})"
        )

    def finite(self) -> bool:
        return all(bool(t.isfinite().all()) for t in self.tensors)


def _digest(items: object) -> str:
    return hashlib.blake2b(repr(items).encode(), digest_size=4).hexdigest()


Route = Callable[[Message, Peers], bool]


def exchange(message: Message, peers: Peers) -> bool:
    """Replaces the message's tensors by their mean; True if the gradients of all ranks were finite."""
    return ROUTES[message.route](message, peers)


def allgather(message: Message, peers: Peers) -> bool:
    frames = _encode(message)
    table = torch.tensor([f.numel() for f in frames], dtype=torch.int64).view(torch.uint8)
    payload = torch.cat([table, *map(_padded, frames)])
    sizes, finite = peers.agree(message.describe(), payload.numel(), message.finite())
    received = [_split(p, len(frames), rank) for rank, p in enumerate(peers.gather(payload, sizes))]
    for tensor, ctx, parts in zip(message.tensors, message.contexts, zip(*received)):
        total = wide(_decode(message.codec, ctx, parts[0], 0))
        for rank in range(1, peers.size):
            total += wide(_decode(message.codec, ctx, parts[rank], rank))
        tensor.copy_(unflatten(total / peers.size, tensor))
    return finite


def allreduce(message: Message, peers: Peers) -> bool:
    codec = message.codec
    frames = _encode(message)
    addends = [codec.addends(frame) for frame in frames]
    flat = torch.cat(addends)
    what = f"{message.describe()}, {flat.numel()} values"
    _, finite = peers.agree(what, flat.numel() * flat.itemsize, message.finite())
    peers.average(flat)
    for own, mean in zip(addends, flat.split_with_sizes([a.numel() for a in addends])):
        own.copy_(mean)
    for tensor, ctx, frame in zip(message.tensors, message.contexts, frames):
        tensor.copy_(unflatten(codec.decode(frame, ctx), tensor))
    return finite


def factors(message: Message, peers: Peers) -> bool:
    names = [ctx.name for ctx in message.contexts]
    inputs = [message.memory.compensated(n, t, message.scale) for n, t in zip(names, message.tensors)]
    all_finite = message.finite()

    def average(flat: torch.Tensor) -> None:
        nonlocal all_finite
        what = f"{message.describe()}, {flat.numel()} values"
        _, all_finite = peers.agree(what, flat.numel() * flat.itemsize, all_finite)
        peers.average(flat)

    for name, tensor, result in zip(names, message.tensors, message.codec.reduce(inputs, message.contexts, average)):
        message.memory.lost(name, result.residual, message.scale)
        tensor.copy_(result.mean)
    return all_finite


def flatten(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x's values in the order in which those of `like` lie in memory; a view where x lies that way too.

    Codecs see gradients and floors so. It is not row-major for channels_last or transposed parameters.
    """
    return x.permute(memory_order(like)).reshape(-1)


def unflatten(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of `flatten`; a view."""
    order = memory_order(like)
    back = sorted(range(like.dim()), key=order.__getitem__)
    return flat.view([like.shape[d] for d in order]).permute(back)


ROUTES: dict[str, Route] = {"allgather": allgather, "allreduce": allreduce, "factors": factors}


def route_of(codec: Codec, wanted: str | None = None) -> str:
    """The route that a codec takes; Unsupported if the wanted one does not exist or does not fit."""
    if wanted is None:
        return "factors" if codec.rounds > 1 else "allreduce" if codec.summable else "allgather"
    if wanted not in ROUTES:
        raise Unsupported(f"unknown route {wanted!r}{nearest(wanted, ROUTES)}; there are {', '.join(ROUTES)}")
    if (wanted == "factors") != (codec.rounds > 1):
        raise Unsupported(f"{codec} cannot go by {wanted!r}: 'factors' is for codecs of several rounds alone")
    if wanted == "allreduce" and not codec.summable:
        raise Unsupported(f"frames of {codec} cannot be added up: send it by 'allgather'")
    return wanted


def _encode(message: Message) -> list[torch.Tensor]:
    """A frame for each tensor, what was lost before included; what is lost now goes to memory."""
    frames = []
    for tensor, ctx in zip(message.tensors, message.contexts):
        x = message.memory.compensated(ctx.name, tensor, message.scale)
        frame = message.codec.encode(flatten(x, tensor).to(tensor.dtype), ctx)
        residual = None
        if message.codec.biased:
            residual = wide(x) - unflatten(message.codec.decode(frame, ctx), tensor)
        message.memory.lost(ctx.name, residual, message.scale)
        frames.append(frame)
    return frames


def _decode(codec: Codec, ctx: Context, frame: torch.Tensor, rank: int) -> torch.Tensor:
    try:
        return codec.decode(frame, ctx)
    except CodecError as error:
        raise type(error)(f"{ctx.name!r} from rank {rank}: {error}") from error


def _padded(frame: torch.Tensor) -> torch.Tensor:
    """Frames start at multiples of 8 bytes, so that values inside are aligned."""
    return torch.nn.functional.pad(frame, (0, -frame.numel() % 8))


def _split(payload: torch.Tensor, count: int, rank: int) -> list[torch.Tensor]:
    """The frames of a rank's payload, which starts with a table of their sizes."""
    start = count * _TABLE_ENTRY
    sizes = payload[:start].view(torch.int64).tolist() if payload.numel() >= start else [-1]
    frames = []
    for size in sizes:
        if size < 0 or start + size > payload.numel():
            raise Corrupt(f"the message of rank {rank} does not hold the {count} frames it should")
        frames.append(payload[start : start + size])
        start += size + -size % 8
    if start != payload.numel():
        raise Corrupt(f"{payload.numel() - start} bytes follow the last frame of rank {rank}")
    return frames

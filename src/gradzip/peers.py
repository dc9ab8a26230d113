"""The other ranks, as the worker sees them: agreeing before every exchange, and the exchanges themselves.

Rules that keep ranks from hanging or crashing each other:

* Before every exchange each rank offers a row of numbers that says what it is about to do. All ranks see all rows,
  so all of them find a difference at the same point, and all raise.
* A rank that fails says so in its next offer. After a failure nobody uses the group again.
* Sums are formed in float32 (float64 for float64), in the order of ranks, whatever part of a message a value lies
  in. So results do not depend on how gradients are bucketed. (Gloo's own all-reduce adds in an order that does.)
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from . import wire
from .codecs.base import wide
from .errors import PeerError
from .worker import pause

_OFFER = 5  # version, whether the rank is well, digest of what it does, payload bytes, whether its values are finite
_SHORTEST_PAUSE, _LONGEST_PAUSE = 2e-5, 1e-3  # seconds between looks at whether a collective is done
_TEXT_BYTES = 2048  # of the explanation that each rank gives once something is wrong


class Peers:
    """A group of ranks over Gloo, for the use of one thread."""

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: timedelta | None = None) -> None:
        """A new group of the same ranks as `group` (default: all ranks), with its own connections."""
        if group is None or group == dist.group.WORLD:
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        else:
            ranks = dist.get_process_group_ranks(group)
            self._group = dist.new_group(ranks, backend="gloo", timeout=timeout, use_local_synchronization=True)
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)
        self.bytes_sent = 0  # by this rank, payloads and offers
        self.exchanges = 0  # data exchanges, offers not counted

    def close(self) -> None:
        dist.destroy_process_group(self._group)

    # -- agreement ----------------------------------------------------------------------------------------------

    def agree(self, what: str, payload_bytes: int, finite: bool = True) -> tuple[list[int], bool]:
        """The payload bytes of every rank, and whether the values of all ranks are finite.

        Raises PeerError on every rank if one of them does not do `what` this rank does.
        """
        offers = self._offer([wire.VERSION, 1, _digest(what), payload_bytes, int(finite)])
        versions = [offer[0] for offer in offers]
        if len(set(versions)) > 1:
            raise PeerError(f"ranks speak different formats ({_by_rank(versions)}): use one gradzip on all of them")
        failed = [rank for rank, offer in enumerate(offers) if not offer[1]]
        if failed:
            self._explain(what, lambda texts: "; ".join(f"rank {rank} failed: {texts[rank]}" for rank in failed))
        digests = [offer[2] for offer in offers]
        if len(set(digests)) > 1:
            other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
            self._explain(
                what,
                lambda texts: f"ranks disagree. Rank 0: {texts[0]}. Rank {other}: {texts[other]}. "
                "Use the same policy, model, optimizer settings and gradzip on all ranks",
            )
        return [offer[3] for offer in offers], all(offer[4] for offer in offers)

    def announce(self, error: BaseException, patience: float) -> None:
        """Tells the other ranks, in place of this rank's next agreement, that it has failed and why.

        They listen at their own next agreement, which may be far off: after `patience` seconds this returns, and a
        thread goes on waiting for them. The group must not be used again.
        """

        def tell() -> None:
            with contextlib.suppress(Exception):  # nobody is left to hear it, or the script is ending
                self._offer([wire.VERSION, 0, 0, 0, 0])
                self._texts(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=tell, name="gradzip-failure", daemon=True)
        thread.start()
        thread.join(patience)

    def _explain(self, text: str, message: Callable[[list[str]], str]) -> NoReturn:
        raise PeerError(message(self._texts(text)))

    def _offer(self, row: list[int]) -> list[list[int]]:
        return [t.tolist() for t in self._all_gather(torch.tensor(row, dtype=torch.int64))]

    def _texts(self, text: str) -> list[str]:
        raw = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        parts = self._all_gather(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        return [bytes(part.tolist()).rstrip(b"\0").decode(errors="replace") for part in parts]

    # -- exchanges ----------------------------------------------------------------------------------------------

    def gather(self, payload: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
        """The uint8 payloads of all ranks, in the order of ranks; `sizes` is what they agreed on."""
        self.exchanges += 1
        padded = payload
        if payload.numel() < max(sizes):  # Gloo gathers equal sizes only
            padded = torch.zeros(max(sizes), dtype=torch.uint8)
            padded[: payload.numel()] = payload
        return [part[:size] for part, size in zip(self._all_gather(padded), sizes)]

    def average(self, x: torch.Tensor) -> None:
        """Replaces contiguous x by its mean over all ranks. Each rank averages its share and hands it round."""
        self.exchanges += 1
        if not x.numel():
            return
        share = -(-x.numel() // self.size)
        out = torch.zeros(self.size, share, dtype=x.dtype)
        out.view(-1)[: x.numel()] = x.view(-1)
        parts = torch.empty_like(out)
        # As bytes, because Gloo does not know every type.
        self._wait(lambda: dist.all_to_all_single(_bytes(parts), _bytes(out), group=self._group, async_op=True))
        self.bytes_sent += (self.size - 1) * share * x.itemsize
        mean = wide(parts[0]).clone()
        for part in parts[1:]:
            mean += wide(part)
        mean /= self.size
        shares = self._all_gather(_bytes(mean.to(x.dtype)))
        x.view(-1).copy_(torch.cat(shares).view(x.dtype)[: x.numel()])

    def ring_bytes(self, size: int) -> int:
        """What each rank sends in a ring all-reduce of `size` bytes."""
        return 2 * (self.size - 1) * size // self.size

    def _all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = list(torch.empty((self.size, *x.shape), dtype=x.dtype).unbind())
        self._wait(lambda: dist.all_gather(parts, x, group=self._group, async_op=True))
        self.bytes_sent += (self.size - 1) * x.numel() * x.itemsize
        return parts

    def _wait(self, start: Callable[[], dist.Work | None]) -> None:
        """Runs an asynchronous collective to its end."""
        try:
            work = start()
            assert work is not None
            seconds = _SHORTEST_PAUSE
            while not work.is_completed():  # work.wait() would not notice that Python shuts down
                pause(seconds)
                seconds = min(2 * seconds, _LONGEST_PAUSE)
            work.wait()  # raises what went wrong
        except RuntimeError as cause:
            raise PeerError(f"rank {self.rank} lost its peers, one of which died, failed or hangs: {cause}") from cause


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _by_rank(values: list[int]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))

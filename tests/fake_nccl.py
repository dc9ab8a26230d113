"""Stands in for NCCL where there is no GPU: messages without tags, matched by their order alone, of exact sizes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from gradzip.collectives import channel, transports
from gradzip.exchange.peers.gloo import Broken, Gloo

longest = 0.0  # seconds that an exchange is late, at random


class Ordered:
    """A communicator over Gloo. Ranks that issue in different orders, or other sizes, hang or fail as NCCL's would."""

    def __init__(self, store: Store, rank: int, world: int, device: torch.device) -> None:
        self.device = device
        self._gloo = Gloo(PrefixStore("ordered", store), rank, world, timedelta(seconds=30))
        self._late = random.Random(rank)
        self._number = 0
        self._error: Exception | None = None
        self._last: threading.Thread | None = None

    def exchange(self, into: Mapping[int, torch.Tensor], out: Mapping[int, torch.Tensor]) -> Callable[[], bool]:
        assert all(part.numel() for part in (*into.values(), *out.values())), "NCCL is not asked to send nothing"
        self._number += 2
        number = self._number
        said = {rank: torch.empty(1, dtype=torch.int64) for rank in into}

        def run() -> None:
            sizes = [(rank, torch.tensor([part.numel()])) for rank, part in out.items()]
            self._gloo.send(sizes, list(said.items()), number).wait()
            assert {rank: int(size) for rank, size in said.items()} == {rank: p.numel() for rank, p in into.items()}
            self._gloo.send(list(out.items()), list(into.items()), number + 1).wait()

        return self._start(run)

    def sum(self, tensor: torch.Tensor) -> Callable[[], bool]:
        return self._start(lambda: self._gloo.all_reduce(tensor).wait())

    def sums(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point

    def _start(self, run: Callable[[], Any]) -> Callable[[], bool]:
        before, done = self._last, threading.Event()

        def one_after_the_other() -> None:
            if before is not None:
                before.join()
            time.sleep(self._late.random() * longest)
            try:
                run()
                done.set()
            except Exception as error:
                self._error = error

        self._last = threading.Thread(target=one_after_the_other, daemon=True)
        self._last.start()
        return done.is_set

    def check(self) -> None:
        if self._error is not None:
            raise Broken(None, RuntimeError(str(self._error)))

    def abort(self) -> None:
        self._gloo.abort()

    def close(self) -> None:
        if self._last is not None:
            self._last.join(5)
        self._gloo.close()


def stand_in(least: int = 0) -> None:
    """From now on, channels of this process that ask for NCCL get this, for chunks of at least so many bytes."""
    channel._make_communicator = Ordered
    channel._least = least
    transports.reason_against = lambda group, device: None  # type: ignore[assignment]

"""A channel with what the jobs of this package need: their pipeline, and a carrier between GPUs if it is asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from ..errors import PeerError
from ..exchange.peers import channel as connections
from ..exchange.peers.gloo import Broken
from ..exchange.peers.transports import GLOO, NCCL, TRANSPORT
from ..exchange.topology import Topology
from . import nccl, transports
from .carrier import LEAST, Carrier, Communicator
from .pipeline import ROW_VERSION, Agreement, Pipeline

_LAST_WORDS = 2.0  # seconds that a rank has to say why it closed its connections
_make_communicator: Callable[[Store, int, int, torch.device], Communicator] = nccl.Communicator  # tests have another
_least = LEAST


class PipelineChannel(connections.Channel):
    _sums = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        topology: Topology,
        timeout: timedelta,
        heartbeat: timedelta,
        transport: str = GLOO,
    ) -> None:
        self.transport = transport
        super().__init__(group, device, topology, timeout, heartbeat)
        self._message_timeout = timeout
        self.carrier: Carrier | None = None
        self.pipeline = Pipeline(
            self.gloo, self.groups, self.buffers, self.explained, self._disagreement, device, self.watch.saw
        )
        self.workers.append(self.pipeline)

    def start(self) -> None:
        super().start()
        if self.transport == NCCL and self.world > 1:
            made = self._communicator(self._message_timeout)
            self.carrier = Carrier(self.gloo, made, self._message_timeout, self._failed_alone, _least)
            self.pipeline.carrier = self.carrier

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"rows": ROW_VERSION, "transport": self.transport}

    def describe(self, number: int) -> str:
        return self.pipeline.describe(number)

    def _communicator(self, timeout: timedelta) -> Communicator:
        """NCCL's waits cannot be ended from outside before there is a communicator: so a thread makes it."""
        made: list[Communicator | BaseException] = []
        lock, given_up = threading.Lock(), False

        def make() -> None:
            result: Communicator | BaseException
            try:
                result = _make_communicator(self._store, self.rank, self.world, self.device)
            except BaseException as error:
                result = error
            with lock:
                made.append(result)
            if given_up and not isinstance(result, BaseException):
                result.abort()  # what it has on the GPU would hold that up for ever

        thread = threading.Thread(target=make, name="gradzip-nccl", daemon=True)
        thread.start()
        deadline = time.monotonic() + timeout.total_seconds()
        while thread.is_alive() and self.error is None and time.monotonic() < deadline:
            thread.join(0.05)
        with lock:
            given_up = not made
        found = made[0] if not given_up else self.error or PeerError(f"ranks did not meet over NCCL within {timeout}")
        if not isinstance(found, BaseException):
            return found
        if isinstance(found, Broken) and self.error is None and self.health.cause(_LAST_WORDS) is None:
            found = PeerError(
                f"rank {self.rank} could not connect to the others over NCCL ({found}): leave transport={NCCL!r} out, "
                f"or set {TRANSPORT}={GLOO}"
            )
        raise self.explained(found) if isinstance(found, Broken) else self.fail(found)

    def carries(self, size: int) -> bool:
        """Whether a chunk of so many bytes goes from GPU to GPU, where its route allows that."""
        return self.carrier is not None and size >= self.carrier.least

    def _failed_alone(self, error: BaseException) -> None:
        """An error that no job has met."""
        self.pipeline.fail(self.explained(error))

    def abort(self) -> None:
        super().abort()
        if self.carrier is not None:
            self.carrier.abort()

    def abort_at_exit(self) -> None:
        super().abort_at_exit()
        if self.carrier is not None and not self.carrier.idle:
            self.carrier.abort()

    def _disagreement(self, agreement: Agreement) -> PeerError:
        ranks = list(range(self.world))
        texts = self.health.exchange_texts(f"text/{agreement.number}", agreement.what, ranks)
        other = next((i for i, text in enumerate(texts) if text != texts[0]), len(ranks) - 1)
        return PeerError(
            f"ranks disagree. Rank {ranks[0]}: {texts[0]}. Rank {ranks[other]}: {texts[other]}. "
            "Use the same policy, model, optimizer settings and gradzip on all ranks"
        )


def open_channel(
    group: dist.ProcessGroup,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    timeout: timedelta | None = None,
    heartbeat: timedelta | None = None,
    transport: str | None = None,
) -> PipelineChannel:
    """The channel of these ranks: one that is open already, or a new one. Call it on all of them at the same point."""
    transport = transports.choose(transport, group, device)
    return connections.open_kind(PipelineChannel, group, device, mesh, timeout, heartbeat, transport)

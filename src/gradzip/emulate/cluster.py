"""The shape of an emulated cluster, and what each of its ranks finds in its environment."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from ..errors import EmulationError

MOST_HOSTS = 250  # addresses differ in one byte
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SLOWEST = 10**6  # bit/s; below, starting a process group takes minutes


def parse_rate(text: str) -> int:
    """Bits per second of '100mbit', '1gbit' or '2.5gbit'."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.strip().lower())
    if match is None:
        raise EmulationError(f"cannot read the rate {text!r}: write bits per second, like 100mbit, 1gbit or 2.5gbit")
    return round(float(match[1]) * _UNITS[match[2]])


def format_rate(rate: float) -> str:
    """For people: '956 Mbit/s', '2.39 Gbit/s'."""
    value, unit = (rate / 1e9, "Gbit/s") if rate >= 1e9 else (rate / 1e6, "Mbit/s")
    return f"{value:.3g} {unit}"


@dataclass(frozen=True)
class Cluster:
    hosts: int
    ranks_per_host: int = 1
    rate: int | None = None  # bit/s of every host, each way; None: no namespaces, all ranks on the loopback
    gpu_share: bool = False
    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise EmulationError(f"cannot emulate {self.hosts} hosts: 1 to {MOST_HOSTS}")
        if self.ranks_per_host < 1:
            raise EmulationError("every host needs at least one rank")
        if self.rate is not None and self.rate < _SLOWEST:
            slow, least = format_rate(self.rate), format_rate(_SLOWEST)
            raise EmulationError(f"{slow} is too slow to start a process group: choose at least {least}")

    @property
    def world(self) -> int:
        return self.hosts * self.ranks_per_host

    def host_of(self, rank: int) -> int:
        return rank // self.ranks_per_host

    def environment(self, rank: int, interface: str, master: tuple[str, int]) -> dict[str, str]:
        """What torchrun would set for this rank, and what keeps Gloo and NCCL on the emulated network."""
        address, port = master
        variables = {
            "RANK": rank,
            "WORLD_SIZE": self.world,
            "LOCAL_RANK": rank % self.ranks_per_host,
            "LOCAL_WORLD_SIZE": self.ranks_per_host,
            "GROUP_RANK": self.host_of(rank),
            "GROUP_WORLD_SIZE": self.hosts,
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            "NCCL_IB_DISABLE": 1,
            "GRADZIP_NETWORK": f"{self.hosts} emulated hosts, {format_rate(self.rate) if self.rate else 'no limit'}",
        }
        unless_set = {
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # c10d warns of every address that has no name
            "OMP_NUM_THREADS": max(1, len(os.sched_getaffinity(0)) // self.world),
            "PYTHONUNBUFFERED": 1,  # or a rank's lines would come when it ends
        }
        variables |= {name: value for name, value in unless_set.items() if name not in os.environ}
        return {name: str(value) for name, value in variables.items()} | self._gpu_environment(rank)

    def _gpu_environment(self, rank: int) -> dict[str, str]:
        """NCCL takes ranks with one NCCL_HOSTID for one host: it joins them past the network, and refuses two on a GPU.

        With too few GPUs and without gpu_share it is left to refuse them: they would wait for each other unnoticed.
        """
        if self.gpu_share:
            return {"NCCL_HOSTID": f"rank{rank}"}
        if len(self.gpus) < self.world:
            return {}
        host = self.host_of(rank)
        own = self.gpus[host * self.ranks_per_host : (host + 1) * self.ranks_per_host]
        return {"NCCL_HOSTID": f"host{host}", "CUDA_VISIBLE_DEVICES": ",".join(own)}

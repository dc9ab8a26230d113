"""Which ranks share a host: the flat, intra-host and inter-host groups that routes speak of."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from ..errors import Unsupported
from ..routes import Route


class Members(NamedTuple):
    """Some ranks that exchange data, and this one's place among them."""

    rank: int  # this one's number among them
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Topology:
    """Ranks are numbers in the group that exchanges gradients; every host holds equally many, or routes stay flat."""

    rank: int
    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of_ranks(cls, rank: int, ranks: Sequence[int], environment: Mapping[str, str] = os.environ) -> Topology:
        """From the launcher: LOCAL_WORLD_SIZE ranks in a row share a host; `ranks` are numbers in the job."""
        per_host = int(environment.get("LOCAL_WORLD_SIZE", "1"))
        hosts: dict[int, list[int]] = {}
        for number, overall in enumerate(ranks):
            hosts.setdefault(overall // per_host, []).append(number)
        return cls(rank, tuple(map(tuple, hosts.values())))

    @classmethod
    def of_mesh(cls, rank: int, ranks: Sequence[int], mesh: DeviceMesh) -> Topology:
        """From a DeviceMesh of two dimensions, hosts first."""
        if mesh.ndim != 2 or sorted(mesh.mesh.flatten().tolist()) != sorted(ranks):
            raise Unsupported(
                f"the mesh {tuple(mesh.mesh.shape)} must have two dimensions, hosts and ranks of a host, over all ranks"
            )
        place = {overall: number for number, overall in enumerate(ranks)}
        return cls(rank, tuple(tuple(place[r] for r in row) for row in mesh.mesh.tolist()))

    @property
    def world(self) -> int:
        return sum(map(len, self.hosts))

    @property
    def even(self) -> bool:
        return len({len(host) for host in self.hosts}) == 1

    @property
    def single(self) -> bool:
        """Whether each host has one rank, or all ranks are on one host: then there is but one group."""
        return len(self.hosts) == 1 or all(len(host) == 1 for host in self.hosts)

    @property
    def default_route(self) -> str:
        """Flat exchanges would send more over each host's link than a hierarchical one."""
        return "hierarchical" if self.even and not self.single else "alltoall"

    def groups(self) -> dict[str, Members]:
        everybody = tuple(sorted(r for host in self.hosts for r in host))
        found = {"flat": Members(self.rank, everybody)}
        if self.even:
            host = next(host for host in self.hosts if self.rank in host)
            local = host.index(self.rank)
            across = tuple(other[local] for other in self.hosts)
            found["intra"] = Members(local, host)
            found["inter"] = Members(across.index(self.rank), across)
        return found

    def check(self, route: Route) -> None:
        if route.hierarchical and not self.even:
            sizes = ", ".join(str(len(host)) for host in self.hosts)
            raise Unsupported(f"{str(route)!r} needs equally many ranks on every host; here they hold {sizes}")

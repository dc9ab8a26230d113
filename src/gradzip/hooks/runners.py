"""Which runner carries the gradients of a step: see exchange/on_stream.py and exchange/on_host.py."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from ..errors import Unsupported
from ..exchange import on_stream
from ..exchange.codecs import stream_codec
from ..gradients import PLAIN, Way
from ..routes import NAMED

STREAM, HOST = "stream", "host"
_FLAT = {
    "allreduce",
    "alltoall",
    str(NAMED["alltoall"].on("gpu")),
}  # routes that the stream runner's program stands for


def choose(ways: Mapping[str, Way], device: torch.device, group: dist.ProcessGroup, learns: bool) -> str:
    """The stream runner where every gradient can go by it; Unsupported where one could go by nothing else.

    `learns`: the policy looks at means on the host. Plain averaging stays with torch.
    """
    reason = on_stream.reason_against(group, device)
    other = next((way for way in ways.values() if stream_codec(way.codec) is None or way.route not in _FLAT), None)
    if reason is None and other is None and not learns and any(way.kind != PLAIN for way in ways.values()):
        return STREAM
    whole = next((way.codec for way in ways.values() if way.codec.shaped), None)
    if device.type == "cpu" or whole is None:
        return HOST
    if reason is None and other is not None:
        reason = (
            f"other gradients of the model have {other.kind}, and on a GPU the two cannot be mixed: use noise, "
            "int8, int4, fp8, cast and identity for all of them"
        )
    elif reason is None:
        reason = "the policy looks at averaged gradients, which stay on the GPU: use one that does not, such as Fixed"
    raise Unsupported(f"{whole} on {device}: {reason}")

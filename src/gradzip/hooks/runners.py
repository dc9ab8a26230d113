"""Which runner carries the gradients of a step: see exchange/on_stream/runner.py and exchange/on_host/runner.py.

Streams do where NCCL is the group's backend for GPUs, torch is new enough, and they can carry every gradient. All else
goes by the host, over Gloo, but for models that are not compressed, whose sums are left to torch. `noise` on a GPU goes
by streams or is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist

from ..errors import Unsupported
from ..exchange.message_codecs import places_of, stream_codec
from ..exchange.on_stream import factors as factors_on_device
from ..exchange.on_stream import runner as on_stream
from ..exchange.topology import Topology
from ..exchange.way import PLAIN, Way
from ..routes import FACTORS

STREAM, HOST, TORCH = "stream", "host", "torch"
TRANSPORT = "GRADZIP_TRANSPORT"  # once chose what carries messages


def check_unchosen(transport: str | None) -> None:
    """Unsupported for who chooses what carries messages, by an argument or by the environment: that follows."""
    word = os.environ.get(TRANSPORT, "").strip()
    if word or transport is not None:
        said, cure = (
            (f"{TRANSPORT}={word!r}", "do not set it") if word else (f"transport={transport!r}", "leave it out")
        )
        raise Unsupported(
            f"{said}: what carries messages cannot be chosen any more. Models on GPUs go by streams on DDP's own NCCL "
            "group where all ranks know how large frames are, and all else goes by the host runner over Gloo "
            f"(stats()['runner']). So {cure}"
        )


def choose(
    ways: Mapping[str, Way],
    types: Mapping[str, torch.dtype],
    device: torch.device,
    group: dist.ProcessGroup,
    patient: bool = False,
) -> str:
    """The stream runner where every gradient can go by it, else the host runner; Unsupported where neither takes all.

    `types` are those of the parameters. `patient`: what is lost of parameters that no rank has used has to wait, which
    the host finds out. Plain averaging stays with torch.
    """
    reason = on_stream.reason_against(group, device)
    other = next((way for name, way in ways.items() if not _streams(way, types[name], patient)), None)
    factors = None if reason or other else next((way for way in ways.values() if way.route == FACTORS), None)
    if factors is not None:
        # Means of other types are left to the host: factors and what travels with them are float32.
        wide = all(types[name] == torch.float32 for name, way in ways.items() if way.late)
        other = factors if patient or not wide else None
    if reason is None and other is None and any(way.kind != PLAIN for way in ways.values()):
        return STREAM
    unheld = {name: why for name, way in ways.items() if (why := _reason_against_host(way, device)) is not None}
    if not unheld:
        return HOST
    name, why = next(iter(unheld.items()))
    way = ways[name]
    if reason is None and other is not None and other is not way:
        reason = (
            f"other gradients of the model have {other.kind}, which streams cannot carry here, and on a GPU the two "
            "cannot be mixed: use codecs that streams carry for all of them (docs/design.md, Exchange)"
        )
    raise Unsupported(f"{way.codec} on {device}, for {name!r}: {why}{'' if reason is None else f', and {reason}'}")


def crowded(ways: Mapping[str, Way], topology: Topology) -> str | None:
    """What to say where streams may send more through a host's network card than torch's BF16 hook; None: nothing.

    Every rank sends coded values, about five bits each, to all others by itself. A ring enters and leaves a host once.
    """
    if all(way.route == FACTORS or way.kind == PLAIN for way in ways.values()):
        return None
    hosts, ranks = len(topology.hosts), topology.world / len(topology.hosts)
    flat, ring = 2 * ranks * (1 - 1 / hosts) * 5 / 8, 2 * 2 * (1 - 1 / topology.world)  # bytes a value
    if topology.single or flat < ring:
        return None
    return (
        f"{hosts} hosts hold {ranks:g} ranks each, and each of these exchanges with all ranks of other hosts by "
        f"itself: if they share one network card, about {flat:.1f} bytes a value go through it at 5 bits, {ring:.1f} "
        "with torch's bf16_compress_hook. With a card for each GPU there is nothing to do. See docs/when-not.md"
    )


def _streams(way: Way, dtype: torch.dtype, patient: bool) -> bool:
    if way.route == FACTORS:
        return factors_on_device.serves(way.codec)
    codec = stream_codec(way.codec, way.route)
    if codec is None or dtype.itemsize > codec.widest:
        return False
    return not (codec.feeds_back and patient)


def _reason_against_host(way: Way, device: torch.device) -> str | None:
    """Why the host runner cannot carry such a gradient of that device."""
    if device.type == "cpu" or way.route == FACTORS:
        return None
    if way.codec.shaped:
        return "streams alone carry it there"
    if len(places_of(way.route)) > 1:
        return f"the route {way.route!r} codes on the CPU and on the GPU: write all its steps for one of the two"
    return None

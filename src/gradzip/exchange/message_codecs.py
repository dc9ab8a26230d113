"""What codes the messages of a codec on each runner, and the route that a codec takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ..codecs import Codec
from ..codecs.baseline import Cast, Identity
from ..codecs.noise import Noise
from ..codecs.scaled import Scaled
from ..codecs.sparse import RandomBlock, RandomK, TopK
from ..errors import Unsupported, nearest
from ..routes import CODING, FACTORS, NAMED, Route
from .coding import MessageCodec, Raw
from .on_host.gcomp import GCompOnHost
from .on_host.generic import GenericOnHost
from .on_host.noise import NoiseOnHost
from .on_host.scaled import ScaledOnHost
from .on_host.sparse import SparseOnHost
from .on_stream.coded import CodedOnStream
from .on_stream.message import RawOnStream, StreamCodec
from .on_stream.noise import NoiseOnStream
from .on_stream.scaled import ScaledOnStream
from .on_stream.sparse import SparseOnStream

_ALLREDUCE = "allreduce"
_ROUTES = (*NAMED, FACTORS)


def _scaled(codec: Scaled) -> MessageCodec:
    return ScaledOnHost(codec) if codec.error_memory is None else GenericOnHost(codec)


_OWN: dict[str, Callable[[Any], MessageCodec]] = {
    **{"gcomp": GCompOnHost, "noise": NoiseOnHost},
    **dict.fromkeys(("int8", "int4", "fp8"), _scaled),
    **dict.fromkeys(("topk", "threshold", "dgc"), SparseOnHost),
}
_RAW: dict[str, Callable[[Any], Raw]] = {
    "identity": lambda codec: Raw(str(codec)),
    "cast": lambda codec: Raw(str(codec), codec.dtype),
}


@lru_cache(maxsize=64)
def message_codec(codec: Codec) -> MessageCodec | None:
    """The codec for whole messages on the host; None: it reduces in several rounds."""
    if codec.rounds > 1:
        return None
    if codec.name in _RAW and codec.error_memory is None:
        return _RAW[codec.name](codec)
    return _OWN.get(codec.name, GenericOnHost)(codec)


@lru_cache(maxsize=256)
def places_of(route: str) -> frozenset[str]:
    """Where a route codes: on the CPU, on the GPU, on both, or nowhere."""
    return frozenset(step.where for step in Route.parse(route).steps if step.kind in CODING)


@lru_cache(maxsize=64)
def codec_for_device(codec: Codec, route: Route) -> MessageCodec | None:
    """The codec for whole messages of values on a GPU that go by the host.

    None: it goes in rounds or by streams alone, or the route codes in two places.
    """
    places = places_of(str(route))
    if len(places) > 1 or codec.shaped:
        return None
    whole = message_codec(codec)
    # What has kernels of its own for whole messages on the CPU has those of parts on a GPU.
    return GenericOnHost(codec) if places == {"gpu"} and isinstance(whole, ScaledOnHost) else whole


@lru_cache(maxsize=256)
def codes_messages(codec: Codec, route: str, on_device: bool = False) -> MessageCodec | None:
    """The codec for whole messages that go by a route on the host; None: they go in rounds (rounds.py).

    `on_device`: the values lie on a GPU, and the route codes them there or on the CPU.
    """
    found = message_codec(codec)
    if found is None or not (codec.lossless or found.adds_frames or Route.parse(route).compresses):
        return None
    return (codec_for_device(codec, Route.parse(route)) if on_device else None) or found


def fills_frames(codec: Codec) -> bool:
    """Whether one frame holds parts of all tensors of a message; else there is a frame for each part."""
    return isinstance(message_codec(codec), NoiseOnHost | ScaledOnHost)


_ON_STREAMS = ("alltoall", "allgather", "allreduce")
_NAMES = {str(NAMED[name].on("gpu")): name for name in _ON_STREAMS}


@lru_cache(maxsize=64)
def stream_codec(codec: Codec, route: str | None = None) -> StreamCodec | None:
    """The codec for whole messages on a stream, by a route or by that which it usually takes there.

    None: its frames have no known size, residuals leave the GPU, or the route is another one.
    """
    usual = "alltoall" if codec.cuttable or isinstance(codec, Noise | Scaled) else "allgather"
    by = usual if route is None else _NAMES.get(route, route)
    if isinstance(codec, RandomK | RandomBlock | TopK):
        if codec.error_memory not in (None, "fp32"):
            return None
        found = SparseOnStream(codec)
        return found if route is None or NAMED.get(by) == found.route else None
    if CodedOnStream.serves(codec):
        return CodedOnStream(codec, by) if by in ("alltoall", "allgather") else None
    if codec.error_memory is not None or by not in ("alltoall", "allreduce"):
        return None
    if isinstance(codec, Noise):
        return NoiseOnStream(NoiseOnHost(codec))
    if isinstance(codec, Scaled):
        return ScaledOnStream(ScaledOnHost(codec))
    if isinstance(codec, Cast):
        return RawOnStream(Raw(str(codec), codec.dtype))
    return RawOnStream(Raw(str(codec))) if isinstance(codec, Identity) else None


def route_of(codec: Codec, wanted: str | None = None, default: str = "alltoall") -> str:
    """The route that a codec takes; Unsupported if the wanted one does not exist or does not fit.

    `default` is where frames go that are neither factors, nor summable, nor sparse: it depends on the hosts.
    """
    if codec.routes and wanted not in (None, *codec.routes):
        raise Unsupported(f"{codec} goes by {' or '.join(map(repr, codec.routes))} alone, and not by {wanted!r}")
    if wanted is None:
        return _usual(codec, default)
    if (wanted == FACTORS) != (codec.rounds > 1):
        raise Unsupported(f"{codec} cannot go by {wanted!r}: 'factors' is for codecs of several rounds alone")
    if wanted == FACTORS:
        return wanted
    if wanted not in _ROUTES and ">" not in wanted and "." not in wanted:
        known = ", ".join(_ROUTES)
        raise Unsupported(f"unknown route {wanted!r}{nearest(wanted, _ROUTES)}; there are {known}, or steps")
    route = Route.parse(wanted)
    if not route.compresses and not (codec.summable and wanted == _ALLREDUCE) and not isinstance(codec, Identity):
        raise Unsupported(f"frames of {codec} cannot be added up, and {wanted!r} codes nothing: send it by 'alltoall'")
    return wanted


def _usual(codec: Codec, default: str) -> str:
    if codec.routes:
        return codec.routes[0]
    if codec.rounds > 1:
        return FACTORS
    if isinstance(codec, Cast):
        return default  # so that sums are formed in float32
    if codec.summable:
        return _ALLREDUCE
    return default if codec.cuttable else "allgather"

"""Which codecs code whole messages, and so travel by this package."""

from __future__ import annotations

from functools import lru_cache

from ..codecs import Codec
from ..codecs.baseline import Cast, Identity
from ..codecs.noise import Noise
from ..codecs.scaled import Scaled
from .coding import MessageCodec, Raw
from .noise import NoiseMessages
from .on_device import NoiseOnStream, RawOnStream, StreamCodec
from .scaled import ScaledMessages
from .scaled_on_device import ScaledOnStream


@lru_cache(maxsize=64)
def message_codec(codec: Codec) -> MessageCodec | None:
    """The codec for whole messages on the host; None: it codes tensor by tensor, in collectives/."""
    if isinstance(codec, Noise):
        return NoiseMessages(codec)
    return ScaledMessages(codec) if isinstance(codec, Scaled) and codec.error_memory is None else None


@lru_cache(maxsize=64)
def stream_codec(codec: Codec) -> StreamCodec | None:
    """The codec for whole messages on a stream; None: its frames have no known size, or it keeps residuals."""
    if isinstance(codec, Noise):
        return NoiseOnStream(NoiseMessages(codec))
    if codec.error_memory is not None:
        return None
    if isinstance(codec, Scaled):
        return ScaledOnStream(ScaledMessages(codec))
    if isinstance(codec, Cast):
        return RawOnStream(Raw(str(codec), codec.dtype))
    return RawOnStream(Raw(str(codec))) if isinstance(codec, Identity) else None

"""Which codecs code whole messages, and so travel by this package."""

from __future__ import annotations

from functools import lru_cache

from ..codecs import Codec
from ..codecs.noise import Noise
from .coding import MessageCodec
from .noise import NoiseMessages


@lru_cache(maxsize=64)
def message_codec(codec: Codec) -> MessageCodec | None:
    """The codec for whole messages; None: it codes tensor by tensor, in collectives/."""
    return NoiseMessages(codec) if isinstance(codec, Noise) else None

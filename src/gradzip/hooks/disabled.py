"""A Handle that does nothing, returned when GRADZIP=off."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..codecs import Codec
from ..feedback import Value
from ..option import Option
from ..policy import Policy
from .handle import Handle
from .metrics import Writer


class Disabled(Handle):
    """A checkpoint passes through it unchanged, so that a run with gradzip can go on from it."""

    def __init__(self) -> None:
        self.error = None
        self._passed_on: dict[str, Value] = {}

    def set_policy(self, policy: str | Codec | Option | Policy) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        """The same keys, and nothing to count."""
        counts = ("steps", "steps_here", "bytes_sent", "bytes_raw", "collectives", "memory")
        seconds = dict.fromkeys(("coding_seconds", "waiting_seconds", "exposed_seconds"), 0.0)
        empty: dict[str, Any] = {"codecs": {}, "tensors": {}, "history": [], "prediction": {}, "noise": {}}
        return dict.fromkeys(counts, 0) | seconds | {"ratio": 1.0, "runner": ""} | empty

    def log(self, writer: Writer, every: int = 100) -> None:
        """Nothing is exchanged, and nothing is written."""

    def trace(self, path: str | Path, steps: int = 2) -> None:
        """Nothing is exchanged, and nothing is recorded."""

    def end_epoch(self) -> None:
        pass

    def state_dict(self) -> dict[str, Value]:
        return dict(self._passed_on)

    def load_state_dict(self, state: Mapping[str, Value]) -> None:
        self._passed_on = dict(state)

    def resume(self, state: Mapping[str, Value] | None) -> None:
        self._passed_on = dict(state or {})

    def load_checkpoint(self, path: str | Path, prefix: str = "") -> None:
        pass

    def detach(self) -> None:
        pass

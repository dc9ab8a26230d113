"""Traces of single steps for ui.perfetto.dev: what the plan predicts, and what happened on this rank, side by side."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ..exchange.on_stream.times import Times
from ..exchange.recording import Moment, Watch
from ..planner import perfetto
from ..planner.perfetto import Span


class Tracer(ABC):
    """Records so many steps, then writes the file. Times count from the end of forward, where backward begins."""

    def __init__(self, path: Path, steps: int, model: DistributedDataParallel, warn: Callable[[str], None]) -> None:
        self._path, self._left, self._warn = path, steps, warn
        self._stories: dict[str, list[Span]] = {}
        self._hooks = [
            model.register_forward_pre_hook(self._forward_begins),
            model.register_forward_hook(self._forward_ends),
        ]

    @abstractmethod
    def _forward_begins(self, *_: Any) -> None: ...

    @abstractmethod
    def _forward_ends(self, *_: Any) -> None: ...

    def _add(self, number: int, moments: Sequence[Moment], predicted: list[Span]) -> bool:
        """What happened in a step. True when the file is written."""
        self._stories[f"measured, step {number}"] = [Span(*moment) for moment in moments]
        self._left -= 1
        if self._left:
            return False
        for hook in self._hooks:
            hook.remove()
        try:
            perfetto.save(self._path, ({"predicted": predicted} if predicted else {}) | self._stories)
        except OSError as error:  # a full disk must not end the training
            self._warn(f"trace: {self._path} could not be written: {error}")
        return True


class HostTracer(Tracer):
    """By the clock of the host, of what its threads do."""

    def __init__(
        self, path: Path, steps: int, model: DistributedDataParallel, warn: Callable[[str], None], watch: Watch
    ) -> None:
        super().__init__(path, steps, model, warn)
        self._watch = watch
        self._forward: tuple[float, float] | None = None
        self._begun = 0.0
        watch.record()

    def _forward_begins(self, *_: Any) -> None:
        self._begun = time.perf_counter()

    def _forward_ends(self, *_: Any) -> None:
        self._forward = self._begun, time.perf_counter()

    def step(self, number: int, last_bucket: float, predicted: list[Span]) -> bool:
        """A backward has ended. True when the file is written."""
        now, forward, seen = time.perf_counter(), self._forward, self._watch.recorded()
        if forward is None:  # it was under way when recording began
            self._watch.record()
            return False
        zero = forward[1]
        moments = [
            Moment("compute", "forward", forward[0] - zero, 0.0),
            Moment("compute", "backward", 0.0, last_bucket - zero),
            Moment("exposed", "exchange that backward does not hide", last_bucket - zero, now - zero),
            *(Moment(m.track, m.name, m.begin - zero, m.end - zero) for m in sorted(seen)),
        ]
        if self._add(number, moments, predicted):
            return True
        self._forward = None
        self._watch.record()
        return False


class StreamTracer(Tracer):
    """By the clock of the GPU, of what its streams do."""

    def __init__(
        self, path: Path, steps: int, model: DistributedDataParallel, warn: Callable[[str], None], times: Times
    ) -> None:
        super().__init__(path, steps, model, warn)
        self._times = times
        times.trace(steps)

    def _forward_begins(self, *_: Any) -> None:
        self._times.forward_begins()

    def _forward_ends(self, *_: Any) -> None:
        self._times.forward_ends()

    def step(self, number: int, moments: Sequence[Moment], predicted: list[Span]) -> bool:
        """A step has become known. True when the file is written."""
        return bool(moments) and self._add(number, moments, predicted)

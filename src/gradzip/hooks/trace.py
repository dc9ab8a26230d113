"""Traces of single steps for ui.perfetto.dev: what the plan predicts, and what happened on this rank, side by side."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ..exchange.recording import Watch
from ..planner import perfetto
from ..planner.perfetto import Span


class Tracer:
    """Records so many steps, then writes the file. Times count from the end of forward, where backward begins."""

    def __init__(self, path: Path, steps: int, model: DistributedDataParallel, watch: Watch) -> None:
        self._path, self._left, self._watch = path, steps, watch
        self._forward: tuple[float, float] | None = None
        self._begun = 0.0
        self._stories: dict[str, list[Span]] = {}
        self._hooks = [
            model.register_forward_pre_hook(self._forward_begins),
            model.register_forward_hook(self._forward_ends),
        ]
        watch.record()

    def _forward_begins(self, *_: Any) -> None:
        self._begun = time.perf_counter()

    def _forward_ends(self, *_: Any) -> None:
        self._forward = self._begun, time.perf_counter()

    def step(self, number: int, last_bucket: float, predicted: list[Span]) -> bool:
        """A backward has ended. True when the file is written."""
        now, forward, moments = time.perf_counter(), self._forward, self._watch.recorded()
        if forward is None:  # it was under way when recording began
            self._watch.record()
            return False
        zero = forward[1]
        spans = [
            Span("compute", "forward", forward[0] - zero, 0.0),
            Span("compute", "backward", 0.0, last_bucket - zero),
            Span("exposed", "exchange that backward does not hide", last_bucket - zero, now - zero),
        ]
        spans += [Span(m.track, m.name, m.begin - zero, m.end - zero) for m in sorted(moments)]
        self._stories[f"measured, step {number}"] = spans
        self._left -= 1
        if self._left:
            self._forward = None
            self._watch.record()
            return False
        perfetto.save(self._path, ({"predicted": predicted} if predicted else {}) | self._stories)
        for hook in self._hooks:
            hook.remove()
        return True

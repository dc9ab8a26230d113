"""The lines that rank 0 logs: at attach, after ten steps, every few hundred steps, and at the end.

They go to the logger `gradzip`. Where nobody has set up logging they appear on stderr;
`logging.getLogger("gradzip").setLevel(logging.WARNING)` keeps them away.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..codecs.lowrank import PowerSGD
from ..exchange.way import Way

FIRST, EVERY = 10, 500  # steps

logger = logging.getLogger("gradzip")


def say(text: str) -> None:
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
    logger.info(text)


class Journal:
    """The lines of one handle on rank 0; the last one comes at detach, or when the process ends."""

    def __init__(self, quiet: bool, stats: Callable[[], Mapping[str, Any]], look: Callable[[], None]) -> None:
        """`stats` must not wait for the exchange: it may be asked when that has failed. `look`: before the last."""
        self._stats, self._look, self._process = stats, look, os.getpid()
        if not quiet:
            _journals.add(self)

    @property
    def is_read(self) -> bool:
        """Whether its lines go anywhere."""
        return self in _journals and (logger.level == logging.NOTSET or logger.isEnabledFor(logging.INFO))

    def step(self, steps: int) -> None:
        """So many are over."""
        if self in _journals and (steps == FIRST or (steps and steps % EVERY == 0)):
            say(in_steps(self._stats()))

    def end(self) -> None:
        if self in _journals and os.getpid() == self._process:
            _journals.discard(self)
            self._look()
            stats = self._stats()
            if stats["steps_here"]:
                say(f"ended: {in_steps(stats)}")


_journals: weakref.WeakSet[Journal] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for journal in list(_journals):
        journal.end()


def at_attach(
    ways: Mapping[str, Way],
    shapes: Mapping[str, tuple[torch.Size, torch.dtype]],
    world: int,
    left_out: Mapping[str, int] | None = None,
    exact: Mapping[str, str] | None = None,
) -> str:
    """Tensors, bytes per step, policy, memory, and what to expect.

    `left_out` counts parameters that are not exchanged, by kind; `exact` says why tensors go lossless in near mode.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name, way in ways.items():
        groups[f"{way.codec} by {way.route}"].append(name)
    total, kept, lines = 0, 0, []
    for text, names in groups.items():
        raw = sum(_bytes(*shapes[name]) for name in names)
        total += raw
        kept += sum(residual_bytes(ways[name], shapes[name][0]) for name in names)
        lines.append(f"{len(names)} x {text}{_expected(names, ways, shapes, raw)}")
    return (
        f"{len(ways)} tensors, {in_words(total)} of gradients in each step of {world} ranks: {'; '.join(lines)}. "
        f"Error feedback will hold {in_words(kept)}{_reasons(exact or {})}{_left_out(left_out or {})}"
    )


def in_no_optimizer(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"no optimizer that attach was given holds {shown}: these gradients are sent lossless. "
        "With several optimizers, attach(model, [first, second])"
    )


def _reasons(exact: Mapping[str, str]) -> str:
    counts = Counter(exact.values())
    return "".join(
        f". {count} tensor{'s go' if count > 1 else ' goes'} lossless for now, as {why}"
        for why, count in counts.items()
    )


def _left_out(counts: Mapping[str, int]) -> str:
    return "".join(f". {count} {kind}" for kind, count in counts.items() if count)


def in_steps(stats: Mapping[str, Any]) -> str:
    steps, noise = max(stats["steps_here"], 1), stats["noise"]
    rounded = (
        f"; noise {noise['share']:.2%} of the gradient, {noise['worst']:.2%} in the worst step, at "
        f"{noise['bits']:.1f} bits a value"
        if noise
        else ""
    )
    return (
        f"step {stats['steps']}: sent {in_words(stats['bytes_sent'] / steps)} per step instead of "
        f"{in_words(stats['bytes_raw'] / steps)} ({stats['ratio']:.2f}x); coding {stats['coding_seconds'] / steps:.1e} "
        f"s, exposed {stats['exposed_seconds'] / steps:.1e} s per step; holds {in_words(stats['memory'])}{rounded}"
    )


def residual_bytes(way: Way, shape: torch.Size) -> int:
    """What error feedback holds of one gradient from step to step."""
    return shape.numel() * {None: 0, "bf16": 2}.get(way.codec.error_memory, 4)


def in_words(size: float) -> str:
    for unit in ("B", "KB", "MB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _bytes(shape: torch.Size, dtype: torch.dtype) -> int:
    return shape.numel() * dtype.itemsize


def _expected(
    names: list[str], ways: Mapping[str, Way], shapes: Mapping[str, tuple[torch.Size, torch.dtype]], raw: int
) -> str:
    """By how much a codec's frames are smaller, where that is known beforehand."""
    codec = ways[names[0]].codec
    if codec.name == "identity" or not raw:
        return ""
    if isinstance(codec, PowerSGD):
        frames = sum(
            4 * min(s.numel(), codec.rank * (s[0] + s.numel() // max(s[0], 1))) for s in _matrices(names, shapes)
        )
    elif codec.rounds == 1 and codec.fixed_size:
        frames = sum(codec.bound(shapes[name][0].numel(), shapes[name][1]) for name in names)
    else:
        return " (its size depends on the values)"
    return f" ({raw / max(frames, 1):.1f}x smaller)"


def _matrices(names: list[str], shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> list[torch.Size]:
    return [shape if len(shape) > 1 else torch.Size((1, shape.numel())) for shape, _ in (shapes[n] for n in names)]

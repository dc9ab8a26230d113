"""The demo's first sentence: what a step takes plainly, and with gradzip."""

from __future__ import annotations

from collections.abc import Sequence

from ..emulate import format_rate, parse_rate
from ..report import Run
from ..report.record import last_common_step
from .settings import AUTO, BF16, PLAIN, WORDS

ALIKE = 1.01  # times plain training's loss at the same step: near enough to compare speeds
HELPS = 1.03  # times plain training's speed: less is noise


def measured(runs: Sequence[Run], rate: str) -> str:
    """On a network that was there. Empty where plain training or a codec of gradzip is missing."""
    seconds = {run.name: run.step_seconds() for run in runs}
    return _sentence(runs, {name: s for name, s in seconds.items() if s}, rate, "takes")


def predicted(runs: Sequence[Run], predictions: Sequence[Run]) -> list[str]:
    """A sentence for each network that was predicted; losses are those of the runs."""
    by_rate: dict[str, dict[str, float]] = {}
    for run in predictions:
        by_rate.setdefault(run.about["rate"], {})[run.about["of"]] = run.step_seconds() or 0.0
    sentences = (_sentence(runs, seconds, rate, "would take") for rate, seconds in by_rate.items())
    return [f"PREDICTED: {text}" for text in sentences if text]


def _sentence(runs: Sequence[Run], seconds: dict[str, float], rate: str, takes: str) -> str:
    until = last_common_step(runs)
    losses = {} if until is None else {run.name: run.final_loss(until=until) for run in runs}
    ours = [name for name in seconds if name not in (PLAIN, BF16, AUTO)]
    if PLAIN not in seconds or not ours:
        return ""
    plain_loss = losses.get(PLAIN)
    alike = [name for name in ours if plain_loss and (loss := losses.get(name)) and loss <= ALIKE * plain_loss]
    best = min(alike or ours, key=seconds.__getitem__)
    plain_ms, best_ms = 1e3 * seconds[PLAIN], 1e3 * seconds[best]
    begin = f"At {format_rate(parse_rate(rate))}, training this model {takes} {plain_ms:.0f} ms a step"
    what = f"{best} ({WORDS[best]})"
    if plain_ms < HELPS * best_ms:
        return f"{begin}. gradzip does not help here: its fastest codec, {what}, {takes} {best_ms:.0f} ms."
    compared = f", loss {losses[best]:.3f} instead of {plain_loss:.3f} at step {until:.0f}" if best in alike else ""
    gain = f"{best_ms:.0f} ms with gradzip: {plain_ms / best_ms:.2f} times as fast, by {what}{compared}"
    return f"{begin}, {gain}." if alike else f"{begin}, {gain}, whose loss is not that of plain training."

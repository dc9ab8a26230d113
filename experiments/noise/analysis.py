"""The slope of the loss over the share of noise, from paired runs: python experiments/noise/analysis.py [results.csv]

A difference is that of a run's held-out loss and plain's of the same seed, in per cent of plain's. Each seed has a
slope of its own through the origin (least squares over its budgets); the interval is Student's over seeds. A seed
counts once it has the task's largest budget, on which its slope rests. Linearity: a second term over the square of the
share, whose interval should hold 0.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results.csv"
LIMIT = 0.1  # per cent of plain's loss: what 1 % of noise may cost
# Student's t, two-sided 95 %, for 1, 2, ... degrees of freedom; the last one from there on.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
      2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip

Row = Mapping[str, str]


@dataclass(frozen=True)
class Interval:
    mean: float
    half: float  # of the 95 % interval; infinite for a single seed
    count: int

    @property
    def upper(self) -> float:
        return self.mean + self.half

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" + (f" ± {self.half:.4f}" if self.count > 1 else " (one seed)")


def interval(values: Sequence[float]) -> Interval:
    if len(values) < 2:
        return Interval(values[0], float("inf"), 1)
    t = _T[min(len(values) - 1, len(_T)) - 1]
    return Interval(statistics.fmean(values), t * statistics.stdev(values) / len(values) ** 0.5, len(values))


def differences(rows: Sequence[Row], task: str, row: str, figure: str = "loss") -> dict[int, tuple[float, float]]:
    """By seed: the measured share in per cent, and the loss against plain's in per cent of it."""
    plain = {int(r["seed"]): float(r[figure]) for r in rows if r["task"] == task and r["row"] == "plain"}
    found = {}
    for r in rows:
        seed = int(r["seed"])
        if r["task"] == task and r["row"] == row and seed in plain:
            found[seed] = 100 * float(r["share"]), 100 * (float(r[figure]) / plain[seed] - 1)
    return found


def budgets(rows: Sequence[Row], task: str) -> list[str]:
    """Rows of noise with the optimizer's shape, by budget."""
    found = {r["row"]: float(r["budget"]) for r in rows if r["task"] == task and r["row"].startswith("noise")}
    return sorted((row for row in found if row.endswith("%")), key=lambda row: found[row])


@dataclass(frozen=True)
class Slope:
    slope: Interval  # per cent of the loss for 1 % of share
    curvature: Interval | None  # the second term of a fit with two, for (1 %)^2
    at_one: Interval  # the loss of a budget of 1 %, by the slope and the share it was measured to have
    accepted: bool


def slope(rows: Sequence[Row], task: str, most: float = 1.0, figure: str = "loss") -> Slope | None:
    """Of runs with a budget of at most `most`; none if there is no pair."""
    by_seed: dict[int, list[tuple[float, float]]] = {}
    shares, there = list[float](), dict[int, list[str]]()
    taken = [row for row in budgets(rows, task) if float(row.split()[1]) / 100 <= most]
    for row in taken:
        for seed, pair in differences(rows, task, row, figure).items():
            by_seed.setdefault(seed, []).append(pair)
            there.setdefault(seed, []).append(row)
            if row == "noise 1 %":
                shares.append(pair[0])
    by_seed = {seed: pairs for seed, pairs in by_seed.items() if taken[-1] in there[seed]}
    if not by_seed or not shares:
        return None
    found = interval([sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs) for pairs in by_seed.values()])
    curves = [_two_terms(pairs)[1] for pairs in by_seed.values() if len(pairs) > 2]
    share = statistics.fmean(shares)
    at_one = Interval(found.mean * share, found.half * share, found.count)
    return Slope(found, interval(curves) if curves else None, at_one, at_one.upper < LIMIT)


def deviation(found: Interval) -> float:
    """The standard deviation between seeds that an interval was made of."""
    return found.half * found.count**0.5 / _T[min(found.count - 1, len(_T)) - 1]


def seeds_needed(at_one: Interval, limit: float = LIMIT) -> int | None:
    """How many seeds an upper bound below the limit takes, if they scatter as those that are there.

    A mean below 0 is taken as 0: nobody expects noise to help. None if the mean is at the limit already, or there is
    one seed only.
    """
    if at_one.count < 2 or at_one.mean >= limit:
        return None
    mean, sigma = max(at_one.mean, 0.0), deviation(at_one)
    for count in range(2, 1000):
        if mean + _T[min(count - 1, len(_T)) - 1] * sigma / count**0.5 < limit:
            return count
    return None


def largest_budget(at_one: Interval, limit: float = LIMIT, most: float = 30.0) -> float | None:
    """The budget in per cent whose upper bound is the limit, if costs are linear; none for one seed.

    A mean below 0 is taken as 0, as for `seeds_needed`.
    """
    if at_one.count < 2:
        return None
    upper = max(at_one.mean, 0.0) + at_one.half
    return most if upper <= limit / most else limit / upper


def _two_terms(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """y = p x + q x^2 by least squares."""
    a, b, c = (sum(x**k for x, _ in pairs) for k in (2, 3, 4))
    u, v = (sum(x**k * y for x, y in pairs) for k in (1, 2))
    below = a * c - b * b
    return (u * c - v * b) / below, (a * v - b * u) / below


def noise_scale(rows: Sequence[Row], task: str, batch: int) -> tuple[float, float] | None:
    """B_noise in samples, and SNR = B / B_noise, of plain runs' second halves; `batch`: samples of a worker.

    A worker's mean square is |G|^2 + S / batch, that of the mean of W workers |G|^2 + S / (W batch).
    """
    found = list[float]()
    for r in rows:
        if r["task"] == task and r["row"] == "plain":
            own, mean, world = float(r["own_square"]), float(r["signal"]), int(r["workers"])
            s = (own - mean) / (1 / batch - 1 / (world * batch))
            g = mean - s / (world * batch)
            found.append(s / g / (world * batch))
    if not found:
        return None
    ratio = statistics.fmean(found)
    world = next(int(r["workers"]) for r in rows if r["task"] == task)
    return ratio * world * batch, 1 / ratio


def report(rows: Sequence[Row]) -> str:
    lines = []
    for task in dict.fromkeys(r["task"] for r in rows):
        lines.append(f"{task}:")
        for row in dict.fromkeys(r["row"] for r in rows if r["task"] == task and r["row"] != "plain"):
            pairs = differences(rows, task, row)
            if pairs:
                loss, train = (
                    interval([y for _, y in differences(rows, task, row, figure).values()])
                    for figure in ("loss", "train_loss")
                )
                share = statistics.fmean(x for x, _ in pairs.values())
                worst = max(100 * float(r["worst_share"]) for r in rows if r["task"] == task and r["row"] == row)
                bits = [r for r in rows if r["task"] == task and r["row"] == row]
                own, of_sum = (statistics.fmean(float(r[k]) for r in bits) for k in ("own_bits", "sum_bits"))
                lines.append(
                    f"  {row:24} share {share:8.4f} % (worst {worst:8.4f})  bits {own:6.3f} {of_sum:6.3f}  "
                    f"held out {loss} %  training {train} %  seeds {len(pairs)}"
                )
        for most in (0.1, 1.0):
            for figure in ("loss", "train_loss"):
                found = slope(rows, task, most, figure)
                if found is not None:
                    verdict = "accepted" if found.accepted else "not accepted"
                    lines.append(
                        f"  {figure}, budgets up to {100 * most:g} %: {found.slope} % for 1 % of share; second term "
                        f"{found.curvature}; at 1 %: {found.at_one} %, {verdict}"
                    )
    return "\n".join(lines)


if __name__ == "__main__":
    with Path(sys.argv[1] if len(sys.argv) > 1 else RESULTS).open(newline="") as file:
        print(report(list(csv.DictReader(file))))

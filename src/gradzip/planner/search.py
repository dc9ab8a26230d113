"""The search for a plan: Espresso's two algorithms (EuroSys'23, section 4.4) with all options, and passes that go on.

Algorithm 1 takes tensors from large to small and tries every choice for each. Tensors that are sent uncompressed
before a bubble are left alone: to shrink them would only widen the bubble. Algorithm 2 moves coding to the CPU: among
equal tensors with equal choices only the number that moves matters, and those that are ready first move first.

Both are greedy. `improve` then tries every choice for every unit again until nothing changes, also from other starts;
so the result is never worse than that of the paper's algorithms, which `Found` keeps for comparison.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .fast import Change, Plan
from .problem import Problem
from .timeline import INTER_IN, INTER_OUT, INTRA_IN, INTRA_OUT

MOST_OFFLOADS = 5_000  # vectors of counts that Algorithm 2 may try
MOST_PASSES = 20
SIMULATED = 10  # of all options, which are all estimated: those that look best
WORTH = 3e-5  # of the time: a unit that cannot save more is left alone
FEW = 16  # units, as with buckets: every start is followed to its end, and pairs of units are changed together
PAIRED = 16  # choices of each unit of a pair
THRESHOLDS = 6  # sizes at which plans may change from one choice to another, to start from
PATIENCE = 48  # units in a row that gain nothing
ENOUGH = 1e-3  # of the time: a pass that saves less is the last


@dataclass(frozen=True)
class Found:
    """A plan (the number of each unit's choice) and its backward time; `paper` is what the two algorithms gave."""

    plan: Plan
    time_s: float
    paper: Plan
    paper_s: float
    search_s: float


def search(problem: Problem, *, improving: bool = True, exact: bool = False) -> Found:
    """`exact` simulates every option of every unit instead of those that look best: for small problems."""
    start = time.perf_counter()
    plan, found = algorithm_1(problem, exact=exact)
    plan, found = algorithm_2(problem, plan, found)
    paper, paper_s = plan, found
    if improving:
        starts = [(plan, found), best_threshold(problem)]
        plan, found = min((improve(problem, *start, exact=exact) for start in starts), key=lambda end: end[1])
        plan, found = offload_exactly(problem, plan, found)
        if len(problem.units) <= FEW:
            plan, found = improve_pairs(problem, plan, found)
    return Found(plan, found, paper, paper_s, time.perf_counter() - start)


def algorithm_1(problem: Problem, *, exact: bool = False) -> tuple[Plan, float]:
    """All coding on the device where gradients lie; starts from plain all-reduce everywhere."""
    plan = problem.uniform(0)
    found = problem.evaluator.time(plan)
    tried = np.arange(problem.primary, dtype=np.int32)
    left = by_size(problem)
    while left:
        hidden = before_bubbles(problem, plan)
        left = [unit for unit in left if unit not in hidden]
        if left:
            plan, found = _decide(problem, plan, left.pop(0), tried, found, exact)
    return plan, found


def _decide(
    problem: Problem, plan: Plan, unit: int, tried: npt.NDArray[np.int32], found: float, exact: bool
) -> tuple[Plan, float]:
    simulated = None if exact else SIMULATED
    worth = 0.0 if exact else WORTH * found
    plan[unit], found = problem.evaluator.best(plan, unit, tried, found, simulated=simulated, worth=worth)
    return plan, found


def by_size(problem: Problem) -> list[int]:
    """Large ones first; of equal ones that which is computed last, for it can hide the least."""
    return sorted(range(len(problem.units)), key=lambda u: (-problem.units[u].raw_bytes, -u))


def before_bubbles(problem: Problem, plan: Plan) -> set[int]:
    """Units that are sent uncompressed and are through when the slow link waits, for the last time, for a new unit."""
    slow = INTER_IN | INTER_OUT if problem.network.topology.hosts > 1 else INTRA_IN | INTRA_OUT
    idle, through = problem.evaluator.bubble(plan, slow)
    if math.isinf(idle):
        return set()
    return set(np.flatnonzero(~problem.compresses[plan] & (through <= idle)).tolist())


def movable(problem: Problem, plan: Plan) -> list[tuple[int, int]]:
    """Units that may code on the CPU instead, in the order of readiness, with their choice there."""
    others = [problem.offloaded[n] if n < problem.primary else None for n in plan.tolist()]
    return [(unit, other) for unit, other in enumerate(others) if other is not None]


def offload_exactly(problem: Problem, plan: Plan, found: float) -> tuple[Plan, float]:
    """Every set of units on the CPU, where these are few: counts are not always enough (experiments/search)."""
    moves = movable(problem, plan)
    if not moves or 2 ** len(moves) > MOST_OFFLOADS:
        return plan, found
    changes = [Change(unit, (int(plan[unit]), other)) for unit, other in moves]
    plan, found, _ = problem.evaluator.combine(plan, changes, found)
    return plan, found


def algorithm_2(problem: Problem, plan: Plan, found: float) -> tuple[Plan, float]:
    """Coding on the CPU for the first q of each group of equal units with equal choices, over all q."""
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for unit, other in movable(problem, plan):  # farthest from the output first
        groups.setdefault((problem.units[unit].raw_bytes, int(plan[unit])), []).append((unit, other))
    if not groups:
        return plan, found
    members = sorted(groups.values(), key=len)
    if math.prod(len(group) + 1 for group in members) <= MOST_OFFLOADS:
        plan, found, _ = problem.evaluator.combine(plan, _counts(plan, members), found)
        return plan, found
    return _offload_by_group(problem, plan, members, found)


def _counts(on_device: Plan, groups: Sequence[Sequence[tuple[int, int]]]) -> list[Change]:
    """The first ones of each group on the CPU, in any number: none follows one that stays."""
    changes: list[Change] = []
    for group in groups:
        for place, (unit, other) in enumerate(group):
            changes.append(Change(unit, (int(on_device[unit]), other), len(changes) - 1 if place else None))
    return changes


def _offload_by_group(
    problem: Problem, plan: Plan, groups: list[list[tuple[int, int]]], found: float
) -> tuple[Plan, float]:
    """Too many vectors of counts for all of them: one group after the other, until nothing changes."""
    on_device, vain = plan.copy(), 0
    for group in itertools.islice(itertools.cycle(groups), MOST_PASSES * len(groups)):
        before = found
        plan, found, _ = problem.evaluator.combine(plan, _counts(on_device, [group]), found)
        vain = vain + 1 if found >= before else 1  # tried again, the group itself would gain nothing
        if vain == len(groups):
            break
    return plan, found


def improve(problem: Problem, plan: Plan, found: float, *, exact: bool = False) -> tuple[Plan, float]:
    """Every choice on every device for every unit, from large to small, until nothing changes.

    A pass ends when many units in a row gained nothing: those that follow are smaller.
    """
    tried = np.arange(len(problem.choices), dtype=np.int32)
    plan = plan.copy()
    for _ in range(MOST_PASSES):
        before, vain = found, 0
        for unit in by_size(problem):
            last = found
            plan, found = _decide(problem, plan, unit, tried, found, exact)
            vain = vain + 1 if found >= last * (1 - WORTH) else 0
            if vain == PATIENCE:
                break
        if found >= before * (1 - (0.0 if exact else ENOUGH)):
            break
    return plan, found


def improve_pairs(problem: Problem, plan: Plan, found: float) -> tuple[Plan, float]:
    """Two units at once, each with the choices that look best for it alone, until nothing changes."""
    for _ in range(MOST_PASSES):
        before = found
        likely = [Change(unit, problem.evaluator.rank(plan, unit, PAIRED)) for unit in range(len(plan))]
        for pair in itertools.combinations(likely, 2):
            plan, found, _ = problem.evaluator.combine(plan, pair, found)
        if found >= before * (1 - ENOUGH):
            break
    return plan, found


def best_threshold(problem: Problem) -> tuple[Plan, float]:
    """The best plan in which all units from some size on do the same, and all smaller ones do the same."""
    evaluate = problem.evaluator.time
    uniform: list[tuple[float, int]] = []  # the best ones, in order
    for number in range(problem.primary):
        most = uniform[-1][0] if len(uniform) == THRESHOLDS else math.inf
        uniform = sorted([*uniform, (evaluate(problem.uniform(number), most), number)])[:THRESHOLDS]
    found, number = uniform[0]
    best = problem.uniform(number)
    sizes = np.array([unit.raw_bytes for unit in problem.units])
    steps = np.unique(sizes)[1:]
    steps = steps[:: max(1, len(steps) // THRESHOLDS)]
    likely = [number for _, number in uniform]
    plain = [number for number in range(problem.primary) if not problem.choices[number].compresses]
    for large in likely[:3]:
        for small in {*plain, *likely} - {large}:
            for size in steps:
                plan = np.where(sizes >= size, large, small).astype(np.int32)
                if (time_s := evaluate(plan, found)) < found:
                    best, found = plan, time_s
    return best, found

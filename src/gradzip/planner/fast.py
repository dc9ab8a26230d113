"""The timeline in C++ (native/planner.cpp), over tables of all options: the inner loop of the search."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .. import engines

Plan = npt.NDArray[np.int32]  # for each decision, the number of its option


class _Problem(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("units", "decision_count", "class_count", "options", "stride")] + [
        (name, ctypes.c_void_p) for name in ("backward", "decisions", "classes", "counts", "resources", "seconds")
    ]


@dataclass(frozen=True)
class Tables:
    """What each option's tasks take for each class of units, and on which resources."""

    backward: npt.NDArray[np.float64]  # [units]
    decisions: npt.NDArray[np.int32]  # [units], rising from 0; units of one decision take the same option
    classes: npt.NDArray[np.int32]  # [units]
    counts: npt.NDArray[np.uint8]  # [options]
    resources: npt.NDArray[np.uint8]  # [options, tasks]
    seconds: npt.NDArray[np.float64]  # [classes, options, tasks]

    @property
    def units(self) -> int:
        return len(self.backward)

    @property
    def decided(self) -> int:
        return int(self.decisions[-1]) + 1

    @property
    def options(self) -> int:
        return len(self.counts)


@dataclass(frozen=True)
class Change:
    """The options that a decision may take; only the first of them if an earlier change, `after`, took its first."""

    decision: int
    options: Sequence[int]
    after: int | None = None  # its place among the changes; its decision comes before this one


def _library() -> ctypes.CDLL:
    library: ctypes.CDLL = engines.load("native")._library
    i32, pointer = ctypes.c_int32, ctypes.c_void_p
    for name, result, arguments in (
        ("gz_plan_open", pointer, [pointer]),
        ("gz_plan_close", None, [pointer]),
        ("gz_plan_time", ctypes.c_double, [pointer, pointer, ctypes.c_double, pointer]),
        ("gz_plan_bubble", ctypes.c_double, [pointer, pointer, ctypes.c_uint8, pointer]),
        ("gz_plan_best", i32, [pointer, pointer, i32, pointer, i32, i32, ctypes.c_double, pointer]),
        ("gz_plan_rank", None, [pointer, pointer, i32, i32, pointer]),
        ("gz_plan_combine", ctypes.c_int64, [pointer, pointer, i32, *[pointer] * 5]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Evaluator:
    """Times of plans. Not for several threads at once."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self._library = _library()
        problem = _Problem(
            tables.units,
            tables.decided,
            len(tables.seconds),
            tables.options,
            tables.resources.shape[1],
            _address(tables.backward),
            _address(tables.decisions),
            _address(tables.classes),
            _address(tables.counts),
            _address(tables.resources),
            _address(tables.seconds),
        )
        self._planner = self._library.gz_plan_open(ctypes.byref(problem))

    def __del__(self) -> None:
        if hasattr(self, "_planner"):
            self._library.gz_plan_close(self._planner)

    def time(self, plan: Plan, limit: float = math.inf) -> float:
        """Infinity if it is certain not to take less than the limit."""
        return float(self._library.gz_plan_time(self._planner, _address(plan), limit, None))

    def starts(self, plan: Plan) -> npt.NDArray[np.float64]:
        """[units, 1 + tasks]: when backward and each task start; NaN where an option has no such task."""
        starts = np.full((self.tables.units, 1 + self.tables.resources.shape[1]), np.nan)
        self._library.gz_plan_time(self._planner, _address(plan), math.inf, _address(starts))
        return starts

    def bubble(self, plan: Plan, slow: int) -> tuple[float, npt.NDArray[np.float64]]:
        """When these links fall idle before their last wait for a new unit, minus infinity if they never do, and when
        the units of each decision have left them.

        A wait counts only if that unit never waited for a link itself: otherwise earlier units may be to blame.
        """
        through = np.empty(self.tables.decided)
        idle = self._library.gz_plan_bubble(self._planner, _address(plan), slow, _address(through))
        return float(idle), through

    def best(
        self,
        plan: Plan,
        decision: int,
        tried: npt.NDArray[np.int32],
        time: float,
        *,
        simulated: int | None = None,
        worth: float = 0.0,
    ) -> tuple[int, float]:
        """The best option of one decision and the plan's time with it; `time` is that of the plan as it is.

        With `simulated` all options are estimated and only so many of them, the likeliest, are simulated, as long as
        they promise to save more than `worth` seconds.
        """
        found = ctypes.c_double(time)
        most = len(tried) if simulated is None else min(simulated, len(tried))
        option = self._library.gz_plan_best(
            self._planner, _address(plan), decision, _address(tried), len(tried), most, worth, ctypes.byref(found)
        )
        return int(option), found.value

    def rank(self, plan: Plan, decision: int, count: int) -> list[int]:
        """The best options of one decision, best first."""
        best = np.empty(min(count, self.tables.options), np.int32)
        self._library.gz_plan_rank(self._planner, _address(plan), decision, len(best), _address(best))
        return best.tolist()

    def combine(self, plan: Plan, changes: Sequence[Change], time: float) -> tuple[Plan, float, int]:
        """The best of all combinations of these changes if it takes less than that time, or else the plan as it is, and
        how many were simulated to their end.
        """
        order = sorted(range(len(changes)), key=lambda i: changes[i].decision)
        place = {old: new for new, old in enumerate(order)}
        rising = [changes[i] for i in order]
        starts = np.cumsum([0, *(len(change.options) for change in rising)], dtype=np.int32)
        after = np.array([-1 if c.after is None else place[c.after] for c in rising], np.int32)
        decisions = np.array([change.decision for change in rising], np.int32)
        options = np.array([option for change in rising for option in change.options], np.int32)
        changed, found = plan.copy(), ctypes.c_double(time)
        arrays = map(_address, (decisions, starts, options, after))
        tried = self._library.gz_plan_combine(
            self._planner, _address(changed), len(rising), *arrays, ctypes.byref(found)
        )
        return changed, found.value, int(tried)


def _address(array: npt.NDArray[np.generic]) -> int:
    assert array.flags.c_contiguous
    return int(array.ctypes.data)

"""The timeline: the rules one by one on the reference, and the fast one against it."""

from __future__ import annotations

import _ctypes
import itertools
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradzip.errors import EngineError
from gradzip.planner.fast import Change, Evaluator, Tables
from gradzip.planner.timeline import CPU, GPU, INTER_IN, INTER_OUT, INTRA_IN, INTRA_OUT, LINKS, Task, Timeline, simulate

INTER = INTER_OUT | INTER_IN
INTRA = INTRA_OUT | INTRA_IN


def spans(timeline: Timeline, label: str) -> list[tuple[float, float]]:
    return [(e.start_s, e.end_s) for e in sorted(timeline.events, key=lambda e: e.unit) if e.label == label]


def test_communication_overlaps_with_backward() -> None:
    timeline = simulate([1, 1, 1], [[Task("send", INTER, 1.5)]] * 3)
    assert spans(timeline, "send") == [(1, 2.5), (2.5, 4), (4, 5.5)]
    assert timeline.end_s == 5.5
    assert timeline.exposed_s == 2.5
    assert timeline.bubbles(INTER) == []


def test_a_link_that_waits_is_a_bubble() -> None:
    timeline = simulate([1, 2], [[Task("send", INTER, 0.5)]] * 2)
    assert timeline.bubbles(INTER) == [(1.5, 3)]


def test_gpu_coding_delays_what_is_computed_later_and_cpu_coding_does_not() -> None:
    coded = simulate([1, 1], [[Task("enc", GPU, 0.25), Task("send", INTER, 0.1)]] * 2)
    assert spans(coded, "backward") == [(0, 1), (1.25, 2.25)]
    offloaded = simulate([1, 1], [[Task("enc", CPU, 0.25), Task("send", INTER, 0.1)]] * 2)
    assert spans(offloaded, "backward") == [(0, 1), (1, 2)]


def test_links_and_directions_work_side_by_side() -> None:
    timeline = simulate([0, 0], [[Task("a", INTRA, 1), Task("b", INTER, 1)]] * 2)
    assert spans(timeline, "b") == [(1, 2), (2, 3)]
    assert simulate([0, 0], [[Task("in", INTER_IN, 1), Task("out", INTER_OUT, 1)]] * 2).end_s == 3


def test_a_later_unit_does_not_overtake() -> None:
    slow = [Task("enc", CPU, 5), Task("send", INTER, 1)]
    timeline = simulate([1, 1], [slow, [Task("send", INTER, 1)]])
    assert spans(timeline, "send") == [(6, 7), (7, 8)]


def test_a_second_exchange_lets_the_next_unit_send_meanwhile() -> None:
    steps = [Task("first", INTER, 1), Task("code", CPU, 1), Task("second", INTER, 1)]
    timeline = simulate([0, 0], [steps, steps])
    assert spans(timeline, "first") == [(0, 1), (1, 2)]
    assert spans(timeline, "second") == [(2, 3), (3, 4)]


def test_delays_run_side_by_side() -> None:
    steps = [Task("send", INTER, 1), Task("delay", 0, 10)]
    assert simulate([0, 0, 0], [steps] * 3).end_s == 13


def test_nothing_to_do_takes_no_time() -> None:
    assert simulate([], []).end_s == 0
    assert simulate([2, 1], [[], []]).end_s == 3


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tables, np.ndarray]:
    """Few distinct times, so that many things happen at the same moment."""
    units, options = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    times = st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 0.1, 0.3])
    masks = st.sampled_from([0, GPU, CPU, 4, 8, INTER, INTRA, INTER_IN, INTER_OUT, LINKS])
    tasks = [draw(st.lists(masks, max_size=5)) for _ in range(options)]
    stride = max(1, max(map(len, tasks)))
    resources = np.zeros((options, stride), np.uint8)
    for row, own in zip(resources, tasks):
        row[: len(own)] = own
    classes = draw(st.integers(1, units))
    seconds = np.array([draw(times) for _ in range(classes * options * stride)]).reshape(classes, options, stride)
    shared = np.array([0, *(draw(st.integers(0, 1)) for _ in range(units - 1))])
    decisions = np.cumsum(shared).astype(np.int32)  # neighbours may share one
    tables = Tables(
        np.array([draw(times) for _ in range(units)]),
        decisions,
        np.array([draw(st.integers(0, classes - 1)) for _ in range(units)], np.int32),
        np.array([len(own) for own in tasks], np.uint8),
        resources,
        seconds,
    )
    return tables, np.array([draw(st.integers(0, options - 1)) for _ in range(tables.decided)], np.int32)


def reference(tables: Tables, plan: np.ndarray) -> Timeline:
    tasks = [
        [
            Task(str(step), int(tables.resources[option, step]), float(tables.seconds[cls, option, step]))
            for step in range(tables.counts[option])
        ]
        for cls, option in zip(tables.classes, plan[tables.decisions])
    ]
    return simulate(tables.backward.tolist(), tasks)


@settings(max_examples=400, deadline=None)
@given(problems())
def test_the_fast_timeline_is_the_reference(problem: tuple[Tables, np.ndarray]) -> None:
    tables, plan = problem
    slow = reference(tables, plan)
    evaluator = Evaluator(tables)
    assert evaluator.time(plan) == slow.end_s
    starts = evaluator.starts(plan)
    assert np.isfinite(starts).sum() == len(slow.events)
    for event in slow.events:
        assert starts[event.unit, event.step + 1] == event.start_s, event


@settings(max_examples=200, deadline=None)
@given(problems(), st.data())
def test_the_best_option_is_the_best_of_all(problem: tuple[Tables, np.ndarray], data: st.DataObject) -> None:
    tables, plan = problem
    unit = data.draw(st.integers(0, tables.decided - 1))
    evaluator = Evaluator(tables)
    times = []
    for option in range(tables.options):
        changed = plan.copy()
        changed[unit] = option
        times.append(reference(tables, changed).end_s)
    before = evaluator.time(plan)
    option, time = evaluator.best(plan, unit, np.arange(tables.options, dtype=np.int32), before)
    assert time == times[option] == pytest.approx(min(times), rel=1e-12)  # sums in another order may differ
    if times[plan[unit]] == time:
        assert option == plan[unit], "an equal option is no reason to change"


@settings(max_examples=200, deadline=None)
@given(problems(), st.data())
def test_the_best_combination_is_the_best_of_all(problem: tuple[Tables, np.ndarray], data: st.DataObject) -> None:
    tables, plan = problem
    evaluator = Evaluator(tables)
    decisions = data.draw(st.lists(st.integers(0, tables.decided - 1), min_size=1, max_size=3, unique=True))
    options = st.lists(st.integers(0, tables.options - 1), min_size=1, max_size=3)
    changes = [Change(decision, data.draw(options)) for decision in decisions]
    last = len(changes) - 1
    earlier = [i for i in range(last) if decisions[i] < decisions[last]]
    if earlier and bool(data.draw(st.booleans())):
        changes[last] = Change(decisions[last], changes[last].options, after=earlier[0])
    best = np.inf
    for taken in itertools.product(*(range(len(change.options)) for change in changes)):
        if any(c.after is not None and taken[i] and not taken[c.after] for i, c in enumerate(changes)):
            continue
        changed = plan.copy()
        for change, number in zip(changes, taken):
            changed[change.decision] = change.options[number]
        best = min(best, reference(tables, changed).end_s)
    found_plan, found, tried = evaluator.combine(plan, changes, np.inf)
    assert found == pytest.approx(best, rel=1e-8)
    assert reference(tables, found_plan).end_s == found
    assert tried >= 1
    same_plan, same, _ = evaluator.combine(plan, changes, best / 2)
    assert same == best / 2
    assert same_plan.tolist() == plan.tolist()


@settings(max_examples=100, deadline=None)
@given(problems(), st.data())
def test_ranked_options_are_the_best_ones(problem: tuple[Tables, np.ndarray], data: st.DataObject) -> None:
    tables, plan = problem
    unit = data.draw(st.integers(0, tables.decided - 1))
    times = []
    for option in range(tables.options):
        changed = plan.copy()
        changed[unit] = option
        times.append(reference(tables, changed).end_s)
    count = data.draw(st.integers(1, tables.options))
    ranked = Evaluator(tables).rank(plan, unit, count)
    assert len(set(ranked)) == count
    assert [times[option] for option in ranked] == pytest.approx(sorted(times)[:count], rel=1e-8)


@settings(max_examples=200, deadline=None)
@given(problems(), st.data())
def test_after_a_change_the_events_are_those_of_the_new_plan(
    problem: tuple[Tables, np.ndarray], data: st.DataObject
) -> None:
    """`best` notes the events of what it found instead of simulating that again."""
    tables, plan = problem
    evaluator = Evaluator(tables)
    unit = data.draw(st.integers(0, tables.decided - 1))
    tried = np.arange(tables.options, dtype=np.int32)
    plan[unit], time = evaluator.best(plan, unit, tried, evaluator.time(plan), simulated=len(tried) - 1)
    slow, starts = reference(tables, plan), evaluator.starts(plan)
    assert time == slow.end_s
    for event in slow.events:
        assert starts[event.unit, event.step + 1] == event.start_s, event


def test_an_old_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADZIP_LIBRARY", _ctypes.__file__)  # any library but ours
    monkeypatch.delitem(sys.modules, "gradzip.engines.native", raising=False)
    with pytest.raises(EngineError, match="build it again"):
        Evaluator(
            Tables(
                np.zeros(1),
                np.zeros(1, np.int32),
                np.zeros(1, np.int32),
                np.zeros(1, np.uint8),
                np.zeros((1, 1), np.uint8),
                np.zeros((1, 1, 1)),
            )
        )

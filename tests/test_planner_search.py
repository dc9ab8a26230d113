"""The search against brute force, the paper's algorithms, baselines, and whole answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planning import line, profile

from gradzip.errors import PlanError
from gradzip.option import Option
from gradzip.planner.answer import Request, answer, best_bucket, break_even, sweep
from gradzip.planner.baselines import BF16, baselines
from gradzip.planner.choices import Limits
from gradzip.planner.network import Network, Topology
from gradzip.planner.problem import Problem
from gradzip.planner.profile import Collective, Curve, Profile
from gradzip.planner.search import algorithm_1, algorithm_2, before_bubbles, by_size, search
from gradzip.planner.timeline import CPU
from gradzip.planner.units import DDP_BUCKET, DDP_FIRST_BUCKET, buckets, tensors

EXPERIMENT = Path(__file__).parent.parent / "experiments/search"
LOSSY = Limits(lossy=True)


def problem(rate: float | None = None, limits: Limits = LOSSY) -> Problem:
    measured = profile()
    return Problem(Network(measured, Topology(4, 1, rate)), tensors(measured), limits)


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes its scripts importable; another experiment has a script of the same name."""
    monkeypatch.syspath_prepend(str(EXPERIMENT))
    sys.modules.pop("run", None)
    yield
    sys.modules.pop("run", None)


@pytest.mark.usefixtures("experiment")
def test_search_is_near_brute_force_and_never_worse_than_the_paper() -> None:
    import run

    rows = list(run.brute_rows(25, seed=5))
    for row in rows:
        assert row["best_s"] <= row["search_s"] <= row["paper_s"]
    distances = [row["search_s"] / row["best_s"] - 1 for row in rows]
    assert sum(d < 1e-9 for d in distances) >= 23
    assert max(distances) < 0.1


@pytest.mark.usefixtures("experiment")
def test_algorithm_2_is_brute_force_over_devices() -> None:
    import run

    rows = list(run.offload_rows(25, seed=6))
    assert sum(row["algorithm_2_s"] == row["best_s"] for row in rows) >= 24
    assert all(row["exact_s"] == row["best_s"] for row in rows)


@pytest.mark.usefixtures("experiment")
def test_screening_finds_what_full_simulation_finds() -> None:
    import cases

    rng = np.random.default_rng(3)
    for _ in range(10):
        case = cases.random_problem(rng, 12)
        full, quick = search(case, exact=True).time_s, search(case).time_s
        assert quick <= full * 1.05


@pytest.mark.usefixtures("experiment")
def test_the_plan_has_the_time_that_is_said_and_the_reference_agrees() -> None:
    import cases

    rng = np.random.default_rng(4)
    for _ in range(10):
        case = cases.random_problem(rng, 8)
        found = search(case)
        assert case.evaluator.time(found.plan) == found.time_s == case.timeline(found.plan).end_s
        assert case.evaluator.time(found.paper) == found.paper_s


def test_large_ones_come_first_and_of_equal_ones_the_last() -> None:
    measured = profile()
    same = [replace(t, shape=(100,)) for t in measured.tensors[:3]]
    measured = replace(measured, tensors=(*same, replace(measured.tensors[3], shape=(200,))))
    case = Problem(Network(measured, Topology(4)), tensors(measured), LOSSY)
    assert by_size(case) == [3, 2, 1, 0]


def test_what_is_sent_before_a_bubble_is_left_alone() -> None:
    fast = problem(rate=1e11)
    plan = fast.uniform(0)
    assert before_bubbles(fast, plan) == {0, 1, 2}
    assert algorithm_1(fast)[0][:3].tolist() == [0, 0, 0]
    assert before_bubbles(problem(rate=1e8), plan) == set()


def test_algorithm_2_without_a_second_device_changes_nothing() -> None:
    case = problem()
    plan, time_s = algorithm_1(case)
    moved, same = algorithm_2(case, plan.copy(), time_s)
    assert moved.tolist() == plan.tolist()
    assert same == time_s


def test_slow_networks_compress_and_fast_ones_do_not() -> None:
    slow, fast = (Request(profile(), Topology(4, 1, rate), LOSSY) for rate in (1e8, 1e12))
    slow_answer, fast_answer = answer(slow), answer(fast)
    assert slow_answer.pays
    assert slow_answer.gain > 5
    assert any(o.codec != "identity" for o in slow_answer.options().values())
    assert not fast_answer.pays
    assert {str(o) for o in fast_answer.options().values()} == {"identity/allreduce"}
    limit = break_even(slow)
    assert limit is not None
    assert 1e8 < limit < 1e12


def test_where_ranks_share_cores_a_plan_must_pay_at_the_worst() -> None:
    """Both machines code as fast while all ranks are at work; on one of them ranks have half a core each."""
    alone, shared = slow_coding(24), replace(slow_coding(8), cores_per_rank=0.5)
    at_worst = slow_coding(32)
    found = {}
    for rate in (1e8, 1e9, 3e9, 3.3e9, 1e10):
        found[rate] = [answer(Request(p, Topology(4, 1, rate), LOSSY)) for p in (alone, shared)]
    for apart, together in found.values():
        assert together.step_s == pytest.approx(apart.step_s)
        assert apart.crowding == 0
        if together.pays:
            assert together.plain_s > together.step_s + together.timeline.busy_s(CPU) / 3
            assert together.plain_s > answer(Request(at_worst, together.request.topology, LOSSY)).step_s
    assert [together.pays for _, together in found.values()] != [apart.pays for apart, _ in found.values()]
    assert found[1e8][1].pays


def slow_coding(factor: float) -> Profile:
    def slower(curves: Mapping[str, Curve]) -> dict[str, Curve]:
        return {
            device: Curve(tuple((size, factor * seconds) for size, seconds in curve.points), factor * curve.frame_s)
            for device, curve in curves.items()
        }

    whole = profile()
    codecs = {
        name: replace(cost, encode=slower(cost.encode), decode=slower(cost.decode))
        for name, cost in whole.codecs.items()
    }
    return replace(whole, codecs=codecs)


def test_without_a_codec_nothing_pays() -> None:
    never = Request(profile(codecs={}), Topology(4))
    assert not answer(never).pays
    assert break_even(never) is None
    with pytest.raises(PlanError, match="without a codec"):
        break_even(replace(never, limits=Limits(codecs=())))


def test_the_bound_is_below_everything() -> None:
    measured = profile()
    units = tensors(measured)
    network = Network(measured, Topology(4, 1, 5e8))
    found = {b.name: b for b in baselines(network, units, LOSSY)}
    steps = {name: b.step_s for name, b in found.items() if b.step_s is not None}
    bound = steps.pop("free compression (bound)")
    plan = answer(Request(measured, Topology(4, 1, 5e8), LOSSY, bucket_bytes=None)).step_s
    assert bound <= plan <= min(steps.values())
    assert set(found) >= {"FP32 all-reduce", "BF16 all-reduce", "HiTopKComm", "HiPress", "BytePS-Compress"}
    assert steps["BF16 all-reduce"] < steps["FP32 all-reduce"]


def test_a_baseline_that_was_not_measured_says_so() -> None:
    without = profile()
    without = replace(without, codecs={k: v for k, v in without.codecs.items() if k != BF16})
    found = baselines(Network(without, Topology(4)), tensors(without), LOSSY)
    assert found[1].step_s is None
    assert "not measured" in found[1].note


def test_more_uncertain_measurements_make_a_more_uncertain_plan() -> None:
    sure = problem()
    assert sure.uncertainty(sure.uniform(0)) < 1e-6
    noisy = profile()
    off = {1e6: 0.8, 2e6: 1.2, 4e6: 0.8, 8e6: 1.2}
    rough = [
        replace(c, curve=type(c.curve)(tuple((x, c.curve.line.at(x) * by) for x, by in off.items())))
        for c in noisy.collectives
    ]
    noisy = replace(noisy, collectives=tuple(rough))
    case = Problem(Network(noisy, Topology(4)), tensors(noisy), LOSSY)
    assert 0.02 < case.uncertainty(case.uniform(0)) < 1


def test_buckets_are_ddps() -> None:
    measured = profile()
    sizes = [t.size_bytes for t in measured.tensors]
    assert [u.raw_bytes for u in buckets(measured, DDP_BUCKET)] == [sum(sizes[:3]), sizes[3]]
    assert sum(sizes[:3]) > DDP_FIRST_BUCKET
    assert len(buckets(measured, 1)) == 4
    assert [n for u in buckets(measured, 5 << 20) for n in u.names] == [t.name for t in measured.tensors]
    with pytest.raises(PlanError, match="holds nothing"):
        buckets(measured, 0)
    size, step_s = best_bucket(Request(measured, Topology(4), LOSSY))
    assert step_s <= answer(Request(measured, Topology(4), LOSSY, size << 20)).step_s * (1 + 1e-9)


def test_a_sweep_falls_with_the_rate() -> None:
    clusters = [Topology(4, 1, rate) for rate in (1e8, 1e9, 1e10)]
    points = sweep(Request(profile(), clusters[0], LOSSY), clusters)
    assert points[0].plain_s > points[1].plain_s > points[2].plain_s
    for point in points:
        assert point.free_s <= point.plan_s <= point.plain_s
        assert 0 < point.plain_efficiency <= point.efficiency <= 1.0 + 1e-9
    assert points[0].compressed_share > 0.9


def test_every_unit_is_explained() -> None:
    found = answer(Request(profile(), Topology(4, 1, 1e8), LOSSY))
    rows = found.explain()
    assert len(rows) == len(found.problem.units)
    assert any("ms more" in row.why for row in rows)
    assert all(isinstance(row.option, Option) for row in rows)


@pytest.mark.usefixtures("experiment")
def test_tables_of_the_search_experiment_are_those_of_its_results() -> None:
    import run

    readme = (EXPERIMENT / "README.md").read_text()
    assert run.filled(readme) == readme, "run python experiments/search/run.py tables"


def test_plain_averaging_is_priced_as_ddp_does_it() -> None:
    """Where NCCL carries gradients that is the plan without compression; sockets are busy for as long as cores are."""
    measured = profile(transport="nccl")
    case = Problem(Network(measured, Topology(4)), tensors(measured), LOSSY)
    assert case.plain_s == pytest.approx(case.step_s(case.uniform(0)))
    slow = tuple(replace(c, cpu=line(0.0, 20e-9)) for c in profile().collectives)
    shared = replace(profile(), collectives=slow, cores_per_rank=0.5)
    case = Problem(Network(shared, Topology(4)), tensors(shared), LOSSY)
    busy = 40e-9 * shared.size_bytes
    assert case.plain_s == pytest.approx(case.outside_s + shared.tensors[0].ready_s + busy, rel=0.02)


def test_where_nccl_carries_plain_gradients_bf16_and_break_even_are_measured_by_it() -> None:
    """What the runtime would do with plain gradients is far slower here, and nobody would use it."""
    slow = tuple(replace(c, curve=line(0.05, 100e-9)) for c in profile().collectives)
    own = Collective("ddp", "inter", 4, line(1e-4, 12e-9))
    measured = replace(profile(), collectives=(*slow, own))
    case = Problem(Network(measured, Topology(4)), tensors(measured), LOSSY)
    assert case.plain_s == pytest.approx(case.outside_s + 0.03 + 2 * 1e-4 + 12e-9 * 12e6)  # two that are ready late
    found = answer(Request(measured, Topology(4), Limits(codecs=("cast",))))
    half = Problem(Network(measured, Topology(4)), found.request.units(), LOSSY).ddp_s(0.5)
    assert found.baselines[1].step_s == pytest.approx(half)
    assert not found.pays
    limit = break_even(found.request)
    assert limit is None or limit < 1e9

"""attach(model, optimizer, "auto"): it profiles, makes a short list, races, and resumes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from planning import codec, line, profile
from ranks import TIMEOUT, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradzip
from gradzip.errors import PlanError
from gradzip.planner import candidates, race
from gradzip.planner.auto import BLOCK, LISTS_AT, Auto
from gradzip.planner.candidates import QUALITIES, Candidate, short_list
from gradzip.planner.profile import Profile
from gradzip.planner.race import Race

STEPS = 60


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", Auto()),
        ("auto:lossy=true", Auto(lossy=True)),
        ("auto:quality=near,save=plan.json", Auto(quality="near", save="plan.json")),
        ("auto:codecs=gcomp,powersgd:rank=2", Auto(codecs=("gcomp", "powersgd:rank=2"))),
        ("auto:codecs=cast,topk,save=,lossy=true", Auto(True, ("cast", "topk"), "")),
    ],
)
def test_text_form(text: str, expected: Auto) -> None:
    assert Auto.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("auto:lossi=true", "did you mean 'lossy'"),
        ("auto:lossy=maybe", "true or false"),
        ("auto:lossy=true,lossy=true", "twice"),
        ("auto:quality=nearly", "did you mean 'near'"),
        ("automatic", "is not auto"),
    ],
)
def test_bad_text(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Auto.parse(text)


def test_a_quality_offers_its_codecs_and_all_better_ones() -> None:
    assert Auto(quality="exact").offered() == ("gcomp:mode=lossless",)
    assert Auto(quality="near").offered() == ("gcomp:mode=lossless", "gcomp")
    assert "noise" in Auto().offered()
    assert not set(QUALITIES["lossy"]) & set(Auto().offered())
    assert set(QUALITIES["lossy"]) < set(Auto(lossy=True).offered())
    assert Auto(lossy=True).left_out() == "", "then nothing is left out"
    assert "powersgd:rank=4" in Auto().left_out()


# -- the race ----------------------------------------------------------------------------------------------------------


def _run(seconds: list[float], noise: float = 0.0, seed: int = 0) -> Race:
    """A race in which candidates take that long, give or take."""
    rng, running = torch.Generator().manual_seed(seed), Race(len(seconds))
    while running.current is not None:
        drawn = 1 + noise * float(torch.randn((), generator=rng))
        running.end_block(seconds[running.current] * max(0.5, drawn))
    return running


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=5))
def test_the_fastest_wins_and_of_equals_the_first(seconds: list[float]) -> None:
    over = _run(seconds)
    assert over.winner == next(i for i, s in enumerate(seconds) if s <= min(seconds) * (1 + race.TIE))
    assert max(map(len, over.times)) <= race.ROUNDS


def test_what_is_far_behind_trains_one_block_alone() -> None:
    over = _run([2.0, 1.0, 1.05])
    assert [len(times) for times in over.times] == [1, 2, 2]
    assert _run([1.0]).times == [[]], "there is nothing to compare"


def test_every_other_round_is_the_other_way_round() -> None:
    """A machine that becomes slower and slower favours none."""
    running, order = Race(3), list[int]()
    while running.current is not None:
        order.append(running.current)
        running.end_block(1.0 + 0.001 * len(order))
    assert order[:9] == [0, 1, 2, 2, 1, 0, 0, 1, 2]
    assert running.winner == 0


def test_races_on_a_busy_machine_are_longer_and_cost_little() -> None:
    """What is lost by wrong decisions, on average over many races whose blocks differ by 5 %."""
    seconds = [1.0, 0.9, 0.95]
    races = [_run(seconds, 0.05, seed) for seed in range(300)]
    lost = [seconds[over.winner or 0] / min(seconds) - 1 for over in races]
    assert sum(lost) / len(lost) < 0.016
    assert max(len(times) for over in races for times in over.times) == race.MOST_ROUNDS


# -- the short list ----------------------------------------------------------------------------------------------------


def _measured(**changes: Any) -> Profile:
    """All codecs that auto offers, on a network of 1 Gbit/s; tensors are large, so all are compressed."""
    ratios = {"gcomp:mode=lossless": 1.2, "gcomp": 1.8, "cast:to=bf16": 2.0, "gcomp:keep=7": 3.0, "noise": 7.0}
    costs = [codec(text, ratio) for text, ratio in ratios.items()]
    return profile(codecs={cost.name: cost for cost in costs}, **changes)


def test_the_short_list_begins_with_plain_and_has_what_is_predicted_to_be_fastest() -> None:
    listed = short_list(_measured(), Auto().offered(), 0.4)
    assert [each.name for each in listed] == ["plain", "cast:to=bf16", "gcomp:keep=7", "noise"]
    assert listed[0].is_plain
    assert {str(o) for o in listed[3].plan.options.values()} == {"noise"}, "as one who writes noise gets it"
    assert listed[3].plan.expected["step_s"] < listed[1].plan.expected["step_s"] < 0.4
    again = Candidate.from_json(listed[3].to_json())
    assert (again.name, again.plan.options) == ("noise", listed[3].plan.options)


def test_predictions_only_make_the_list_shorter() -> None:
    """A codec that was not measured is tried, and so are those that are predicted to be slower than plain averaging."""
    fast = _measured(rate=1e12)
    listed = [each.name for each in short_list(fast, (*Auto().offered(), "powersgd:rank=4"), 0.4)]
    assert len(listed) == 5
    assert listed[0] == "plain"
    assert listed[-1] == "powersgd:rank=4"


def test_without_codecs_plain_averaging_is_all_there_is() -> None:
    """However slow torch's all-reduce was measured to be: other routes of identity send as many bytes."""
    measured = _measured()
    slow = [replace(each, curve=line(1.0, 1e-6)) if each.kind == "ar" else each for each in measured.collectives]
    assert [each.name for each in short_list(replace(measured, collectives=tuple(slow)), (), 0.4)] == ["plain"]


def test_the_smallest_frames_are_tried_whatever_is_predicted() -> None:
    """On a busy machine coding was measured to be slow."""
    measured = _measured()
    slow = replace(measured.codecs["noise"], encode={"cpu": line(1.0, 1e-6)})
    busy = replace(measured, codecs={**measured.codecs, "noise": slow})
    assert [each.name for each in short_list(busy, Auto().offered(), 0.4)][-1] == "noise"


# -- in a run ----------------------------------------------------------------------------------------------------------


def _start(policy: str) -> tuple[DistributedDataParallel, torch.optim.Optimizer, gradzip.Handle]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, gradzip.attach(model, optimizer, policy, timeout=TIMEOUT)


class Clock:
    """What the pilot reads; steps take as long as the test wants."""

    now = 0.0

    def read(self) -> float:
        self.now += 1e-6
        return self.now


def _codec(handle: gradzip.Handle) -> str:
    return handle._policy.option("0.weight", (256, 64)).codec


# By run: seconds of a step with each codec, or those on either rank; and what of it is the exchange.
RUNS: dict[str, tuple[dict[str, float | tuple[float, float]], float]] = {
    "noise wins": ({"identity": 0.03, "cast": 0.02, "noise": 0.01}, 0.01),
    "plain wins": ({"identity": 0.01, "cast": 0.02, "noise": 0.03}, 0.005),
    "plain is as fast": ({"identity": 0.0101, "cast": 0.01, "noise": 0.02}, 0.005),
    "hidden": ({"identity": 0.02, "cast": 0.01, "noise": 0.01}, 0.0),
    "residuals": ({"identity": 0.03, "cast": 0.02, "topk:ratio=0.1": 0.01}, 0.01),
    "residuals lose": ({"identity": 0.03, "cast": 0.01, "topk:ratio=0.1": 0.02}, 0.01),
    "ranks differ": ({"identity": 0.04, "cast": (0.005, 0.03), "noise": 0.02}, 0.004),  # rank 0 would choose cast
}


def _train(rank: int) -> dict[str, Any]:
    """What is chosen is decided by the test, by the times that the pilot reads."""
    candidates.WORTH = 1.0  # no mixture: whether one is listed follows from what was measured on this machine
    found: dict[str, Any] = {}
    for name, (seconds, exposed_s) in RUNS.items():
        offered = ",".join(codec for codec in seconds if codec != "identity")
        model, optimizer, handle = _start(f"auto:codecs={offered}")
        pilot = handle.pilot
        assert pilot is not None
        said, clock, used = list[str](), Clock(), list[str]()
        pilot._say_to, pilot._recorder._mark = said.append, clock.read  # type: ignore[method-assign]
        for step in range(STEPS):
            rng = torch.Generator().manual_seed(step * 2 + rank)
            optimizer.zero_grad()
            model(torch.randn(4, 64, generator=rng)).square().mean().backward()
            used.append(_codec(handle))
            clock.now += exposed_s
            optimizer.step()
            took = seconds[_codec(handle)]
            clock.now += (took[rank] if isinstance(took, tuple) else took) - exposed_s
        state = handle.state_dict()
        residuals = handle._memory.residuals
        handle.detach()
        found[name] = {
            "said": said,
            "used": used,
            "codec": _codec(handle),
            "reverted": pilot.reverted,
            "residuals": residuals,
            "sum": float(sum(p.detach().double().sum() for p in model.parameters())),
            "keys": sorted(k for k in state if k.startswith("auto")),
        }
        if name == "noise wins":
            model, optimizer, again = _start(f"auto:codecs={offered}")
            assert again.pilot is not None
            again.pilot._say_to = said.append
            again.load_state_dict(state)
            found["resumed"] = _codec(again)
            again.detach()
    with pytest.raises(gradzip.Unsupported, match="optimizer's steps"):
        gradzip.attach(model, None, "auto")
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return run_ranks(2, _train)


def test_measured_steps_decide(trained: list[dict[str, Any]]) -> None:
    first = trained[0]
    assert {name: first[name]["codec"] for name in RUNS} == {
        "noise wins": "noise",
        "plain wins": "identity",
        "plain is as fast": "identity",
        "hidden": "identity",
        "residuals": "topk:ratio=0.1",
        "residuals lose": "cast",
        "ranks differ": "noise",
    }
    assert first["plain wins"]["reverted"]
    assert first["resumed"] == "noise"
    assert first["noise wins"]["keys"] == ["auto.plan"]


def test_the_verdict_is_one_line(trained: list[dict[str, Any]]) -> None:
    said = {name: trained[0][name]["said"] for name in RUNS}
    begin = f"races plain, cast, noise from step {LISTS_AT} on; measuring took "
    assert said["noise wins"][0].startswith(begin)
    chosen = LISTS_AT + 3 * BLOCK
    assert said["noise wins"][1] == (
        f"from step {chosen} on: noise, 10 ms a step: 3.00x plain (30), 2.00x cast (20); raced 3 in {3 * BLOCK} steps"
    )
    assert said["plain wins"][1].startswith(f"from step {chosen} on: plain averaging, 10 ms a step: 2.00x cast (20)")
    assert "plain averaging: the exchange adds 0.0 ms to the 20 ms of a step" in said["hidden"][0]
    assert trained[1]["noise wins"]["said"] == []


def test_all_ranks_switch_at_the_same_steps(trained: list[dict[str, Any]]) -> None:
    for name in RUNS:
        first, second = (each[name] for each in trained)
        assert first["used"] == second["used"]
        assert first["sum"] == second["sum"], "replicas differ"
    used = trained[0]["noise wins"]["used"]
    assert used[LISTS_AT : LISTS_AT + 3 * BLOCK] == ["identity"] * BLOCK + ["cast"] * BLOCK + ["noise"] * BLOCK


def test_a_plain_step_sends_what_a_candidate_kept(trained: list[dict[str, Any]]) -> None:
    """Residuals of a codec that is not used in the next block would be lost, or come much later."""
    used = trained[0]["residuals lose"]["used"]
    (last,) = [step for step in range(1, STEPS) if used[step - 1].startswith("topk") and used[step] != used[step - 1]]
    assert used[last : last + 2] == ["identity", "cast"]
    kept = {name: trained[0][name]["residuals"] for name in RUNS}
    assert kept == {name: name == "residuals" for name in RUNS}

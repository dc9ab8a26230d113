"""From outside: starts the ranks, follows them, and puts together what they found."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from .. import emulate
from ..emulate import Line, Rates, format_rate
from ..errors import EmulationError
from ..plan import Plan
from ..planner.answer import Request
from ..planner.candidates import usual
from ..planner.choices import Limits
from ..planner.network import Topology
from ..planner.problem import Problem
from ..planner.profile import Profile
from ..planner.timeline import CPU
from ..report import Run, read
from ..report.measured import measured
from ..report.predicted import Story, stories, story_of
from .settings import (
    DESCRIBED,
    PLAIN,
    PLAN,
    PLANNED_FROM,
    POLICIES,
    PROFILE,
    RUNS,
    TRACE,
    WORDS,
    Progress,
    Settings,
)

PREDICTED = ("1gbit", "10gbit")
_SAID = "gradzip auto: "
_DECISIONS = ("auto: from step ", "auto: races ")
_LAST_WORDS = 15


@dataclass(frozen=True)
class Result:
    runs: list[Run]
    predicted: list[Run]  # where there was no limit: the same policies on networks that have one
    rates: Rates | None
    notes: list[str] = field(default_factory=list)
    plan: Plan | None = None  # of the run that plans for itself
    stories: list[Story] = field(default_factory=list)  # one step, as predicted and as measured
    elsewhere: float = 0.0  # part of all processor time that went to other programs meanwhile


def run(
    folder: Path,
    settings: Settings,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_ready: Callable[[Rates | None], None] = lambda rates: None,
) -> Result:
    """Trains with every policy; the folder then holds run.jsonl and what else the ranks left."""
    settings.save(folder)
    said: list[str] = []
    words: list[str] = []

    def hear(line: Line) -> None:
        progress = Progress.read(line.text)
        if progress is not None:
            on_progress(progress)
        elif line.text.startswith(_SAID):
            said.append(line.text.removeprefix("gradzip "))
        else:
            words.append(str(line))

    command = [sys.executable, "-m", "gradzip.demo.ranks", str(folder)]
    rate = settings.rate if settings.limit else None
    here = str(Path(__file__).parents[2])  # ranks may start elsewhere than where gradzip lies
    clock = _Clock()
    done = emulate.run(
        command, hosts=settings.hosts, rate=rate, on_line=hear, on_ready=on_ready, env={"PYTHONPATH": _path(here)}
    )
    elsewhere = clock.elsewhere()
    if done.exit_code:
        raise EmulationError(
            f"rank {done.first_failure} of the demo failed with exit code {done.exit_code}:\n"
            + "\n".join(words[-_LAST_WORDS:])
        )
    runs = read([folder / RUNS])
    for run in runs:
        if str(run.about["policy"]).startswith("auto"):
            run.about["words"] = _chosen(said, len(run.steps))
    predicted = [] if settings.limit else predictions(Profile.load(folder / PROFILE), runs, settings)
    plan = Plan.load(folder / PLAN) if (folder / PLAN).exists() else None
    notes = [text for text in said if not text.startswith(_DECISIONS)]
    return Result(runs, predicted, done.rates, notes, plan, _stories(folder, plan), elsewhere)


def _chosen(said: list[str], steps: int) -> str:
    """What `auto` chose and why, in its own words."""
    decisions = [text.removeprefix("auto: ") for text in said if text.startswith(_DECISIONS)]
    if not decisions:
        return f"chose nothing yet: {steps} steps are too few for that"
    return f"chose, {decisions[-1]}" if decisions[-1].startswith("from step ") else decisions[-1]


def stayed_plain(run: Run) -> bool:
    """Whether `auto` tried nothing else than plain averaging, so that it sent what plain DDP sends in every step."""
    return re.match(r"chose, from step \d+ on: plain averaging: ", str(run.about.get("words"))) is not None


class _Clock:
    """Tells how busy other programs keep this machine, from now on."""

    def __init__(self) -> None:
        self._began, self._all, self._own = time.monotonic(), _processor_seconds(), _own_seconds()

    def elsewhere(self) -> float:
        """As a part of what all processors could have done."""
        others = _processor_seconds() - self._all - (_own_seconds() - self._own)
        there_was = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        return max(0.0, others / there_was)


def _processor_seconds() -> float:
    """Spent by all programs of this machine, in their own code and in the kernel."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _stories(folder: Path, plan: Plan | None) -> list[Story]:
    """One step as the planner predicts it, and as it was measured with the policy of the run that is described."""
    policy = POLICIES[DESCRIBED]
    told = []
    if (folder / PLANNED_FROM).exists() and policy is not None:
        profile = Profile.load(folder / PLANNED_FROM)
        told = [*stories(profile, plan), story_of(profile, policy)]
    if (folder / TRACE).exists():
        told.append(replace(measured(folder / TRACE), name=f"measured, {policy}"))
    return told


def _path(folder: str) -> str:
    return os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))


def predictions(profile: Profile, runs: list[Run], settings: Settings) -> list[Run]:
    """What steps would take on networks that were not there, by the planner's timeline; bytes are the measured ones."""
    found = []
    for rate in PREDICTED:
        topology = Topology(settings.hosts, 1, float(emulate.parse_rate(rate)))
        bucket = profile.bucket_bytes
        problem = Request(profile, topology, Limits(lossy=True), bucket).problem()
        for run in runs:
            policy = POLICIES[run.name]
            if policy is not None and policy.startswith("auto"):
                continue  # it plans for the network that it finds
            where = f", predicted at {format_rate(emulate.parse_rate(rate))}"
            about = {"predicted": True, "baseline": PLAIN + where, "bytes_per_step": run.bytes_per_step()}
            about |= {"of": run.name, "rate": rate, "words": WORDS[run.name]}
            found.append(Run(run.name + where, {**about, **_predicted(problem, policy)}))
    return found


def _predicted(problem: Problem, policy: str | None) -> dict[str, float]:
    """The step with one policy for all gradients."""
    number = 0 if policy is None else usual(problem, policy)
    timeline = problem.timeline(problem.uniform(number))
    return {
        "step_seconds": problem.step_s(problem.uniform(number)),
        "compute_seconds": problem.outside_s + timeline.compute_s,
        "coding_seconds": timeline.busy_s(CPU),
    }


__all__ = ["Result", "predictions", "run"]

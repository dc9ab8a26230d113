"""The timeline of one step, as the planner predicts it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import ReportError
from ..option import Option
from ..plan import Plan
from ..planner.answer import Request
from ..planner.candidates import usual
from ..planner.choices import PLAIN_CODEC, Limits
from ..planner.network import Topology
from ..planner.perfetto import Span, predicted
from ..planner.problem import Problem
from ..planner.profile import Profile
from ..planner.units import DDP_BUCKET


@dataclass(frozen=True)
class Story:
    """What one step does, as spans on tracks; seconds after the start of backward."""

    name: str
    about: str
    spans: list[Span] = field(default_factory=list)


def stories(profile: Profile, plan: Plan | None = None) -> list[Story]:
    """Backward with plain all-reduce, and with the plan, on the cluster of the profile."""
    codecs = tuple(sorted({o.codec for o in plan.options.values()} - {"identity"})) if plan else ()
    missing = [codec for codec in codecs if codec not in {str(c.codec) for c in profile.codecs.values()}]
    if missing:
        raise ReportError(f"the profile has no costs of {missing[0]}, which the plan uses: profile it with --codec")
    bucket = profile.bucket_bytes or DDP_BUCKET
    if plan is not None and plan.bucket_cap_mb:
        bucket = int(plan.bucket_cap_mb * (1 << 20))
    problem = Request(profile, Topology.of(profile), Limits(codecs=codecs, lossy=True), bucket).problem()
    found = [_story("predicted, plain all-reduce", problem, problem.uniform(0))]
    if plan is not None and codecs:
        numbers = []
        for unit in problem.units:
            numbers.append(_number(problem, plan.option(unit.tensors[0].name, unit.tensors[0].shape)))
        found.append(_story("predicted, with the plan", problem, np.array(numbers, np.int32)))
    return found


def _number(problem: Problem, option: Option) -> int:
    if option.route is None:  # attach finds it
        return 0 if option.codec == PLAIN_CODEC else usual(problem, option.codec)
    if option not in problem.number:
        raise ReportError(f"the planner does not know {option} on this cluster: plan again from this profile")
    return problem.number[option]


def story_of(profile: Profile, policy: str) -> Story:
    """Backward with one policy for all gradients, on the cluster of the profile."""
    limits = Limits(codecs=(policy,), lossy=True)
    problem = Request(profile, Topology.of(profile), limits, profile.bucket_bytes or DDP_BUCKET).problem()
    return _story(f"predicted, {policy}", problem, problem.uniform(usual(problem, policy)))


def _story(name: str, problem: Problem, numbers: np.ndarray) -> Story:
    timeline = problem.timeline(numbers)
    names = [str(problem.units[i]) for i in problem.tables.decisions]
    about = f"Backward takes {timeline.compute_s * 1e3:.1f} ms, the exchange adds {timeline.exposed_s * 1e3:.1f} ms."
    spans = [replace(span, track=_WORDS.get(span.track, span.track)) for span in predicted(timeline, names)]
    return Story(name, about, spans)


_WORDS = {
    "compute": "backward",
    "gpu": "coding on the GPU",
    "cpu": "coding on the CPU",
    "d2h": "copying to the host",
    "h2d": "copying to the GPU",
    "intra.out": "sending within the host",
    "intra.in": "receiving within the host",
    "inter.out": "sending to other hosts",
    "inter.in": "receiving from other hosts",
}

"""What `auto` tries on real steps: a short list of policies, in the order of preference.

Plain averaging comes first, then policies by their quality and, among equals, simple ones. Of policies that train
equally fast the first one is taken. The planner's predictions decide which ones are on the list, and nothing else: a
policy that is predicted to be slow costs a few steps, and predictions made on a busy machine may be far off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..codecs import parse
from ..errors import PlanError, nearest
from ..option import Option
from ..plan import Plan
from ..policy import as_policy
from ..routes import DEVICES, NAMED
from . import perfetto
from .answer import Request
from .choices import PLAIN_CODEC, Limits
from .fast import Plan as Numbers
from .network import Topology
from .problem import Problem
from .profile import Profile
from .search import search
from .units import DDP_BUCKET

# What a codec does to the gradients, from best to worst, and the codecs of each that are worth a trial.
QUALITIES: dict[str, tuple[str, ...]] = {
    "exact": ("gcomp:mode=lossless",),
    "near": ("gcomp",),
    "bf16": ("cast:to=bf16", "gcomp:keep=7"),
    "noise": ("noise",),
    "lossy": ("gcomp:ulps=256", "powersgd:rank=4", "topk"),
}
LISTED = 3  # policies beside plain averaging
WORTH = 0.03  # relative: by so much a mixture of codecs must be predicted to be faster than each of them


def menu(quality: str) -> tuple[str, ...]:
    """The codecs of that quality and of all better ones."""
    if quality not in QUALITIES:
        raise PlanError(f"quality={quality} is not one of {', '.join(QUALITIES)}{nearest(quality, QUALITIES)}")
    names = list(QUALITIES)
    return tuple(codec for name in names[: names.index(quality) + 1] for codec in QUALITIES[name])


@dataclass(frozen=True)
class Candidate:
    """A policy to be tried."""

    name: str
    plan: Plan

    @property
    def is_plain(self) -> bool:
        return all(option.codec == PLAIN_CODEC for option in self.plan.options.values())

    @property
    def keeps_residuals(self) -> bool:
        return any(parse(codec).error_memory is not None for codec in {o.codec for o in self.plan.options.values()})

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "plan": self.plan.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Candidate:
        return cls(data["name"], Plan.from_json(data["plan"]))


def short_list(profile: Profile, codecs: Sequence[str], plain_s: float, most: int = LISTED) -> list[Candidate]:
    """Plain averaging, `most` codecs, and a mixture of codecs if that is predicted to be clearly better.

    The codecs are that with the smallest frames, and those that are predicted to be fastest.

    `plain_s` is the measured step of plain averaging: a step also does what nobody has modelled.
    """
    return _ShortList(profile, codecs, plain_s).found(most)


_USUAL = ("factors", "alltoall", *(str(NAMED["alltoall"].on(device)) for device in DEVICES))  # attach's routes


class _ShortList:
    def __init__(self, profile: Profile, codecs: Sequence[str], plain_s: float) -> None:
        self._profile, self._plain_s = profile, plain_s
        self._codecs = {str(parse(codec)): codec for codec in codecs}  # as it was written, too: that is what is shown
        measured = tuple(codec for codec in self._codecs if codec in profile.codecs)
        bucket = profile.bucket_bytes or DDP_BUCKET
        self._problem = Request(profile, Topology.of(profile), Limits(codecs=measured), bucket).problem()

    def found(self, most: int) -> list[Candidate]:
        problem = self._problem
        singles = {codec: problem.uniform(usual(problem, codec)) for codec in self._codecs if codec in self._known}
        seconds = {codec: problem.step_s(numbers) for codec, numbers in singles.items()}
        # On a busy machine coding looks slower than it is: what sends the fewest bytes is tried whatever is predicted.
        smallest = max(seconds, key=lambda codec: self._profile.codecs[codec].ratio, default="")
        best = sorted(seconds, key=lambda codec: (codec != smallest, seconds[codec]))[:most]
        listed = [codec for codec in self._codecs if codec not in self._known or codec in best]  # a trial tells
        candidates = [self._of_codec(PLAIN_CODEC, problem.uniform(0))]
        candidates += [self._of_codec(codec, singles.get(codec)) for codec in listed]
        if not self._codecs:
            return candidates  # other routes for the same bytes are no reason to race
        mixture = search(problem)
        if problem.outside_s + mixture.time_s < (1 - WORTH) * min([problem.plain_s, *seconds.values()]):
            candidates.append(self._mixture(mixture.plan))
        return candidates

    @property
    def _known(self) -> set[str]:
        return {choice.option.codec for choice in self._problem.choices}

    def _of_codec(self, codec: str, numbers: Numbers | None) -> Candidate:
        """The policy that a user gets who writes this codec."""
        policy = as_policy(codec)
        options = {t.name: policy.option(t.name, t.shape) for t in self._profile.tensors}
        name = "plain" if codec == PLAIN_CODEC else self._codecs[codec]
        return Candidate(name, self._plan(options, numbers))

    def _mixture(self, numbers: Numbers) -> Candidate:
        chosen = [self._problem.choices[number].option for number in numbers]
        options = {name: option for unit, option in zip(self._problem.units, chosen) for name in unit.names}
        used = sorted({option.codec for option in chosen})
        return Candidate(f"a plan of {' and '.join(used)}", self._plan(options, numbers))

    def _plan(self, options: dict[str, Option], numbers: Numbers | None) -> Plan:
        problem, profile = self._problem, self._profile
        expected = {"plain_s": self._plain_s}
        spans: list[perfetto.Span] = []
        if numbers is not None:
            saved_s = problem.plain_s - problem.step_s(numbers) if numbers.any() else 0.0
            expected["step_s"] = max(0.0, self._plain_s - saved_s)
            names = [str(problem.units[i]) for i in problem.tables.decisions]
            spans = perfetto.predicted(problem.timeline(numbers), names) if numbers.any() else []
        bucket = None if profile.bucket_bytes is None else profile.bucket_bytes / (1 << 20)
        kept = tuple((span.track, span.name, span.start_s, span.end_s) for span in spans)
        return Plan(options, {t.name: t.shape for t in profile.tensors}, profile.model, bucket, expected, kept)


def usual(problem: Problem, policy: str) -> int:
    """The number of the option that one policy for all gradients comes to: by attach's route, or else the fastest."""
    options = [choice.option for choice in problem.choices]
    codec = str(parse(policy))
    own = [i for i, option in enumerate(options) if option.codec == codec]
    routed = [i for i in own if options[i].route in _USUAL]
    return min(routed or own, key=lambda i: problem.step_s(problem.uniform(i)))

"""`auto`: profiles the first steps of the user's own run, and lets a short list of policies race on the next ones.

    plain steps -> codecs and network are measured -> plain steps -> short list -> race -> the winner stays

The planner's predictions make the list (candidates.py), measured steps decide (race.py). Everything hangs on the count
of optimizer steps, which is the same on all ranks; rank 0 makes the list and tells the others.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .. import saved
from ..errors import PlanError, Unsupported, nearest
from ..plan import Plan
from ..policy import Fixed
from . import race
from .candidates import LISTED, QUALITIES, Candidate, menu, short_list
from .measure import WARM, benchmarks
from .measure.record import Recorder
from .measure.wire import own_group
from .profile import Profile
from .race import Race

SETTLING, TIMED = 2, 4  # plain steps after measuring that do not count, and that do
LISTS_AT = WARM + SETTLING + TIMED  # the step at which there is a short list
BLOCK = race.SETTLING + race.COUNTED
LEAST_EXPOSED = 0.03  # of a step: what the exchange adds to it; below, there is nothing to gain
QUALITY = "noise"  # the worst that is offered, if users do not say
_STATE_KEY = "auto.plan"
_EXAMPLES = {"lossy": "true", "quality": "bf16", "codecs": "gcomp,powersgd", "save": "plan.json"}


@dataclass(frozen=True)
class Auto:
    """What users may say: `auto`, `auto:quality=near`, `auto:codecs=gcomp,powersgd:rank=2`, `auto:save=plan.json`.

    `auto:lossy=true` is `auto:quality=lossy`.
    """

    lossy: bool = False
    codecs: tuple[str, ...] | None = None
    save: str = ""  # where rank 0 leaves the plan; empty: nowhere
    quality: str = QUALITY

    @classmethod
    def parse(cls, text: str) -> Auto:
        name, _, options = text.partition(":")
        if name != "auto":
            raise PlanError(f"{text!r} is not auto")
        values: dict[str, Any] = {}
        key = ""
        for item in filter(None, options.split(",")):
            word, equals, value = item.partition("=")
            if word in _EXAMPLES and equals:
                key, item = word, value
                if key in values:
                    raise PlanError(f"{text!r} says {key} twice")
                values[key] = []
            elif word in _EXAMPLES:
                raise PlanError(f"cannot read {item!r} in {text!r}. Did you mean 'auto:{word}={_EXAMPLES[word]}'?")
            elif key != "codecs":
                raise PlanError(f"auto has no option {word!r}{nearest(word, _EXAMPLES)}")
            values[key].append(item)
        if values.get("lossy", ["false"]) not in (["true"], ["false"]):
            raise PlanError(f"{text!r}: lossy is true or false")
        codecs = tuple(values["codecs"]) if "codecs" in values else None
        (quality,) = values.get("quality", [QUALITY])
        menu(quality)  # refuses one that is not there
        return cls(values.get("lossy") == ["true"], codecs, values.get("save", [""])[0], quality)

    def offered(self) -> tuple[str, ...]:
        return self.codecs or menu("lossy" if self.lossy else self.quality)

    def left_out(self) -> str:
        """What would offer more, in words; empty: everything is offered."""
        if self.codecs or self.lossy or self.quality == list(QUALITIES)[-1]:
            return ""
        more = [codec for codec in menu("lossy") if codec not in self.offered()]
        return f"not tried: {', '.join(more)} (auto:quality=lossy)"


class Switch(Protocol):
    """The part of a Handle that is needed."""

    def set_policy(self, policy: Any) -> None: ...


class Pilot:
    """Drives a handle. Made on all ranks at the same point, while the handle's policy is plain."""

    def __init__(
        self,
        handle: Switch,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        auto: Auto,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.handle, self.model, self.optimizer, self.auto = handle, model, optimizer, auto
        self.plan: Plan | None = None  # the winner's
        self.profile: Profile | None = None  # that the short list was made from; on rank 0
        self.reverted = False  # plain averaging won
        self._say_to = say or (lambda text: print(f"gradzip auto: {text}", file=sys.stderr, flush=True))
        self._recorder = Recorder(model)
        self._benchmarks: dict[str, Any] = {}
        self._measured_s = 0.0  # what measuring cost the run
        self._steps = 0
        self._candidates: list[Candidate] = []
        self._race: Race | None = None
        self._next_block = 0  # the step at which a block of the race begins
        self._rank = dist.get_rank(model.process_group)
        self._talk = own_group(model.process_group)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    # -- a resumed run goes on with its plan --------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The plan that is in use, as bytes, once the race is over."""
        if self.plan is None:
            return {}
        kept = {"plan": self.plan.to_json(), "reverted": self.reverted}
        return {_STATE_KEY: torch.tensor(list(json.dumps(kept).encode()), dtype=torch.uint8)}

    @staticmethod
    def read_state(state: Mapping[str, Any]) -> tuple[Plan, bool] | None:
        """The plan that a state holds and whether the run went back to plain averaging; None: it holds no plan."""
        if _STATE_KEY not in state:
            return None
        try:
            kept = json.loads(saved.text(_STATE_KEY, state[_STATE_KEY]))
        except ValueError as error:
            raise Unsupported(f"the state's {_STATE_KEY!r} is not JSON ({error}): {saved.CURE}") from None
        if not isinstance(kept, dict) or not isinstance(kept.get("reverted"), bool):
            raise saved.refuse(_STATE_KEY, kept, "a plan, and whether it was given up")
        return Plan.from_json(kept.get("plan"), f"the plan in the state's {_STATE_KEY!r}"), kept["reverted"]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = self.read_state(state)
        if found is None:
            return
        self.plan, self.reverted = found
        self.handle.set_policy(Fixed("identity") if self.reverted else self.plan)
        self.end()
        self._say("goes on with the plan of the run that is resumed")

    # -- hooks --------------------------------------------------------------------------------------------------

    def _before_step(self, *_: Any) -> None:
        self._recorder.backward_is_over()
        if self._steps == WARM:
            begin = time.perf_counter()
            offered, own = self.auto.offered(), self._recorder.own
            self._benchmarks = benchmarks(self.model, self.optimizer, offered, self._say, own=own)
            self._measured_s = time.perf_counter() - begin

    def _after_step(self, *_: Any) -> None:
        racing = self._race is not None
        counts = self._steps >= self._next_block + race.SETTLING if racing else self._steps > WARM + 1
        self._recorder.end_step(count=counts)
        self._steps += 1
        self._recorder.keeps_own = not racing and self._steps == WARM
        if not racing and self._steps == LISTS_AT:
            self._begin()
        elif racing and self._steps == self._next_block:  # after a step that sent what a candidate had kept
            self._go_on()
        elif racing and self._steps == self._next_block + BLOCK:
            self._end_block()

    # -- the race -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        plain_s = self._slowest()
        told = [json.dumps(self._listed(plain_s)) if self._rank == 0 else ""]
        dist.broadcast_object_list(told, group_src=0, group=self._talk)
        said = json.loads(told[0])
        self._candidates = [each for each in map(Candidate.from_json, said["candidates"]) if self._works(each)]
        measuring = f"measuring took {self._measured_s:.1f} s"
        if len(self._candidates) == 1:
            self._choose(self._candidates[0])
            self._say(f"from step {self._steps} on: plain averaging: {said['why']}; {measuring}")
            return
        self._race = Race(len(self._candidates))
        self._say(f"races {', '.join(each.name for each in self._candidates)} from step {self._steps} on; {measuring}")
        self._recorder.forget()
        self._next_block = self._steps
        self._go_on()

    def _listed(self, plain_s: float) -> dict[str, Any]:
        """On rank 0: the candidates, and why there is but one, if so."""
        profile = self.profile = self._recorder.profile(**self._benchmarks)
        exposed_s = profile.exposed_s or 0.0
        codecs = () if exposed_s < LEAST_EXPOSED * plain_s else self.auto.offered()
        found = short_list(profile, codecs, plain_s, len(self.auto.codecs or ()) or LISTED)
        why = f"the exchange adds {1e3 * exposed_s:.1f} ms to the {1e3 * plain_s:.0f} ms of a step"
        return {"candidates": [each.to_json() for each in found], "why": why if not codecs else "no codec works here"}

    def _works(self, candidate: Candidate) -> bool:
        """Whether this model can train with it; all ranks find the same."""
        try:
            self._use(candidate)
        except Unsupported as error:
            self._say(f"{candidate.name} is left out: {error}")
            return False
        return True

    def _go_on(self) -> None:
        """The next candidate trains, or the winner does from now on."""
        assert self._race is not None
        if self._race.current is not None:
            self._use(self._candidates[self._race.current])
            return
        assert self._race.winner is not None
        self._choose(self._candidates[self._race.winner])
        self._say(f"from step {self._steps} on: {self._verdict(self._race)}")

    def _use(self, candidate: Candidate) -> None:
        self.handle.set_policy(Fixed("identity") if candidate.is_plain else candidate.plan)

    def _end_block(self) -> None:
        assert self._race is not None
        trained = self._race.current
        self._race.end_block(self._slowest())
        self._recorder.forget()
        self._next_block = self._steps
        if self._candidates[trained or 0].keeps_residuals and trained not in (self._race.current, self._race.winner):
            self._use(self._candidates[0])  # for one step, which sends the residuals
            self._next_block += 1
        else:
            self._go_on()

    def _choose(self, candidate: Candidate) -> None:
        self._use(candidate)
        self.plan, self.reverted = candidate.plan, candidate.is_plain
        if self.auto.save and self._rank == 0:
            candidate.plan.save(Path(self.auto.save))
        self.end()

    def _verdict(self, over: Race) -> str:
        """What won, and by how much, in words."""
        assert over.winner is not None
        won, ms = self._candidates[over.winner], [1e3 * over.seconds(i) for i in range(len(self._candidates))]
        others = [
            f"{ms[i] / ms[over.winner]:.2f}x {each.name} ({ms[i]:.0f})"
            for i, each in enumerate(self._candidates)
            if i != over.winner
        ]
        name = "plain averaging" if won.is_plain else won.name
        raced = f"raced {len(ms)} in {self._steps - LISTS_AT} steps"
        parts = [f"{name}, {ms[over.winner]:.0f} ms a step: {', '.join(others)}", raced, self.auto.left_out()]
        return "; ".join(filter(None, parts))

    def _slowest(self) -> float:
        """The steps that were measured, on the rank where they took longest."""
        seconds = torch.tensor(self._recorder.step_s(), dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=self._talk)
        return float(seconds)

    def end(self) -> None:
        """Nothing more is measured or decided."""
        for hook in self._hooks:
            hook.remove()
        self._recorder.remove()

    def _say(self, text: str) -> None:
        if self._rank == 0:
            self._say_to(text)


__all__ = ["Auto", "Pilot"]

"""`auto`: profiles the first steps of the user's own run, plans, switches all ranks at the same step, and checks.

    plain steps -> codecs and network are measured -> plain steps are timed -> plan -> planned steps are timed -> stay,
    or back to plain

Everything hangs on the count of optimizer steps, which is the same on all ranks; rank 0 plans and tells the others.
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
from .answer import LEAST_GAIN, Request, answer
from .choices import Limits
from .measure import DEFAULT_CODECS, WARM, benchmarks
from .measure.record import Recorder
from .measure.wire import own_group
from .network import Topology
from .profile import Profile
from .units import DDP_BUCKET

HARMLESS = ("gcomp", "gcomp:mode=lossless")
TIMED = 10  # steps on which a decision rests
SETTLING = 2  # steps after a switch that do not count
_STATE_KEY = "auto.plan"
NOISE = 0.02  # a plan that is slower than plain by more than this is given up


@dataclass(frozen=True)
class Auto:
    """What users may say: `auto`, `auto:lossy=true`, `auto:codecs=gcomp,powersgd:rank=2`, `auto:save=plan.json`."""

    lossy: bool = False
    codecs: tuple[str, ...] | None = None
    save: str = "plan.json"  # where rank 0 leaves the plan; empty: nowhere

    @classmethod
    def parse(cls, text: str) -> Auto:
        name, _, options = text.partition(":")
        if name != "auto":
            raise PlanError(f"{text!r} is not auto")
        values: dict[str, Any] = {}
        key = ""
        for item in filter(None, options.split(",")):
            word, equals, value = item.partition("=")
            if word in ("lossy", "codecs", "save") and equals:
                key, item = word, value
                if key in values:
                    raise PlanError(f"{text!r} says {key} twice")
                values[key] = []
            elif word in ("lossy", "codecs", "save"):
                example = {"lossy": "true", "codecs": "gcomp,powersgd", "save": "plan.json"}[word]
                raise PlanError(f"cannot read {item!r} in {text!r}. Did you mean 'auto:{word}={example}'?")
            elif key != "codecs":
                raise PlanError(f"auto has no option {word!r}{nearest(word, ('lossy', 'codecs', 'save'))}")
            values[key].append(item)
        if values.get("lossy", ["false"]) not in (["true"], ["false"]):
            raise PlanError(f"{text!r}: lossy is true or false")
        codecs = tuple(values["codecs"]) if "codecs" in values else None
        return cls(values.get("lossy") == ["true"], codecs, values.get("save", ["plan.json"])[0])

    def offered(self) -> tuple[str, ...]:
        return self.codecs or (DEFAULT_CODECS if self.lossy else HARMLESS)


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
        self.plan: Plan | None = None  # once there is one
        self.profile: Profile | None = None  # that it was made from; on rank 0
        self.plain_s: float | None = None  # measured
        self.planned_s: float | None = None
        self.reverted = False
        self._say_to = say or (lambda text: print(f"gradzip auto: {text}", file=sys.stderr, flush=True))
        self._recorder = Recorder(model)
        self._benchmarks: dict[str, Any] = {}
        self._measured_s = 0.0  # what measuring cost the run
        self._steps = 0
        self._checked_at: int | None = None
        self._rank = dist.get_rank(model.process_group)
        self._talk = own_group(model.process_group)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    # -- a resumed run goes on with its plan --------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The plan that is in use, as bytes, once it has stood the test."""
        if self.plan is None or (self._checked_at is not None and self.planned_s is None):
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
        self._recorder.end_step(count=self._counts())
        self._steps += 1
        self._recorder.keeps_own = self.plan is None and self._steps == WARM
        if self.plan is None and self._steps == WARM + SETTLING + TIMED:
            self._switch()
        elif self._checked_at == self._steps:
            self._check()

    def _counts(self) -> bool:
        if self.plan is None:
            return self._steps > WARM + 1
        assert self._checked_at is not None
        return self._steps >= self._checked_at - TIMED

    # -- decisions ----------------------------------------------------------------------------------------------

    def _switch(self) -> None:
        self.plain_s = self._slowest()
        told = [json.dumps(self._planned()) if self._rank == 0 else ""]
        dist.broadcast_object_list(told, group_src=0, group=self._talk)
        said = json.loads(told[0])
        self.plan = Plan.from_json(said["plan"])
        if said["pays"]:
            self.handle.set_policy(self.plan)
            self._checked_at = self._steps + SETTLING + TIMED
            self._recorder.forget()
        else:
            self.end()
        self._say(f"from step {self._steps} on: {said['words']}; measuring took {self._measured_s:.1f} s")

    def _planned(self) -> dict[str, Any]:
        """On rank 0: the plan, whether it pays, and that in words."""
        assert self.plain_s is not None
        profile = self.profile = self._recorder.profile(**self._benchmarks)
        topology = Topology.of(profile)
        limits = Limits(codecs=tuple(str(c.codec) for c in profile.codecs.values()))
        found = answer(Request(profile, topology, limits, profile.bucket_bytes or DDP_BUCKET))
        saved_s = found.plain_s - found.step_s if found.pays else 0.0
        step_s = self.plain_s - saved_s  # a step also loads data, and does what nobody measured
        plan = found.to_plan(step_s=step_s, plain_s=self.plain_s)
        if self.auto.save:
            plan.save(Path(self.auto.save))
        plain_ms, step_ms = self.plain_s * 1e3, step_s * 1e3
        used = sorted({option.codec for option in plan.options.values()} - {"identity"})
        words = (
            f"{' and '.join(used)}, expected {step_ms:.0f} ms a step after {plain_ms:.0f} ms without"
            if found.pays and used
            else f"plain averaging: compression would not shorten the {plain_ms:.0f} ms of a step"
            if found.gain <= LEAST_GAIN
            else f"plain averaging: compression may shorten the {plain_ms:.0f} ms of a step by "
            f"{1e3 * (found.plain_s - found.step_s):.0f} ms, but predictions may be off by as much"
        )
        return {"plan": plan.to_json(), "pays": bool(found.pays and used), "words": words}

    def _check(self) -> None:
        self.planned_s = self._slowest()
        assert self.plain_s is not None
        took = f"{self.planned_s * 1e3:.0f} ms a step, {self.plain_s * 1e3:.0f} ms without"
        if self.planned_s > self.plain_s * (1 + NOISE):
            self.reverted = True
            self.handle.set_policy(Fixed("identity"))
            self._say(f"measured {took}: back to plain averaging")
        else:
            self._say(f"measured {took}: the plan stays")
        self.end()

    def _slowest(self) -> float:
        """The step that was measured, on the rank where it took longest."""
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

"""The timeline of one backward pass: who uses which resource when. This is the reference; `fast` gives the same times.

A unit (a tensor, or a bucket of them) becomes ready when its part of backward is done, then takes its tasks one after
the other. The rules, which follow what the runtime does:

    resources     the processor that computes (and codes on the GPU), the core that a rank has for coding and sockets,
                  the copy engines, and each direction of the links inside and between hosts. Each does one thing at a
                  time.
    queues        first come, first served; who comes at the same moment is served in the order of units. A task of
                  several resources starts when it is first in the queues of all of them; one of none is a delay.
    computing     goes on when no coding waits for its processor: coding delays what is computed later.
    order         the k-th communication of a unit is not issued before the k-th of every earlier unit that has one,
                  because all ranks must issue alike.

Not modelled: stragglers and jitter, other traffic, memory bandwidth shared by copies, coding and computing, cores
shared by CPU coding and a model that is trained on the CPU, bandwidth shared by two exchanges at once (they queue).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RESOURCES = ("gpu", "cpu", "d2h", "h2d", "intra.out", "intra.in", "inter.out", "inter.in")
GPU, CPU, D2H, H2D = (1 << i for i in range(4))
INTRA_OUT, INTRA_IN, INTER_OUT, INTER_IN = (1 << i for i in range(4, 8))
LINKS = INTRA_OUT | INTRA_IN | INTER_OUT | INTER_IN


@dataclass(frozen=True)
class Task:
    label: str
    resources: int  # one bit for each of RESOURCES
    seconds: float

    @property
    def communicates(self) -> bool:
        return bool(self.resources & LINKS)


@dataclass(frozen=True)
class Event:
    """What ran: a task of a unit, or its part of backward."""

    unit: int
    step: int  # -1: backward
    label: str
    resources: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """Times are seconds after the start of backward."""

    events: tuple[Event, ...]  # in the order of their starts
    end_s: float
    compute_s: float  # backward alone

    @property
    def exposed_s(self) -> float:
        """What the exchange adds to backward."""
        return self.end_s - self.compute_s

    def busy_s(self, resources: int) -> float:
        return sum(e.end_s - e.start_s for e in self.events if e.resources & resources)

    def bubbles(self, resources: int) -> list[tuple[float, float]]:
        """When these resources wait between their first and their last use: nothing that came earlier is to blame."""
        used = sorted((e.start_s, e.end_s) for e in self.events if e.resources & resources and e.step >= 0)
        gaps, reached = [], used[0][1] if used else 0.0
        for start, end in used:
            if start > reached:
                gaps.append((reached, start))
            reached = max(reached, end)
        return gaps


def simulate(backward: Sequence[float], tasks: Sequence[Sequence[Task]]) -> Timeline:
    """backward[i] is the time that unit i computes for, tasks[i] what follows for it."""
    return _Simulation(backward, tasks).run()


class _Simulation:
    def __init__(self, backward: Sequence[float], tasks: Sequence[Sequence[Task]]) -> None:
        self.backward, self.tasks = backward, tasks
        self.queues: list[list[tuple[int, int]]] = [[] for _ in RESOURCES]  # of (unit, step)
        self.running: list[Event] = []
        self.finished: list[Event] = []
        self.computed = 0  # units whose backward is done
        self.computing = False
        self.asked: dict[int, int] = {}  # unit: the step that it wants to communicate in
        self.issued = [0] * (1 + max((len(t) for t in tasks), default=0))  # for each k: units that passed their k-th

    def run(self) -> Timeline:
        self.dispatch(0.0)
        while self.running:
            now = min(e.end_s for e in self.running)
            done = sorted((e for e in self.running if e.end_s == now), key=lambda e: (e.unit, e.step))
            self.running = [e for e in self.running if e.end_s != now]
            self.finished += done
            arrived = [self.complete(event) for event in done]
            for unit, step in sorted([a for a in arrived if a is not None] + self.release()):
                if not self.tasks[unit][step].resources:
                    self.start(unit, step, now)
                for i, queue in enumerate(self.queues):
                    if self.tasks[unit][step].resources >> i & 1:
                        queue.append((unit, step))
            self.dispatch(now)
        end = max((e.end_s for e in self.finished), default=0.0)
        events = sorted(self.finished, key=lambda e: (e.start_s, e.end_s, e.unit, e.step))
        return Timeline(tuple(events), end, sum(self.backward))

    def complete(self, event: Event) -> tuple[int, int] | None:
        """The next step of that unit, if it can be queued at once; communication has to ask."""
        if event.step < 0:
            self.computed += 1
            self.computing = False
        step = event.step + 1
        if step == len(self.tasks[event.unit]):
            return None
        if self.tasks[event.unit][step].communicates:
            self.asked[event.unit] = step
            return None
        return event.unit, step

    def release(self) -> list[tuple[int, int]]:
        """Communication that all earlier units let pass now."""
        released = []
        for k in range(len(self.issued)):
            while self.issued[k] < self.computed:
                unit = self.issued[k]
                rounds = [step for step, task in enumerate(self.tasks[unit]) if task.communicates]
                if k < len(rounds):
                    if self.asked.get(unit) != rounds[k]:
                        break
                    released.append((unit, self.asked.pop(unit)))
                self.issued[k] += 1
        return released

    def dispatch(self, now: float) -> None:
        for i, queue in enumerate(self.queues):
            if not queue or self.busy(1 << i):
                continue
            unit, step = queue[0]
            task = self.tasks[unit][step]
            wanted = [q for j, q in enumerate(self.queues) if task.resources >> j & 1]
            if not self.busy(task.resources) and all(q[0] == (unit, step) for q in wanted):
                for q in wanted:
                    q.pop(0)
                self.start(unit, step, now)
        unit = self.computed
        if not self.computing and unit < len(self.backward) and not self.busy(GPU) and not self.queues[0]:
            self.computing = True
            self.running.append(Event(unit, -1, "backward", GPU, now, now + self.backward[unit]))

    def start(self, unit: int, step: int, now: float) -> None:
        task = self.tasks[unit][step]
        self.running.append(Event(unit, step, task.label, task.resources, now, now + task.seconds))

    def busy(self, resources: int) -> bool:
        return any(e.resources & resources for e in self.running)

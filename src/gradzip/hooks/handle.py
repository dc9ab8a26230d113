"""Handle: the compression of one model's gradients. What `attach` returns."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from .. import saved
from ..accordion import Accordion
from ..codecs import Codec
from ..errors import GradzipWarning, PeerError, Unsupported
from ..exchange.finiteness import all_finite
from ..exchange.gradients import Future, Late
from ..exchange.on_host.backward import Attached, HostBackward, is_alone
from ..exchange.on_stream import runner as on_stream
from ..exchange.on_stream.backward import StreamBackward
from ..exchange.on_stream.checks import StepResult
from ..exchange.on_stream.slots import LATE
from ..exchange.outcome import Outcome
from ..exchange.peers.abort import Abort
from ..exchange.peers.channel import open_channel
from ..exchange.shared_book import SharedBook
from ..exchange.topology import Topology
from ..exchange.way import Scheme, Way
from ..feedback import Memory, Value
from ..option import Option
from ..plan import Plan
from ..policy import Adaptive, Policy, as_policy, small
from ..sensitivity.shape import SecondMoments
from ..sensitivity.survey import fetch
from . import report, runners
from .assumptions import Assumptions
from .buckets import Buckets
from .checkpoint import read_checkpoint, read_codecs, resume
from .default import Default
from .early_fetch import EarlyFetch
from .metrics import Metrics, Writer
from .noise import NoiseShare
from .progress import Progress
from .settings import checks_results
from .ways import Ways, parameter_names, sparse_parameters

if TYPE_CHECKING:
    from ..planner.auto import Pilot
    from ..planner.perfetto import Span
    from .trace import HostTracer, StreamTracer

STATE_VERSION = 0
_BEHIND = "the exchange failed when the last gradients were in use already, so that this state is a step behind"
_CODECS, _POLICY = "codecs", "policy/"  # keys of the state: which codec each parameter had, and what a policy learnt


class Handle:
    """The compression of one model's gradients; what `attach` returns."""

    pilot: Pilot | None = None  # of the policy "auto"
    on_detach: Callable[[], None] | None = None

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizers: Sequence[torch.optim.Optimizer],
        policy: Policy,
        scaler: torch.amp.GradScaler | None,
        mesh: DeviceMesh | None = None,
        timeout: timedelta | None = None,
        heartbeat: timedelta | None = None,
        default: Default | None = None,
    ) -> None:
        """`default`: why this policy, where the user named none."""
        self.error: BaseException | None = None  # why the exchange stopped; backward raises it as a RuntimeError
        self._model = weakref.ref(model)
        self._names = parameter_names(model)
        self._buckets = Buckets(self._names)
        self._device = next(iter(self._names)).device if self._names else torch.device("cpu")
        self._optimizers, self._scaler, self._policy = optimizers, scaler, policy
        self._default = default
        self._learns = isinstance(policy, Adaptive)
        group = model.process_group
        rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
        topology = Topology.of_ranks(rank, ranks) if mesh is None else Topology.of_mesh(rank, ranks, mesh)
        self._group = group
        sparse, on_gpu = sparse_parameters(model), self._device.type == "cuda"
        self._ways = Ways(self._names, self._device, optimizers, topology, sparse)
        ways = self._ways.check(policy)
        self._types = {name: parameter.dtype for parameter, name in self._names.items()}
        self._patient = model.find_unused_parameters or model.static_graph
        runner = self._choose_runner(ways)
        self._channel = open_channel(group, self._device, mesh, timeout, heartbeat, bool(sparse) and not on_gpu)
        self._memory = Memory(self._channel.rank, patient=self._patient)
        self._books = SharedBook()
        self._backward: HostBackward | StreamBackward | None = None
        self._before: threading.Event | None = None  # the end of the last pass, for which DDP may not have waited
        self._behind = False  # the exchange failed after DDP had its buckets: the model may be a step ahead
        on_streams = on_stream.reason_against(group, self._device) is None
        self._shapes = SecondMoments(optimizers, self._names, on_streams)
        self._attached = Attached(
            self._channel,
            self._memory,
            self._end,
            self._warn,
            group,
            checks_results(),
            self._learns,
            self._books,
            shapes=self._shapes,
            shapes_version=object(),
        )
        self._stream: on_stream.StreamRunner | None = None
        self._abort: Abort | None = None
        self._slots_to_load: on_stream.SavedSlots = {}, []  # of a state that was loaded before the runner was needed
        self._loaded = ""  # in words, a state that ranks have still to compare
        self._bytes_out: dict[int, int] = {}  # of steps on streams whose times are not known yet
        self._rates: dict[int, list[float]] = {}  # of the steps that a policy on streams has still to learn of
        self._noise = NoiseShare(self._warn)
        self._scheme = Scheme({})
        self._by_torch = False  # the last step was averaged uncompressed, by DDP's own group
        self._agreed: Scheme | None = None  # plain for everything, and all ranks have said so
        self._steps = self._steps_here = 0  # backward passes in all, and in this process
        self._totals, self._bytes_raw, self._exposed = Outcome(), 0, 0.0
        self._parts: dict[str, Outcome] = {}
        self._to_warn: list[str] = []  # from the channel's threads; said on the user's
        self._told: set[str] = set()
        self._metrics: list[Metrics] = []
        self._lock = threading.Lock()
        self._progress = _progress(policy)
        self._tracer: HostTracer | None = None
        self._stream_tracer: StreamTracer | None = None
        self._was_asked = False  # for stats()
        self._meet(Scheme(ways, runner == runners.STREAM))
        self._assumptions = Assumptions(optimizers, self._warn)
        self._early_fetch = EarlyFetch(model, self._numbers) if self._device.type == "cuda" else None
        self._journal = report.Journal(self._channel.rank != 0, self._stats_now, self._look)
        if self._channel.rank == 0:
            why = "" if default is None else f". {default.sentence}"
            report.say(f"{self._ways.described(policy, self._channel.world)}{why}")
            if unheld := self._ways.unheld():
                report.say(report.in_no_optimizer(unheld))

    def _meet(self, scheme: Scheme) -> None:
        """Compares with the other ranks what the first step will be; gives the channel back if they differ."""
        try:
            self._channel.compare(self._agreement(scheme), wait=scheme.shaped or scheme.streams)
            if scheme.streams:
                self._scheme = scheme
                self._start_stream()
        except BaseException:
            self._channel.leave()
            raise

    def _agreement(self, scheme: Scheme) -> str:
        """What all ranks must have alike before they exchange anything by this scheme."""
        text = f"{len(self._names)} tensors, {scheme.words}"
        if not scheme.streams:  # what differs is told when the first messages meet
            return text
        pairs = repr([(name, p.dtype, p.shape, scheme.ways[name].kind) for p, name in self._names.items()])
        digest = hashlib.blake2b(pairs.encode(), digest_size=4).hexdigest()
        model, buckets = self._model(), ""
        if model is not None and model.find_unused_parameters and not model.static_graph:
            buckets = f"first in buckets of {model.bucket_bytes_cap} bytes, "  # else DDP does as rank 0 has it
        version = torch.__version__
        return f"{text}, {buckets}on streams with torch {version}; names and codecs have the digest {digest}"

    def _start_stream(self) -> on_stream.StreamRunner:
        if self._stream is None:
            about = self._group, self._device, self._channel.topology, self._shapes, self._memory
            self._stream = on_stream.StreamRunner(*about)
            self._stream.go_on_from(self._slots_to_load)
            said = runners.crowded(self._scheme.ways, self._channel.topology)
            if said is not None and self._channel.rank == 0:
                self._warn(said)
            if self._device.type == "cuda":
                self._abort = Abort(self._group, self._device)
                self._channel.on_failure.append(self._abort)
        return self._stream

    # -- for the user -------------------------------------------------------------------------------------------

    def set_policy(self, policy: str | Codec | Option | Policy) -> None:
        """Uses another policy from the next step on. Call it on all ranks at the same point."""
        chosen = as_policy(policy)
        ways = self._ways.check(chosen)
        self._choose_runner(ways)
        self._drain()
        self._memory.fold()  # what sums lost on routes that may no longer be taken
        self._policy, self._progress, self._agreed = chosen, _progress(chosen), None
        self._default = None
        self._learns = isinstance(chosen, Adaptive)

    def trace(self, path: str | Path, steps: int = 2) -> None:
        """Writes what happens in the next steps to a file for ui.perfetto.dev, beside what the plan predicts if there
        is one. Of this rank alone: call it on one.
        """
        model = self._model()
        if steps < 1 or model is None:
            raise Unsupported(f"trace(steps={steps}): give at least one step of a model that is still there")
        from .trace import HostTracer, StreamTracer  # who does not trace need not load the planner

        self._drain()
        if self._stream is not None and self._scheme.streams:
            self._stream_tracer = StreamTracer(Path(path), steps, model, self._warn, self._stream.times)
        else:
            self._tracer = HostTracer(Path(path), steps, model, self._warn, self._channel.watch)

    def end_epoch(self) -> None:
        """Tells a policy that counts epochs that one is over. Call it on all ranks at the same point."""
        self._drain()
        if isinstance(self._policy, Adaptive):
            self._policy.end_epoch()

    def stats(self) -> dict[str, Any]:
        """Totals since attach, for this rank.

        `bytes_sent` is what it sent and `bytes_raw` what a ring all-reduce would have; `coding_seconds` and
        `waiting_seconds` are what its threads spent coding and waiting for data, `exposed_seconds` what passed between
        the arrival of the last bucket and the end of the exchange. (On streams that is measured once someone has asked,
        by this, `log`, a plan or the lines that rank 0 logs, and is known two steps later.) `codecs` has the same by
        codec and route (what travels with PowerSGD's factors counts there), `tensors` the option and the memory of each
        parameter, `memory` the bytes held from step to step, `noise` what rounding at random came to (hooks/noise.py),
        `runner` what carried the last step, `history` what a policy that learns has decided, `prediction` what the plan
        said of a step beside the median of the last ones.
        """
        self._drain()
        self._was_asked = True
        return self._stats_now()

    def log(self, writer: Writer, every: int = 100) -> None:
        """From now on, rank 0 hands the means of every so many steps to TensorBoard's SummaryWriter or to a function.

        The function gets a dict of numbers and the step, as `wandb.log` does. All ranks may call this.
        """
        metrics = Metrics(writer, every)
        if self._channel.rank == 0:
            self._metrics.append(metrics)

    def _log(self) -> None:
        for metrics in list(self._metrics):
            try:
                metrics.step(self.stats)
            except Exception as error:  # of the writer: a full disk must not end the training
                self._metrics.remove(metrics)
                self._warn(f"log: the writer failed and will not be called again: {type(error).__name__}: {error}")

    def _look(self) -> None:
        """Takes note of steps on streams that are over, at the end of the process: no other call will tell of them."""
        if self._stream is None or self.error is not None:
            return
        try:
            self._note(self._stream.look)
            self._note_times(self._steps)
        except PeerError as error:
            report.logger.error("%s", error)

    def _stats_now(self) -> dict[str, Any]:
        with self._lock:
            return self._stats()

    def _stats(self) -> dict[str, Any]:
        sent, world, held = self._totals.bytes_sent, self._channel.world, self._memory.held()
        raw = 2 * (world - 1) * self._bytes_raw // world
        tensors = {
            name: {"option": str(self._policy.option(name, p.shape)), "values": p.numel(), "memory": held.get(name, 0)}
            for p, name in self._names.items()
            if p.requires_grad
        }
        learns = self._policy if isinstance(self._policy, Adaptive) else None
        return {
            "steps": self._steps,
            "steps_here": self._steps_here,
            "bytes_sent": sent,
            "bytes_raw": raw,
            "ratio": raw / sent if sent else 1.0,
            "collectives": self._totals.collectives,
            "coding_seconds": self._totals.coding,
            "waiting_seconds": self._totals.waiting,
            "exposed_seconds": self._exposed,
            "memory": sum(held.values()) + (learns.held() if learns else 0),
            "codecs": {
                kind: {"bytes_sent": part.bytes_sent, "coding_seconds": part.coding}
                for kind, part in self._parts.items()
            },
            "tensors": tensors,
            "noise": self._noise.stats(world),
            "runner": self._runner(),
            "history": list(learns.history) if learns else [],
            "prediction": {} if self._progress is None else self._progress.compared(),
        }

    def _runner(self) -> str:
        """What carried the gradients of the last step; empty before the first one."""
        if not (self._steps_here and self._scheme.ways):
            return ""
        if self._scheme.streams:
            return runners.STREAM
        return runners.TORCH if self._by_torch else runners.HOST

    def detach(self) -> None:
        """Back to plain averaging, from the next step on. Call it on all ranks at the same point.

        Buffers are given back, on GPUs too; what error feedback holds stays for `state_dict`, as long as the handle.
        """
        if self.pilot is not None:
            self.pilot.end()
        if self.on_detach is None:
            return
        self.on_detach()
        self.on_detach = None
        self._assumptions.remove()
        if self._early_fetch is not None:
            self._early_fetch.remove()
        self._drain()
        if self._behind:
            self._warn(f"{_BEHIND}: {self.error}")
            self._say()
        self._journal.end()
        if self._abort is not None:
            self._abort.hear()
            self._channel.on_failure.remove(self._abort)
        self._channel.leave()
        self._free()

    def _free(self) -> None:
        """Lets go of buffers and tables. Where an error ended the exchange, something may still be writing to them."""
        if self.error is not None:
            return
        self._buckets, self._attached.late, self._early_fetch = Buckets(self._names), Late(), None
        self._shapes.free()
        if self._stream is not None:
            self._stream.free()

    # -- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Value]:
        """All that a resume needs: tensors and numbers, in one flat dictionary.

        Keys that start with `rank` belong to one rank: save the dictionary of every rank, or hand it to
        torch.distributed.checkpoint, which keeps one copy of the others.
        """
        self._drain()
        if self._behind:
            raise PeerError(f"{_BEHIND}: {self.error}. Go on from the last checkpoint") from self.error
        codecs = {name: way.codec.name for name, way in self._ways.of(self._policy, 1.0).items()}
        state: dict[str, Value] = {
            "version": STATE_VERSION,
            "steps": self._steps,
            "world_size": self._channel.world,
            _CODECS: torch.tensor(list(json.dumps(codecs, sort_keys=True).encode()), dtype=torch.uint8),
        }
        if self.pilot is not None:
            state |= self.pilot.state_dict()
        if isinstance(self._policy, Adaptive):
            state |= {f"{_POLICY}{key}": value for key, value in self._policy.state_dict().items()}
        if self._stream is not None:
            state |= self._stream.state_dict()
        return state | self._books.state_dict() | self._memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Value]) -> None:
        """Goes on from a state. One that does not fit the model or the policy is refused, and nothing is changed.

        With another number of ranks each keeps what was saved under its number; the rest of the residuals is lost.
        """
        self._drain()
        if (version := saved.counter(state, "version")) != STATE_VERSION:
            raise Unsupported(f"this state has version {version}; this gradzip reads {STATE_VERSION}")
        steps, world = saved.counter(state, "steps"), saved.counter(state, "world_size", least=1)
        shapes = {name: p.shape for p, name in self._names.items()}
        self._memory.check_state_dict(state, shapes)
        self._books.read_state(state)
        slots = on_stream.read_state(state)
        if self.pilot is not None:
            self.pilot.read_state(state)
        self._load_policy(state, shapes)
        if self.pilot is not None:
            self.pilot.load_state_dict(state)
        self._memory.forms = {n: w.codec.error_memory for n, w in self._ways.of(self._policy, 1.0).items()}
        self._memory.load_state_dict(state, shapes, self._device)
        self._books.load_state_dict(state)
        self._slots_to_load = slots
        self._loaded = f"a state of step {steps}, {on_stream.described(slots)}"
        if self._stream is not None:
            self._stream.go_on_from(slots)
        self._steps, self._agreed = steps, None
        if world != self._channel.world:
            self._memory.fold()  # sums are cut elsewhere now
            warnings.warn(
                f"the state was saved by {world} ranks and is loaded by {self._channel.world}: "
                "what error feedback held on ranks that are gone is lost, and new ranks start with nothing",
                GradzipWarning,
                stacklevel=2,
            )

    def resume(self, state: Mapping[str, Value] | None) -> None:
        """Loads what each rank saved. Call it on all ranks, with None on a rank for which nothing was saved.

        Such a rank starts with empty residuals at the step of the others, and a log line says so.
        """
        resume(self, state, self._group)

    def load_checkpoint(self, path: str | Path, prefix: str = "") -> None:
        """Goes on from a checkpoint of torch.distributed.checkpoint, in which state_dict was saved under `prefix`.

        `dcp.load` reads only what is asked for, and a new handle cannot ask for residuals that it does not know of.
        """
        self.load_state_dict(read_checkpoint(path, prefix, self._channel.rank))

    def _load_policy(self, state: Mapping[str, Value], shapes: Mapping[str, torch.Size]) -> None:
        """What the policy had learnt; and it must give each parameter the codec that the state is of."""
        learnt = {key.removeprefix(_POLICY): value for key, value in state.items() if key.startswith(_POLICY)}
        before = None
        if learnt and not isinstance(self._policy, Adaptive):
            raise Unsupported("the state is of a policy that learns, such as Accordion, and this one does not")
        if isinstance(self._policy, Adaptive):
            if not learnt:
                raise Unsupported(f"the state holds nothing that {self._policy!r} has learnt: it is of another policy")
            before = self._policy.state_dict()
            known = {"shapes": shapes} if isinstance(self._policy, Accordion) else {}
            self._policy.load_state_dict(learnt, **known)
        if self.pilot is not None:
            return  # it may be measuring again what it had planned
        had = read_codecs(_CODECS, state.get(_CODECS))
        ways = self._ways.of(self._policy, 1.0)
        if had.keys() != ways.keys():
            name = sorted(had.keys() ^ ways.keys())[0]
            problem = f"another model: {name!r} is a parameter of {'that' if name in had else 'this'} one alone"
        elif differing := [name for name, way in ways.items() if way.codec.name != had[name]]:
            name = next((each for each in differing if not small(shapes[each])), differing[0])
            problem = (
                f"another codec: {name!r} had {had[name]} and has {ways[name].codec.name} now"
                f"{'' if self._default is None else f', by default ({self._default.words})'}. Attach with the policy "
                f"that it was saved under, such as {had[name]!r}, load it, then call set_policy"
            )
        else:
            return
        if before is not None and isinstance(self._policy, Adaptive):
            self._policy.load_state_dict(before)
        raise Unsupported(f"the state is of {problem}")

    # -- words --------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Waits for what is under way, and says what has to be said."""
        self._channel.drain()
        if self._stream is not None and self.error is None:
            try:
                self._note(self._stream.drain)
                self._note_times(None)
            except PeerError as error:
                self._heard()
                self.error = self._channel.fail(error)
        self._say()

    def _say(self) -> None:
        while self._to_warn:
            warnings.warn(self._to_warn.pop(0), GradzipWarning, stacklevel=3)

    def _warn(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._to_warn.append(text)

    # -- on the thread of backward ------------------------------------------------------------------------------

    def _begin(self) -> HostBackward | StreamBackward:
        if self._before is not None:
            self._before.wait()  # a formality: DDP has had its buckets for a while
        if self._stream is not None:
            self._note(self._stream.drain if self._learns else self._stream.settle)
        self._memory.drop()  # what a backward that was broken off has left
        self._log()
        self._say()
        self._journal.step(self._steps_here)
        read = fetch if self._early_fetch is None else self._early_fetch.read
        held = self._scale_held()
        scale = read([held])[0] if held is not None else 1.0 if self._scaler is None else self._scaler.get_scale()
        ways = self._ways.of(self._policy, scale, read, floors=not is_alone(self._channel))
        if ways is not self._scheme.ways:
            self._choose_scheme(ways)
        if self._scheme.streams and not is_alone(self._channel):
            return self._begin_streamed(scale)
        if self._scheme.shaped and self._shapes.renew():
            self._attached.shapes_version = object()
        self._attached.learns, rates, agreed = self._learns, self._learning_rates(), self._agreed is self._scheme
        joined = self._has_joined()
        begun = HostBackward(self._steps, scale, self._scheme, self._attached, rates, agreed, joined, self._joins())
        self._assumptions.begin(active=self._scheme.graded and not begun.alone)
        return begun

    def _choose_runner(self, ways: Mapping[str, Way]) -> str:
        return runners.choose(ways, self._types, self._device, self._group, self._patient)

    def _choose_scheme(self, ways: dict[str, Way]) -> None:
        before, renewed = self._scheme, self._scheme.with_floors_of(ways)
        if renewed is not None:
            self._scheme = renewed
            return
        self._scheme = Scheme(ways, self._choose_runner(ways) == runners.STREAM)
        text = self._agreement(self._scheme)
        if (self._scheme.streams or before.streams) and text != self._agreement(before):
            self._channel.compare(text, wait=True)  # unequal sizes would hang NCCL
        if self._scheme.streams:
            self._start_stream()

    def _begin_streamed(self, scale: float) -> StreamBackward:
        runner = self._start_stream()
        if self._loaded:
            self._channel.compare(self._loaded, wait=True, loaded=True)
            self._loaded = ""
        self._has_joined()  # warns
        # A rank that has run out of inputs takes no steps, so that its second moments fall behind: nobody uses them.
        use_shapes = self._scheme.shaped and not self._joins()
        late = self._attached.late if self._scheme.factors else None
        observe: Callable[[str, torch.Tensor], None] | None = None
        if self._learns and isinstance(self._policy, Adaptive):  # which takes long to find out
            if self._joins():
                raise Unsupported(
                    f"{self._policy!r} learns from steps that all ranks take, and under Join a GPU cannot tell which "
                    "these are: use a policy that does not learn, such as Fixed"
                )
            observe = functools.partial(self._policy.observe, scale=scale)
            self._rates[self._steps] = self._learning_rates()
        self._channel.standing.begin_pass()
        begun = StreamBackward(self._scheme.ways, self._channel, runner, self._end_streamed, late, observe)
        then = None if observe is None else begun.show
        runner.times.wants_stages = self._progress is not None
        runner.times.wants_exposed = self._was_asked or bool(self._metrics) or self._journal.is_read
        self._note(lambda: runner.begin(self._steps, use_shapes, self._attached.check, scale, then))
        self._note_times(self._steps - LATE)
        self._assumptions.begin(active=False)
        return begun

    def _learning_rates(self) -> list[float]:
        return [float(group["lr"]) for optimizer in self._optimizers for group in optimizer.param_groups]

    def _end_streamed(self, ended: StreamBackward) -> None:
        """All of a backward pass is enqueued."""
        with self._lock:
            for kind, part in ended.parts.items():
                self._totals.add(part)
                self._parts.setdefault(kind, Outcome()).add(part)
            self._bytes_raw += ended.raw_bytes
            if self._progress is not None:
                self._bytes_out[self._steps] = sum(part.bytes_out for part in ended.parts.values())
            self._steps += 1
            self._steps_here += 1
            self._agreed = None

    def _note(self, read: Callable[[], Sequence[StepResult]]) -> None:
        """Takes note of what becomes known of earlier steps."""
        try:
            rows = read()
            if self._channel.error is not None:  # a rank is gone: what was read never came
                raise PeerError(str(self._channel.error)) from self._channel.error
        except PeerError:
            self._behind = True  # the optimizer has used gradients that were wrong
            raise
        with self._lock:
            for row in rows:
                self._noise.step(row.outcome, row.outcome.bytes_sent)
                rates = self._rates.pop(row.step, None)
                if rates is not None and row.outcome.finite and isinstance(self._policy, Adaptive):
                    self._policy.end_step(rates)

    def _note_times(self, last: int | None) -> None:
        """Takes note of when the work of steps up to that one ran, as far as it is known; None: waits for all."""
        assert self._stream is not None
        with self._lock:
            for known in self._stream.times.read(last):
                self._exposed += known.exposed
                sent = self._bytes_out.pop(known.step, None)
                if sent is not None:
                    self._compare(known.ended, known.wire, sent, known.exposed)
                tracer = self._stream_tracer
                if tracer is not None and tracer.step(known.step + 1, known.moments, self._predicted()):
                    self._stream_tracer = None

    def _scale_held(self) -> torch.Tensor | None:
        """Where the scaler keeps the loss scale, if it is torch's own."""
        scaler = self._scaler
        return scaler._get_scale_async() if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else None

    def _numbers(self) -> list[torch.Tensor]:
        """What backward will have to know of the device."""
        held = self._scale_held()
        numbers = [] if held is None else [held]
        for optimizer in self._optimizers if self._scheme.graded else ():
            steps = [state.get("step") for state in optimizer.state.values()]
            numbers += [step for step in steps if isinstance(step, torch.Tensor)]
        return numbers

    def _joins(self) -> bool:
        """Whether the model runs under Join, where ranks may run out of inputs; the same on all ranks."""
        model = self._model()
        return model is not None and model._join_config.enable

    def _has_joined(self) -> bool:
        """Whether this rank has run out of inputs: under Join, it calls the hook outside of any backward."""
        if not self._joins():
            return False
        model = self._model()
        if getattr(model, "_divide_by_initial_world_size", True) is False:
            self._warn(
                "join(divide_by_initial_world_size=False) counts for DDP's own averaging alone: gradzip divides by the "
                "number of all ranks, also when some have no more inputs"
            )
        return torch._C._current_graph_task_id() == -1

    def reduce(self, bucket: GradBucket) -> Future:
        """Takes a bucket in hand and returns at once; the future is its averaged buffer."""
        self.error = self.error or self._channel.error
        if self.error is not None:
            self._heard()
            self._doubt()
            self._channel.wait_told()
            raise PeerError(f"the exchange stopped at an earlier error: {self.error}") from self.error
        try:
            if bucket.index() == 0 or self._backward is None:
                self._backward = self._begin()
            buffer, last = bucket.buffer(), bucket.is_last()
            sparse = buffer.layout != torch.strided
            future = (
                self._backward.take_sparse(buffer, self._group, last)
                if sparse
                else self._backward.take_buffer(buffer, last)
            )
            if future is None:
                future = self._backward.take(buffer, self._buckets.named(bucket, buffer), last)
            if last:
                self._before = None if self._backward.plain and not sparse else self._backward.over
                self._backward = None
        except Exception as error:
            self._heard()
            self._doubt()
            self.error = self._channel.explained(error)  # tells the other ranks, which would wait for this one
            if self.error is not error:
                raise PeerError(f"the exchange stopped: {self.error}") from self.error  # what it met follows from that
            raise
        return future

    def _doubt(self) -> None:
        """The exchange ends with an error: what was enqueued may be cut off, and nobody will read what it told."""
        self._behind |= self._stream is not None and self._stream.unread

    def _heard(self) -> None:
        """The user's code is about to see the error."""
        if self._abort is not None:
            self._abort.hear()

    # -- on the channel's threads -------------------------------------------------------------------------------

    def _end(self, ended: HostBackward) -> None:
        """A backward pass is through, or has failed."""
        with self._lock, torch.no_grad():
            if ended.totals.error is not None:
                self.error = self.error or ended.totals.error
                self._behind |= ended.gave_early
                return
            self._totals.add(ended.totals)
            for kind, part in ended.parts.items():
                self._parts.setdefault(kind, Outcome()).add(part)
            self._bytes_raw += ended.raw_bytes
            self._exposed += ended.exposed
            self._noise.step(ended.totals, sum(part.bytes_sent for part in ended.parts.values() if part.values))
            self._steps += 1
            self._steps_here += 1
            now = time.perf_counter()
            self._compare(now, self._channel.watch.wire_seconds(), ended.totals.bytes_out, ended.exposed)
            if self._tracer is not None and self._tracer.step(self._steps, now - ended.exposed, self._predicted()):
                self._tracer = None
            self._agreed = self._scheme if ended.plain else None
            self._by_torch = ended.by_torch
            if self._assumptions.samples:
                parameters = {name: p for p, name in self._names.items()}
                graded = [(name, mean) for name, mean in ended.results if ended.ways[name].floor is not None]
                self._assumptions.sample(parameters, graded, ended.scale)
            if ended.learns and isinstance(self._policy, Adaptive):
                self._teach(self._policy, ended)

    def _compare(self, now: float, wire_s: float, bytes_out: int, exposed: float) -> None:
        """A step beside what its plan said of it."""
        if self._progress is not None:
            said = self._progress.step(now, wire_s, bytes_out, exposed)
            if said and self._channel.rank == 0:
                self._warn(said)

    def _predicted(self) -> list[Span]:
        """The timeline of the plan, if there is one."""
        if not isinstance(self._policy, Plan):
            return []
        from ..planner import perfetto

        return perfetto.spans(self._policy)

    def _teach(self, policy: Adaptive, ended: HostBackward) -> None:
        """Shows a policy the means of a step that all ranks took, and will take."""
        if ended.one_has_joined() or not ended.totals.finite:
            return
        if not all_finite([mean for _, mean in ended.results]):
            return
        for name, mean in ended.results:
            policy.observe(name, mean, ended.scale)
        policy.end_step(ended.rates)


def _progress(policy: Policy) -> Progress | None:
    return Progress(policy.expected) if isinstance(policy, Plan) and policy.expected else None

"""One backward pass of a model on a GPU, whose gradients the pipeline carries.

What is plain for everything goes to DDP's own group, after a first step that ranks agree on message by message. Where a
constant in hooks/runners.py says so, the host runner carries messages, which the pipeline compares between ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..codecs import Context
from ..codecs.baseline import Identity
from ..exchange import plain
from ..exchange.backward import Attached, Backward, Ticket
from ..exchange.gradients import PLAIN, Bucket, Draft, Future, Named, Scheme, shares_book
from ..exchange.outcome import Outcome
from . import checks
from .channel import PipelineChannel
from .message import Message, average_plainly, no_steps, single, submit
from .pipeline import Agreement, Job
from .terms import Exchange, Steps


class PipelineBackward(Backward):
    channel: PipelineChannel

    def __init__(self, number: int, scale: float, scheme: Scheme, attached: Attached, *more: Any, **named: Any) -> None:
        super().__init__(number, scale, scheme, attached, *more, **named)
        # DDP may have its buckets while the GPU still works on them, where nobody here looks at means.
        self._early = not (self.learns or scheme.graded or scheme.plain)
        self._agreements: list[Job] = []  # of all ranks on what the host runner sends
        self._by_torch_job: Job | None = None  # of all ranks on what torch adds up
        if self.by_torch:
            self._by_torch_job = self._job(f"plain averaging at step {number} by torch ({scheme.words})")
        self._comparison: checks.Comparison | None = None
        self._shape_comparison: checks.Comparison | None = None
        about = self._joined, number, self.channel, attached.warn
        if (self._floors or self.learns) and not self.alone:
            self._comparison = checks.Comparison(self._floors, *about)
        if self._compares_shapes and not self.alone:
            self._shape_comparison = checks.ShapeComparison(self.shapes, *about)

    # -- plain averaging ----------------------------------------------------------------------------------------

    def _averaged(self, buffer: torch.Tensor) -> Future:
        if buffer.device.type != "cuda":
            return super()._averaged(buffer)
        with self._lock:
            self._open += 1
        assert self.attached.group is not None
        return plain.average(buffer, self.attached.group, self.channel, functools.partial(self._ended, None, PLAIN))

    def _average(self, buffer: torch.Tensor, done: Callable[[Outcome], None]) -> None:
        assert self.attached.group is not None
        plain.average(buffer, self.attached.group, self.channel, done)

    def _start_plain(self, ticket: Ticket, buffer: torch.Tensor, named: Bucket, ready: torch.cuda.Event | None) -> None:
        words = f"plain averaging {self._words_for(named)}, {sum(g.numel() for _, g in named)} values"
        self._start(ticket, PLAIN, lambda done: average_plainly(buffer, words, self.channel, done, ready))

    # -- messages -----------------------------------------------------------------------------------------------

    def _start_soon(self, ticket: Ticket, named: Bucket, ready: torch.cuda.Event | None) -> None:
        for kind, message in self._messages(named.parted(self.ways)[1], ready):
            self._start(ticket, kind, functools.partial(submit, message, self.channel))

    def _messages(self, named: Named, ready: torch.cuda.Event | None) -> list[tuple[str, Message]]:
        """The gradients in messages of equal codec, route and type, in the order of first appearance."""
        messages: dict[tuple[str, torch.dtype], Message] = {}
        rank, world = self.channel.rank, self.channel.world
        for name, gradient in named:
            way = self.ways[name]
            key = (way.kind, gradient.dtype)
            message = messages.get(key)
            shared = self.scheme.book_limit > 0 and shares_book(way.codec)
            if message is None:
                message = messages[key] = Message(
                    way.codec,
                    way.route,
                    [],
                    [],
                    self.memory,
                    self.scale,
                    self.scheme.words,
                    ready,
                    self._counts if shared else None,
                    self._must_be_lossless,
                )
            if shared:
                state: dict[str, Any] = {"book": self._book}
            else:
                state = {} if isinstance(way.codec, Identity) else self.memory.state(name, way.codec.name)
            self.memory.forms[name] = way.form
            message.tensors.append(gradient)
            message.contexts.append(Context(name, self.number, 0, rank, world, self.scale, way.floor, state=state))
        return [(kind, message) for (kind, _), message in messages.items()]

    def _submit_rounds(self, draft: Draft, ready: torch.cuda.Event | None, done: Callable[[Outcome], None]) -> None:
        about = draft.codec, draft.route, draft.tensors, draft.contexts, self.memory
        message = Message(*about, self.scale, self.scheme.words, ready)
        message.prepared, message.enqueued = draft.prepared, self._means_follow
        submit(message, self.channel, done)

    def _send_counts(self, done: Callable[[Outcome], None]) -> None:
        channel, books, limit = self.channel, self.attached.books, self.scheme.book_limit

        def run(job: Job, outcome: Outcome) -> Steps:
            group, own = channel.groups["flat"], self._all_counts().view(torch.uint8)
            received = yield Exchange("flat", [own] * group.size, [own.numel()] * group.size)
            books.make(torch.stack([part.view(torch.int64) for part in received if part is not None]).sum(0), limit)

        single(f"the code book of step {self.number}", run, channel, done)

    # -- whether all ranks see and do the same -------------------------------------------------------------------

    def _job(self, what: str) -> Job:
        """Has all ranks say what is done elsewhere."""
        job = Job(Agreement(what), no_steps(), self._lost)
        self.channel.pipeline.submit(job, elsewhere=True)
        return job

    def _lost(self, job: Job, error: BaseException | None) -> None:
        if error is not None:
            self.fail(error)

    def _has_agreed(self) -> bool:
        return bool(self._agreements)

    def _agree(self, what: str) -> None:
        self._agreements.append(self._job(f"{what} at step {self.number} ({self.scheme.words})"))

    def _agree_if_silent(self) -> None:
        """Jobs are compared each by itself."""

    def _wait_for_agreement(self) -> None:
        for job in list(self._agreements):
            job.agreement.reached.wait()
        if self.channel.error is not None:
            raise self.channel.error

    def _shapes_agree(self) -> bool:
        return self._shape_comparison is not None and self._shape_comparison.grids_agree()

    def _must_be_lossless(self) -> bool:
        return self._comparison is not None and not self._comparison.grids_agree()

    def one_has_joined(self) -> bool:
        return self._comparison is not None and self._comparison.one_has_joined()

    def _compare_results(self) -> None:
        checks.compare_results(self.results, self.number, self._complete, self.channel, self._checked)

    # -- the end ------------------------------------------------------------------------------------------------

    def _means_follow(self) -> None:
        """If it is the last message, DDP goes on behind it.

        Whether the means are finite is still to be seen: Memory waits for that, and so does the next backward pass.
        """
        with self._lock:
            last = self._open == 1 and self.totals.error is None
            self.gave_early = last and self._early and not self.check
        if self.gave_early:
            for ticket in self._tickets:
                ticket.give()

    def _release(self) -> None:
        """What the pipeline knows of, and does not do itself, is through."""
        for job in [*self._agreements, self._by_torch_job]:
            if job is not None:
                self.channel.pipeline.end(job)

"""Exchanges that a caller asks for by himself, without DDP: means of any tensors, and reduce-scatters.

This is what `all_reduce(tensors, codec) -> Work` and FSDP2's custom reduce-scatter will be made of; it is not public
yet. Ranks make the same calls in the same order. The first call with other tensors compares what ranks are going to do
and waits for all of them, for as long as the channel's timeout says.

A reduce-scatter encodes each value once, so that codecs which round at random may use their whole budget there.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from ..codecs import Codec
from ..errors import Unsupported
from ..routes import NAMED
from ..sensitivity.shape import SecondMoments
from .coding import Message, Values
from .compiler import compile_reduce_scatter, compile_route
from .flattening import flatten, unflatten
from .message_codecs import message_codec, stream_codec
from .on_host.runner import HostProgram, runner_of
from .on_stream.message import DeviceMessage
from .on_stream.runner import StreamMessage, StreamRunner, all_to_all
from .outcome import Outcome
from .peers.channel import Channel
from .program import Program

_ALLTOALL = "alltoall"
_ROUTE = NAMED[_ALLTOALL]
_Made = TypeVar("_Made")


class Work(ABC):
    """An exchange under way, as torch.distributed has it."""

    @abstractmethod
    def wait(self) -> None:
        """Returns when the results may be used, on the current stream if they are on a GPU."""


class _Calls(ABC):
    """What both runners have in common: what is made once for each layout."""

    def __init__(self, channel: Channel, codec: Codec) -> None:
        if codec.error_memory is not None or message_codec(codec) is None:
            raise Unsupported(
                f"{codec} keeps residuals or takes several rounds, for which such calls have no place yet: "
                "use noise, int8, int4, fp8, cast, gcomp:mode=lossless or gcomp:keep=7"
            )
        self._channel, self._codec = channel, codec
        self._made: dict[Hashable, object] = {}

    @abstractmethod
    def all_reduce(self, tensors: Mapping[str, torch.Tensor], step: int) -> Work:
        """Replaces tensors, on all ranks, by their mean; of any shapes, strides and types, empty ones included.

        `step` is equal on all ranks and grows: draws of random rounding follow from it and from the names.
        """

    @abstractmethod
    def reduce_scatter(
        self, name: str, output: torch.Tensor, given: torch.Tensor, step: int, mean: bool = True
    ) -> Work:
        """Fills `output` with the mean, or the sum, of all ranks' parts for this rank: part r of `given` is rank r's.

        The memory of `given` may be written to.
        """

    def _once(self, program: Program, make: Callable[[], _Made]) -> _Made:
        """What belongs to a program; when it is new, ranks compare it."""
        key = program.digest, program.dtype
        if key not in self._made:
            self._channel.compare(f"{program}, with the digest {program.digest}", wait=True)
            self._made[key] = make()
        found = self._made[key]
        return found  # type: ignore[return-value]

    def _scattering(self, name: str, output: torch.Tensor, given: torch.Tensor, mean: bool) -> Program:
        world, count = self._channel.world, output.numel()
        if not (output.is_contiguous() and given.is_contiguous()) or given.numel() != world * count:
            raise Unsupported(
                f"reduce_scatter of {name!r}: {tuple(given.shape)} into {tuple(output.shape)} on {world} ranks; give "
                f"contiguous tensors, of which one is {world} times as long as the other"
            )
        if given.dtype != output.dtype:
            raise Unsupported(
                f"reduce_scatter of {name!r}: {given.dtype} into {output.dtype}; give tensors of one type"
            )
        names = [f"{name}[{rank}]" for rank in range(world)]
        topology = self._channel.topology
        codec = str(self._codec)
        return compile_reduce_scatter(codec, names, [count] * world, range(world), given.dtype, topology, mean)

    def _averaging(self, names: Sequence[str], flat: Sequence[torch.Tensor], codes_sums: bool) -> Program:
        sizes, topology = [tensor.numel() for tensor in flat], self._channel.topology
        return compile_route(str(self._codec), _ROUTE, names, sizes, flat[0].dtype, topology, codes_sums)


# --- On the host ------------------------------------------------------------------------------------------------------


class _HostWork(Work):
    def __init__(self, count: int, finish: Callable[[], object]) -> None:
        self._left, self._finish, self._outcome = count, finish, Outcome()
        self._changed = threading.Condition()

    def done(self, outcome: Outcome) -> None:
        """One of its messages is through."""
        with self._changed:
            self._outcome.add(outcome)
            self._left -= 1
            self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._left)
        if self._outcome.error is not None:
            raise self._outcome.error
        finish, self._finish = self._finish, lambda: None
        finish()


class HostCalls(_Calls):
    """By the host runner: tensors in the memory of the CPU."""

    def all_reduce(self, tensors: Mapping[str, torch.Tensor], step: int) -> Work:
        codec = message_codec(self._codec)
        assert codec is not None
        messages = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for named in _by_type(tensors):
            flat = [flatten(tensor, tensor).contiguous() for tensor in named.values()]
            copies += [(t, x) for t, x in zip(named.values(), flat) if not _is_view(x, t)]
            program = self._averaging(list(named), flat, codec.codes_sums)
            messages.append((self._once(program, lambda p=program: HostProgram(p, codec)), flat))  # type: ignore[misc]

        def finish() -> None:
            for tensor, flat in copies:
                tensor.copy_(unflatten(flat, tensor))

        work = _HostWork(len(messages), finish)
        for prepared, flat in messages:
            self._submit(prepared, flat, step, work)
        return work

    def reduce_scatter(
        self, name: str, output: torch.Tensor, given: torch.Tensor, step: int, mean: bool = True
    ) -> Work:
        codec = message_codec(self._codec)
        assert codec is not None
        program = self._scattering(name, output, given, mean)
        prepared = self._once(program, lambda: HostProgram(program, codec))
        parts = given.view(-1).split_with_sizes([output.numel()] * self._channel.world)
        work = _HostWork(1, lambda: output.view(-1).copy_(parts[self._channel.rank]))
        self._submit(prepared, parts, step, work)
        return work

    def _submit(self, prepared: HostProgram, flat: Sequence[torch.Tensor], step: int, work: _HostWork) -> None:
        program, channel = prepared.program, self._channel
        message = Message(program.names, program.dtype, channel.rank, channel.world, step, hops=program.hops)
        runner_of(channel).submit(prepared, Values(flat), message, work.done)


# --- On streams -------------------------------------------------------------------------------------------------------


class _StreamWork(Work):
    """All is enqueued; the current stream is behind it."""

    def wait(self) -> None:
        pass


class StreamCalls(_Calls):
    """By the stream runner: tensors on a GPU, over the process group's NCCL, by codecs whose frames have a known size.

    All work is ordered behind the current stream, and what the current stream does next behind the work.
    """

    def __init__(self, channel: Channel, codec: Codec, group: dist.ProcessGroup) -> None:
        super().__init__(channel, codec)
        found = stream_codec(codec, _ALLTOALL)
        if found is None:
            raise Unsupported(
                f"the frames of {codec} have no size that is known beforehand, or no owners who add them up, so "
                "they cannot go by streams"
            )
        self._stream_codec, self._group = found, group
        self._runner = StreamRunner(group, channel.device, channel.topology, SecondMoments([], {}))

    def all_reduce(self, tensors: Mapping[str, torch.Tensor], step: int) -> Work:
        self._runner.begin(step, use_shapes=False)
        filled = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
        groups, under_way = _by_type(filled), []
        for number, named in enumerate(groups):
            names, values = list(named), list(named.values())
            program = self._averaging(names, values, self._stream_codec.codes_sums)
            buffer, message = self._once(program, lambda n=names, v=values: self._staged(n, v))  # type: ignore[misc]
            stages = [stage.view(x.shape) for stage, x in zip(message.tensors, values)]
            torch._foreach_copy_(stages, values)
            under_way.append((self._runner.take(buffer, [message], number == len(groups) - 1), values, stages))
        for future, values, stages in under_way:  # a small one is exchanged together with the next
            future.wait()
            torch._foreach_copy_(values, stages)
        return _StreamWork()

    def _staged(self, names: Sequence[str], values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, StreamMessage]:
        """A buffer that stays where it is, so that tables can be made once."""
        sizes = [tensor.numel() for tensor in values]
        buffer = torch.empty(sum(sizes), dtype=values[0].dtype, device=values[0].device)
        return buffer, StreamMessage(str(self._codec), self._stream_codec, names, buffer.split_with_sizes(sizes))

    def reduce_scatter(
        self, name: str, output: torch.Tensor, given: torch.Tensor, step: int, mean: bool = True
    ) -> Work:
        if not output.numel():
            return _StreamWork()
        program = self._scattering(name, output, given, mean)
        buffer, parts, message = self._once(program, lambda: self._scatterer(program, given))
        buffer.copy_(given.view(-1))
        with torch.no_grad():
            message.encode(step)
            all_to_all(message.received, message.sent, self._group).wait()
            message.keep(step)
            output.view(-1).copy_(parts[self._channel.rank])
        return _StreamWork()

    def _scatterer(
        self, program: Program, given: torch.Tensor
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor], DeviceMessage]:
        buffer = torch.empty_like(given.view(-1))
        parts = buffer.split_with_sizes(list(program.sizes))
        slots = self._stream_codec.slots(program)
        sizes = {} if slots is None else slots.sizes
        message = self._stream_codec.message(program, self._channel.rank, buffer, parts, [None] * len(parts), sizes)
        return buffer, parts, message


def _by_type(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Tensors of equal type together, in the order of first appearance."""
    found: dict[torch.dtype, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found.setdefault(tensor.dtype, {})[name] = tensor
    return list(found.values())


def _is_view(x: torch.Tensor, of: torch.Tensor) -> bool:
    return x.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()

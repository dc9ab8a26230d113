"""A handle's state in checkpoints: read from torch.distributed.checkpoint, or resumed on another number of ranks."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .. import saved
from ..errors import GradzipWarning, Unsupported
from ..feedback import Value
from . import report

if TYPE_CHECKING:
    from .handle import Handle

_OWN = re.compile(r"rank\d+/")  # keys of a state that belong to one rank; all ranks have the same under other keys


def read_codecs(field: str, value: object) -> dict[str, str]:
    """The codec that each parameter had, from its field of the state."""
    try:
        codecs = json.loads(saved.text(field, value))
    except json.JSONDecodeError as error:
        raise Unsupported(f"the state's {field!r} is not JSON ({error}): {saved.CURE}") from None
    if not isinstance(codecs, dict) or not all(isinstance(codec, str) for codec in codecs.values()):
        raise saved.refuse(field, codecs, "a codec for each parameter")
    return codecs


def read_checkpoint(path: str | Path, prefix: str, rank: int) -> dict[str, Value]:
    """All that was saved under `prefix`, but for what belongs to other ranks."""
    # They take a second to load, and few need them.
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(path)
    start = f"{prefix}." if prefix else ""
    wanted: dict[str, Any] = {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        name = key.removeprefix(start)
        if not key.startswith(start) or re.match(rf"rank(?!{rank}/)\d+/", name):
            continue
        wanted[name] = (
            torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else 0
        )
    if "world_size" not in wanted:
        raise Unsupported(f"{path} holds no state of a handle under {prefix!r}: which key was it saved under?")
    template = {prefix: wanted} if prefix else wanted
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # on purpose: ranks read what is their own
        load(template, storage_reader=reader, no_dist=True)
    return template[prefix] if prefix else wanted


def resume(handle: Handle, state: Mapping[str, Value] | None, group: dist.ProcessGroup) -> None:
    """Loads each rank's state; a rank without one starts with empty residuals, and with what all ranks share.

    A state of another step counts as none: a folder that is written again, by fewer ranks, keeps files of the others.
    Rank 0 logs one line where a rank has no state, or where the number of ranks has changed.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    found: list[Any] = [None] * world  # by rank: the step of its state, and how many ranks saved it
    dist.all_gather_object(found, (state.get("steps"), state.get("world_size")) if state else None, group=group)
    source = next((number for number, each in enumerate(found) if each is not None), None)
    if source is None:
        if rank == 0:
            report.say("the checkpoint holds no gradzip state: all ranks start at step 0 with empty residuals")
        return
    without = [number for number, each in enumerate(found) if each != found[source]]
    if without:
        shared = [_shared(state) if state and rank == source else None]
        dist.broadcast_object_list(shared, group_src=source, group=group)
        state = shared[0] if rank in without else state
    assert state is not None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"the state was saved by \d+ ranks", GradzipWarning)  # logged below
        handle.load_state_dict(state)
    steps, before = found[source]
    if rank == 0 and (without or before != world):
        report.say(_in_words(steps, before, world, without))


def _shared(state: Mapping[str, Value]) -> dict[str, Value]:
    """What all ranks have alike, on the CPU: other ranks have other devices."""
    return {
        key: value.cpu() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
        if not _OWN.match(key)
    }


def _in_words(steps: int, before: int, world: int, without: list[int]) -> str:
    facts = [f"resumed at step {steps} on {world} rank{'s' if world > 1 else ''}"]
    if before != world:
        facts.append(f"the state was saved by {before}")
    if without:
        start = "starts" if len(without) == 1 else "start"
        facts.append(f"no state was saved for {_ranks(without)}, which {start} with empty residuals")
    if before > world:
        facts.append(f"the residuals of {_ranks(range(world, before))} are lost")
    return "; ".join(facts)


def _ranks(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return f"rank {first}"
    listed = f"{first} to {last}" if last - first == len(numbers) - 1 else ", ".join(map(str, numbers))
    return f"ranks {listed}"

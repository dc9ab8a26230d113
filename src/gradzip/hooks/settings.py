"""What must be set alike on all ranks, compared over the store before anything is exchanged.

Ranks that differ in one of these would wait for each other until the timeout: one compares results and another does
not, or one takes no part at all.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from ..errors import PeerError

CHECK = "GRADZIP_CHECK"  # set to 1: all ranks compare their results after each step
_TO_READ = 5.0  # seconds that others have to read the settings, where the store may end with this process
_serials: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)  # comparisons so far, by group


def checks_results() -> bool:
    """Whether the environment asks for it. Read at attach, where ranks compare it."""
    return os.environ.get(CHECK, "") not in ("", "0")


def compare(group: dist.ProcessGroup, settings: Mapping[str, str], timeout: timedelta) -> None:
    """Raises PeerError on all ranks if they differ, with what two of them have. Call it on all ranks."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    number = next(_serials[group.group_name])
    if world == 1:
        return
    name = f"gradzip/settings/{group.group_name}/{number}"
    store = PrefixStore(name, _get_default_store().clone())  # type: ignore[attr-defined]
    store.set(f"said/{rank}", json.dumps(dict(settings)))
    for other in range(world):
        try:
            store.wait([f"said/{other}"], timeout)
            theirs = json.loads(store.get(f"said/{other}"))
        except Exception as cause:
            raise PeerError(
                f"rank {other} did not attach within {timeout}, or the store that all ranks meet at is gone: call "
                f"gradzip.attach on all ranks ({(str(cause).splitlines() or [''])[0]})"
            ) from cause
        differing = [key for key in {**settings, **theirs} if settings.get(key) != theirs.get(key)]
        if differing:
            _wait_until_read(store, rank, world)
            (low, lows), (high, highs) = sorted([(rank, settings), (other, theirs)], key=lambda pair: pair[0])
            raise PeerError(
                f"ranks are set up differently. Rank {low}: {_in_words(lows, differing)}. Rank {high}: "
                f"{_in_words(highs, differing)}. Set environment variables and attach's arguments alike on all ranks"
            )
    store.set(f"read/{rank}", "1")


def _in_words(settings: Mapping[str, str], keys: list[str]) -> str:
    return ", ".join(f"{key} is {settings.get(key, '') or 'not set'}" for key in keys)


def _wait_until_read(store: Store, rank: int, world: int) -> None:
    """This rank may end now, and the store with it."""
    store.set(f"read/{rank}", "1")
    deadline = time.monotonic() + _TO_READ
    keys = [f"read/{other}" for other in range(world)]
    while rank == 0 and time.monotonic() < deadline and not all(store.check([key]) for key in keys):
        time.sleep(0.02)

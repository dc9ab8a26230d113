"""How far a rank has come with what all ranks do together on streams; it goes along with the heartbeat.

On streams nobody waits for another rank on the host, so that a rank which alone changes its policy or loads a state
would be noticed by NCCL's timeout. The others see by these numbers that they went on without it.
"""

from __future__ import annotations

import json


class Standing:
    """Written by the thread of backward, read by the heart."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._passes = 0  # backward passes on streams that have begun
        self._compared = 0  # comparisons that have begun
        # In which of them, counted from 1, it waits, passes by then, and what it did before; 0: in none.
        self._waits = 0, 0, ""

    def begin_pass(self) -> None:
        self._passes += 1

    def begin_comparison(self, waits: bool, loaded: bool = False) -> int:
        """Its number; `loaded`: it is about a state that this rank has loaded, not about its policy."""
        self._compared += 1
        did = "loaded a state" if loaded else "changed its policy"
        self._waits = (self._compared if waits else 0), self._passes, did
        return self._compared

    def end_comparison(self) -> None:
        self._waits = 0, 0, ""

    def __str__(self) -> str:
        return json.dumps(self._waits)

    def difference(self, rank: int, text: str) -> str | None:
        """What another rank of that standing does that this one does not; None: nothing that is known yet."""
        comparison, passes, did = json.loads(text)
        went_on = self._passes > passes  # asked first: who is to compare does so before the next pass
        if not went_on or self._compared >= comparison:
            return None
        call = "load_state_dict" if did == "loaded a state" else "set_policy"
        return (
            f"rank {rank} {did} after {passes} backward passes, and rank {self._rank} did not: "
            f"call {call} on all ranks at the same point"
        )

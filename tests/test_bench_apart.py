"""Rows of a benchmark in processes of their own: what hangs or crashes is said."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
import apart


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_row_comes_back(group: dist.ProcessGroup) -> None:
    assert apart.run(["-c", "print('step 1'); print('row 5 ms')"], 60, group) == ("5 ms", "")


def test_a_crash_is_told_with_its_last_step_and_its_error(group: dist.ProcessGroup) -> None:
    script = "print('step 7', flush=True); raise ValueError('what is wrong')"
    _, outcome = apart.run(["-c", script], 60, group)
    assert outcome == "crashes after step 7 (exit code 1): ValueError: what is wrong"
    script = "import os; print('step 2\\nFile steps.py', flush=True); os.kill(os.getpid(), 6)"
    _, outcome = apart.run(["-c", script], 60, group)
    assert outcome.startswith("crashes after step 2 (SIGABRT)")


def test_silence_is_a_hang(group: dist.ProcessGroup) -> None:
    script = "import time; print('step 3', flush=True); time.sleep(600)"
    _, outcome = apart.run(["-ISc", script], 6, group)  # a Python that starts at once, also where much else runs
    assert outcome == "hangs: silent for 6 s after step 3"

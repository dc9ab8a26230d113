"""A rank that waits for NCCL is freed when another one dies, and ends with a documented code if nobody hears of it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from gradzip.exchange.peers import abort

_PROGRAM = """
import logging, sys, threading, time
import torch
from gradzip.errors import PeerError
from gradzip.exchange.peers.abort import Abort

logging.basicConfig()
aborted = []

class Backend:
    def abort(self):
        aborted.append(1)
        {backend}

class Group:
    def _get_backend(self, device):
        return Backend()

end = Abort(Group(), torch.device("cuda"), patience=0.5)
for _ in range(2):
    end(PeerError("rank 3 has shown no sign of life"))
{user}
time.sleep({sleep})
print(len(aborted))
"""


def run(user: str, sleep: float, backend: str = "pass") -> subprocess.CompletedProcess[str]:
    text = textwrap.dedent(_PROGRAM).format(user=user, sleep=sleep, backend=backend)
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)


def test_a_process_that_does_not_come_back_ends_with_the_documented_code() -> None:
    ended = run("", 600)
    assert ended.returncode == abort.EXIT_CODE
    assert "rank 3 has shown no sign of life" in ended.stderr
    assert f"exit code {abort.EXIT_CODE}" in ended.stderr


def test_a_process_that_hears_of_the_error_goes_on() -> None:
    ended = run("end.hear()", 2)
    assert (ended.returncode, ended.stdout.strip()) == (0, "1"), ended.stderr


@pytest.mark.parametrize("backend", ["time.sleep(600)", "raise RuntimeError('no such thing')"])
def test_an_abort_that_hangs_or_fails_does_not_keep_the_process(backend: str) -> None:
    assert run("", 600, backend).returncode == abort.EXIT_CODE

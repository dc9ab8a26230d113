"""`torchrun … -m gradzip doctor`: ranks that are alike, ranks that are not, and what is said about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradzip
from gradzip.bench import cluster

ALIKE = {
    "host": "a",
    "host_number": 0,
    "local_world_size": 1,
    "interface": "eth0",
    "interfaces": "lo, eth0",
    "address": "10.0.0.1",
    "engine": "native",
    "environment": "none",
    "broken": [],
    "gradzip": "1",
    "torch": "2",
}


def ranks(*changes: dict[str, object]) -> list[cluster.Facts]:
    return [{**ALIKE, "rank": rank, "host_number": rank, **change} for rank, change in enumerate(changes)]


def test_ranks_that_are_alike_have_no_problem() -> None:
    assert [*cluster.disagreements(ranks({}, {}, {})), *cluster.bad_addresses(ranks({}, {}, {}))] == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gradzip": "0"}, "gradzip differs: 1 on rank 0, 2; 0 on rank 1: install the same gradzip on all hosts"),
        ({"torch": "3"}, "install the same torch"),
        ({"engine": "reference"}, "engine differs: native on rank 0, 2; reference on rank 1"),
        ({"environment": "GRADZIP_POLICY=cast"}, "set GRADZIP* alike for all ranks"),
        ({"local_world_size": 2}, "start equally many ranks on every host"),
        ({"address": "127.0.1.1"}, "set GLOO_SOCKET_IFNAME to the interface of the network"),
        ({"address": "", "interface": "eth9"}, "has no address on eth9: set GLOO_SOCKET_IFNAME to one of lo, eth0"),
        ({"broken": ["engine native: no library"]}, "rank 1 on a: engine native: no library"),
    ],
)
def test_differences_are_said_with_their_cure(change: dict[str, object], said: str) -> None:
    found = ranks({}, change, {})
    (problem,) = [*cluster.disagreements(found), *cluster.bad_addresses(found)]
    assert said in problem


def test_on_one_host_the_loopback_is_as_good_as_any() -> None:
    own = ranks({"address": "127.0.0.1"}, {"address": "127.0.0.1"})
    assert list(cluster.bad_addresses([{**facts, "host_number": 0} for facts in own])) == []


@pytest.mark.parametrize("world", range(2, 10))
def test_everybody_meets_everybody_once(world: int) -> None:
    rounds = world if world % 2 else world - 1
    met = [[cluster.partner(rank, number, world) for number in range(rounds)] for rank in range(world)]
    for rank, peers in enumerate(met):
        assert sorted(p for p in peers if p is not None) == [r for r in range(world) if r != rank]
        for number, peer in enumerate(peers):
            assert peer is None or met[peer][number] == rank, "both meet in the same round"


def test_only_ranks_of_a_launcher_are_a_cluster() -> None:
    assert not cluster.launched({})
    assert not cluster.launched({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a"})
    assert cluster.launched({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"})


def test_doctor_under_torchrun(tmp_path: Path) -> None:
    """Two ranks with different policies in their environment: one table, one problem, exit code 1."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys\n"
        "os.environ['GRADZIP_POLICY'] = 'cast' if os.environ['RANK'] == '1' else 'gcomp'\n"
        "from gradzip import cli\n"
        "code = cli.main(['doctor', '--json'])\n"
        "sys.exit(0 if code == 1 else 3)\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(gradzip.__file__).parents[1]), environment.get("PYTHONPATH", "")]
    )
    environment.pop("GRADZIP_ENGINE", None)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads(done.stdout)
    assert [row["rank"] for row in shown["rows"]] == [0, 1]
    assert [row["slowest_peer"] for row in shown["rows"]] == [1, 0]
    assert all(row["slowest_bps"] > 1e6 for row in shown["rows"])
    (problem,) = shown["notes"]
    assert "environment differs: GRADZIP_POLICY=gcomp on rank 0; GRADZIP_POLICY=cast on rank 1" in problem

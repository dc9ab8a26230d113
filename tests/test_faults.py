"""Accidents: every other rank raises, and says which rank it was and why. `python tests/faults.py` shows the words."""

from __future__ import annotations

import pytest
from faults import DAMAGED, FAULTS, LINK_DOWN, PLAIN, WORLD, run

from gradzip import emulate

CAUSES = {
    "kill": ["rank 3 closed its connections"],
    PLAIN: ["rank 3 closed its connections"],
    "kill the store's host": ["rank 0"],
    "stop": ["rank 3 has shown no sign of life for 5 s"],
    LINK_DOWN: ["rank 3 has shown no sign of life for 5 s"],
    "another codec": ["Rank 3: cast by"],
    "a corrupt frame": ["rank 3 sent", "damaged"],
    "a corrupt table": ["rank 3 sent", "damaged"],
    "a corrupt head": ["rank 3 sent something else"],
    "an exception": ["rank 3 failed: ArithmeticError: the codec lost count"],
}
SHORT = ("kill", "a corrupt frame")


# Nobody waits for a connection of ours there: a killed rank is noticed by NCCL or by the heartbeat, whichever is first.
NOTICED = ["rank 3 has shown no sign of life for 5 s", "rank 3 closed its connections"]


def check(fault: str, way: str = "gloo") -> None:
    result = run(fault, way)
    assert set(result["codes"].values()) == {0}, "a rank did not end in order"
    for rank, said in result["words"].items():
        if fault == "asleep":
            assert "error" not in said, "a rank that is merely slow was taken for dead"
        elif rank != result["victim"]:
            assert said["error"].startswith("PeerError")
            if way == "stream" and fault == "kill":
                assert any(words in said["error"] for words in NOTICED)
            else:
                assert all(words in said["error"] for words in CAUSES[fault])
        else:
            assert "error" in said, "the rank itself does not know"
    assert len(result["words"]) >= WORLD - 1


@pytest.mark.parametrize("fault", SHORT)
def test_all_ranks_learn_of_an_accident(fault: str) -> None:
    check(fault)


@pytest.mark.parametrize("fault", [*SHORT, "an exception"])
def test_all_ranks_learn_of_an_accident_in_the_host_runner(fault: str) -> None:
    check(fault, "noise")


def test_all_ranks_learn_of_an_accident_in_sparse_sums() -> None:
    check("kill", "sparse")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill the store's host", "stop", "an exception"])
def test_all_ranks_learn_of_other_accidents_in_sparse_sums(fault: str) -> None:
    check(fault, "sparse")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill the store's host", "stop", LINK_DOWN, *list(DAMAGED)[1:], "asleep"])
def test_all_ranks_learn_of_other_accidents_in_the_host_runner(fault: str) -> None:
    if fault == LINK_DOWN and (obstacle := emulate.obstacle()) is not None:
        pytest.skip(obstacle)
    check(fault, "noise")


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["kill", "kill the store's host", "stop", "an exception"])
def test_all_ranks_learn_of_an_accident_on_gpus(fault: str) -> None:
    check(fault, "gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["kill", "kill the store's host", "stop", "an exception"])
def test_all_ranks_learn_of_an_accident_on_streams(fault: str) -> None:
    check(fault, "stream")


def test_all_ranks_learn_of_an_accident_from_a_device() -> None:
    check("kill", "stand-in")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill the store's host", "stop", "an exception", "asleep"])
def test_all_ranks_learn_of_other_accidents_from_a_device(fault: str) -> None:
    check(fault, "stand-in")


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in SHORT])
def test_all_ranks_learn_of_other_accidents(fault: str) -> None:
    if fault == LINK_DOWN and (obstacle := emulate.obstacle()) is not None:
        pytest.skip(obstacle)
    check(fault)

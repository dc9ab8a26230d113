"""Settings that only one rank has: all ranks raise at attach, soon, and say who has what."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradzip

LONG = timedelta(seconds=150)
SETTINGS: dict[str, tuple[dict[str, str], dict[str, Any], str, str]] = {  # of rank 1 alone, and what is said of both
    "off": ({"GRADZIP": "off"}, {}, "GRADZIP is on", "GRADZIP is off"),
    "check": ({"GRADZIP_CHECK": "1"}, {}, "GRADZIP_CHECK is not set", "GRADZIP_CHECK is 1"),
    "policy": ({"GRADZIP_POLICY": "cast"}, {}, "GRADZIP_POLICY is not set", "GRADZIP_POLICY is cast"),
    "auto": ({"GRADZIP_POLICY": "auto"}, {}, "GRADZIP_POLICY is not set", "GRADZIP_POLICY is auto"),
    "transport": ({"GRADZIP_TRANSPORT": "gloo"}, {}, "GRADZIP_TRANSPORT is not set", "GRADZIP_TRANSPORT is gloo"),
    "heartbeat": ({}, {"heartbeat": timedelta(seconds=9)}, "heartbeat= is not set", "heartbeat= is 0:00:09"),
    "timeout": ({}, {"timeout": timedelta(seconds=99)}, "timeout= is 0:02:30", "timeout= is 0:01:39"),
    "policy=auto": ({}, {"policy": "auto"}, "policy= is not set", "policy= is auto"),
    "scaler": ({}, {"scaler": torch.amp.GradScaler("cpu")}, "scaler= is not set", "scaler= is GradScaler"),
    "nothing": ({}, {}, "", ""),
}
NO_EFFECT = {"GRADZIP_ENGINE": "native"}  # all engines write and read the same bytes


def attach_all(rank: int) -> dict[str, str]:
    logging.getLogger("gradzip").setLevel(logging.WARNING)
    said = {}
    for name, (variables, arguments, _, _) in SETTINGS.items():
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(40, 40))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given: dict[str, Any] = {"policy": "topk", "timeout": LONG} | (arguments if rank == 1 else {})
        with pytest.MonkeyPatch.context() as patch:
            for key, value in (variables | NO_EFFECT).items() if rank == 1 else ():
                patch.setenv(key, value)
            began = time.monotonic()
            try:
                handle = gradzip.attach(model, optimizer, **given)
                for _ in range(3):
                    model(torch.ones(2, 40)).sum().backward()
                handle.detach()
                said[name] = "went on"
            except gradzip.PeerError as error:
                said[name] = str(error)
            assert time.monotonic() - began < LONG.total_seconds() / 2, "it waited for the timeout"
    return said


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    return run_ranks(2, attach_all, deadline=600)


@pytest.mark.timeout(620)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_one_rank_are_named_on_all(said: list[dict[str, str]], name: str) -> None:
    _, _, zero, one = SETTINGS[name]
    for words in said:
        if name == "nothing":
            assert words[name] == "went on"
        else:
            assert words[name].startswith(f"ranks are set up differently. Rank 0: {zero}. Rank 1: {one}. Set ")


def off_everywhere(rank: int) -> list[float]:
    model = DistributedDataParallel(nn.Linear(4, 4))
    gradzip.attach(model)
    model(torch.ones(2, 4)).sum().backward()
    return [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]


def test_off_on_all_ranks_is_plain_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADZIP", "off")
    first, second = run_ranks(2, off_everywhere)
    assert first == second

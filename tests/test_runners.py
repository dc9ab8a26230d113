"""Which runner carries gradients, without a GPU: what GPUs decide is asked of devices that nobody uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradzip import Fixed, Option, Policy, Rules, Unsupported
from gradzip.codecs import lowrank
from gradzip.exchange.on_stream import runner as on_stream
from gradzip.exchange.topology import Topology
from gradzip.hooks import runners
from gradzip.hooks.ways import Ways
from gradzip.routes import NAMED

GPU, GROUP = torch.device("cuda", 0), object()
NO_NCCL = "there is no NCCL"
GRADIENTS = {"weight": nn.Parameter(torch.zeros(40, 40)), "bias": nn.Parameter(torch.zeros(40))}


def chosen(policy: Policy, patient: bool = False) -> str:
    ways = Ways({p: name for name, p in GRADIENTS.items()}, GPU, [], Topology(0, ((0,), (1,)))).of(policy, 1.0)
    group: Any = GROUP
    return runners.choose(ways, dict.fromkeys(GRADIENTS, torch.float32), GPU, group, patient)


@pytest.fixture(params=[None, NO_NCCL])
def reason(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.setattr(on_stream, "reason_against", lambda group, device: request.param)
    monkeypatch.setattr(lowrank, "load", lambda device: None)  # it would ask the GPU
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "codec", ["int8", "cast", "sign", "topk", "randomk", "qsgd", "powersgd", "int8:feedback=true", "natural"]
)
def test_codecs_of_known_size_go_by_streams_where_they_can(reason: str | None, codec: str) -> None:
    assert chosen(Rules({"*": codec}, small=True)) == (runners.STREAM if reason is None else runners.HOST)
    assert chosen(Rules({"weight": codec})) == (runners.STREAM if reason is None else runners.HOST)


@pytest.mark.parametrize(
    "codec", ["gcomp:keep=7", "gcomp:mode=lossless", "threshold", "dgc", "zlib", "sign:feedback=cpu"]
)
def test_all_others_go_by_the_host(reason: str | None, codec: str) -> None:
    assert chosen(Fixed(codec)) == runners.HOST
    assert chosen(Rules({"weight": codec, "bias": "topk"}, small=True)) == runners.HOST, "and with them the rest"


def test_where_residuals_have_to_wait_the_host_decides(reason: str | None) -> None:
    assert chosen(Rules({"*": "topk"}, small=True), patient=True) == runners.HOST
    assert chosen(Rules({"*": "cast"}, small=True), patient=True) == (runners.HOST if reason else runners.STREAM)


def test_noise_goes_by_streams_or_not_at_all(reason: str | None) -> None:
    if reason is None:
        assert chosen(Fixed("noise")) == runners.STREAM
        assert chosen(Rules({"weight": "noise", "bias": "topk"}, small=True)) == runners.STREAM
        with pytest.raises(Unsupported, match=r"'weight': streams alone .* other gradients of the model have gcomp"):
            chosen(Rules({"weight": "noise", "bias": "gcomp:keep=7"}, small=True))
    else:
        with pytest.raises(Unsupported, match=f"noise on cuda:0, for 'weight': streams alone .*{NO_NCCL}"):
            chosen(Fixed("noise"))


def test_who_wants_to_code_on_the_cpu_gets_the_host(reason: str | None) -> None:
    assert chosen(Fixed(Option("sign", "cpu"))) == runners.HOST
    assert chosen(Fixed(Option("sign", "gpu"))) == (runners.HOST if reason else runners.STREAM)
    with pytest.raises(Unsupported, match="codes on the CPU and on the GPU: write all its steps for one of the two"):
        chosen(Fixed(Option("sign", None, "enc.gpu > ag.flat > dec.cpu")))


def test_plain_averaging_is_left_to_torch(reason: str | None) -> None:
    assert chosen(Fixed("identity")) == runners.HOST  # whose backward pass hands it to torch


@pytest.mark.parametrize("route", ["alltoall", "allgather"])
def test_options_name_where_they_are_coded(route: str) -> None:
    for device, where in ((None, "gpu"), ("gpu", "gpu"), ("cpu", "cpu")):
        ways = Ways({p: name for name, p in GRADIENTS.items()}, GPU, [], Topology(0, ((0,), (1,))))
        found = ways.of(Fixed(Option("sign", device, route)), 1.0)
        assert found["weight"].route == str(NAMED[route].on(where))


def test_nobody_chooses_a_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    runners.check_unchosen(None)
    with pytest.raises(Unsupported, match=r"transport='gloo': .* go by streams .* over Gloo .* So leave it out"):
        runners.check_unchosen("gloo")
    monkeypatch.setenv("GRADZIP_TRANSPORT", "nccl")
    with pytest.raises(Unsupported, match=r"GRADZIP_TRANSPORT='nccl': .* So do not set it"):
        runners.check_unchosen(None)


def test_who_shares_a_network_card_with_many_is_told(reason: str | None) -> None:
    def said(codec: str, count: int, ranks: int) -> str | None:
        hosts = tuple(tuple(range(first, first + ranks)) for first in range(0, count * ranks, ranks))
        ways = Ways({p: name for name, p in GRADIENTS.items()}, GPU, [], Topology(0, ((0,), (1,))))
        return runners.crowded(ways.of(Fixed(codec), 1.0), Topology(0, hosts))

    assert all(said("noise", count, ranks) is None for count, ranks in ((1, 8), (16, 1), (2, 2), (2, 4)))
    for count, ranks in ((2, 8), (8, 4)):
        assert f"{count} hosts hold {ranks} ranks each" in str(said("noise", count, ranks))
        assert said("powersgd", count, ranks) is None

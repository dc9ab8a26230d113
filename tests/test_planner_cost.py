"""Costs: collectives on other clusters than the measured one, and the steps of programs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planning import line, profile

from gradzip.codecs import parse
from gradzip.errors import PlanError
from gradzip.exchange.compiler import compile_route
from gradzip.exchange.message_codecs import codes_messages
from gradzip.exchange.on_host.runner import HostMessage
from gradzip.exchange.parts import CUT, Table
from gradzip.exchange.program import Communicate
from gradzip.exchange.topology import Topology as Ranks
from gradzip.option import Option
from gradzip.planner.choices import Limits, choices, routes, twin
from gradzip.planner.chunks import Cut, chunks, cut_of
from gradzip.planner.cost import KINDS, Pricing, features, loads
from gradzip.planner.network import Network, Topology
from gradzip.planner.profile import CodecCost, Collective, Link, Profile
from gradzip.planner.timeline import CPU, INTER_IN, INTER_OUT, LINKS
from gradzip.routes import NAMED, Route, tree

MB = 1e6
CODECS = ("gcomp:keep=7", "cast", "topk", "noise", "randomk", "powersgd:rank=4")


def network(hosts: int = 4, rate: float | None = None, **changes: object) -> Network:
    return Network(profile(**changes), Topology(hosts, 1, rate))  # type: ignore[arg-type]


def seconds(net: Network, route: str, codec: str, raw: float) -> dict[str, float]:
    cost = net.profile.codecs[codec]
    amounts = features(raw, raw / cost.ratio, cost, net)
    found: dict[str, float] = {}
    for task in Pricing(net).coded(Route.parse(route), cost):
        found[task.label] = found.get(task.label, 0.0) + float(task.seconds @ amounts)
    return found


def test_the_measured_cluster_costs_what_was_measured() -> None:
    net = network()
    for kind in ("ar", "rs", "ag", "a2a", "gat", "bc"):
        (measured,) = (c for c in net.profile.collectives if c.kind == kind)
        cost = net.cost(kind, "flat")
        assert cost.latency_s + cost.s_per_byte * MB == pytest.approx(measured.curve.line.at(MB), rel=1e-6)


@pytest.mark.parametrize(("hosts", "rate"), [(4, 1e8), (4, 2.5e9), (8, 1e9), (64, 1e10)])
def test_other_rates_and_sizes_follow_the_formula_of_the_ring(hosts: int, rate: float) -> None:
    cost = network(hosts, rate).cost("ar", "flat")
    assert cost.s_per_byte == pytest.approx(2 * (hosts - 1) / hosts * 8 / rate, rel=1e-6)
    assert cost.latency_s == pytest.approx(100e-6 / 6 * 2 * (hosts - 1), rel=1e-3)


def test_the_work_of_hosts_does_not_shrink_with_a_faster_network() -> None:
    slow = Collective("ar", "inter", 4, line(1e-4, 1.5 * 8 / 1e9 + 3e-9))
    fast = network(rate=1e11, collectives=(slow,)).cost("ar", "flat")
    assert fast.s_per_byte == pytest.approx(1.5 * 8 / 1e11 + 3e-9, rel=1e-6)


def test_a_link_that_is_used_badly_is_so_at_a_lower_rate_too() -> None:
    half = Collective("ar", "inter", 4, line(1e-4, 2 * 1.5 * 8 / 1e9))
    slow = network(rate=1e8, collectives=(half,)).cost("ar", "flat")
    assert slow.s_per_byte == pytest.approx(2 * 1.5 * 8 / 1e8, rel=1e-6)


def test_a_nominal_rate_is_reached_as_far_as_it_was() -> None:
    net = network(
        rate=2e9,
        links={"inter": Link(0.9e9, 1e9)},
        collectives=(Collective("ar", "inter", 4, line(0, 1.5 * 8 / 0.9e9)),),
    )
    assert net.cost("ar", "flat").s_per_byte == pytest.approx(1.5 * 8 / 1.8e9)


def test_a_card_serves_all_ranks_of_its_host() -> None:
    both = replace(profile(), links={"inter": Link(1e9), "intra": Link(1e11)})
    net = Network(both, Topology(4, 8))
    alone, together = net.cost("a2a", "inter", 1), net.cost("a2a", "inter", 8)
    assert together.s_per_byte == pytest.approx(8 * alone.s_per_byte, rel=1e-3)
    flat = net.cost("a2a", "flat")  # 24 of 31 peers of each of the 8 ranks are elsewhere
    assert flat.s_per_byte == pytest.approx(8 * (31 / 32) * (24 / 31) * 8 / 1e9, rel=1e-3)
    assert flat.resources == LINKS


def test_a_gathering_uses_one_direction() -> None:
    assert network().cost("gat", "flat").resources == INTER_IN
    assert network().cost("bc", "flat").resources == INTER_OUT
    assert network(transport="nccl").cost("bc", "flat").resources == INTER_IN | INTER_OUT


def test_alltoall_by_hand() -> None:
    """Encode all, send 3/4 of the payload, decode 4 quarters, encode a quarter, receive 3 of them, decode all."""
    raw = 4 * MB
    times = seconds(network(), "alltoall", "cast", raw)
    payload = raw / 2
    assert times["a2a.flat"] == pytest.approx((0.75 * payload + 3 * 32) * 8e-9, rel=1e-3)
    assert times["ag.flat"] == pytest.approx(3 * (payload / 4 + 32) * 8e-9, rel=1e-3)
    assert times["latency"] == pytest.approx(200e-6, rel=1e-3)
    steps = Pricing(network()).coded(Route.parse("alltoall"), network().profile.codecs["cast"])
    amounts = features(raw, payload, network().profile.codecs["cast"], network())
    coding = [float(t.seconds @ amounts) for t in steps if t.resources == CPU]
    expected = [4 * 1e-5 + raw / 8e9, 4 * 1e-5 + raw / 8e9, 1e-5 + raw / 4 / 8e9, 4 * 1e-5 + raw / 8e9]
    assert coding == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("hosts", "ranks"), [(4, 2), (3, 3), (4, 1)])
def test_steps_are_priced_for_the_bytes_that_buffers_of_the_program_hold(hosts: int, ranks: int) -> None:
    """Every route, with frames as large as their values and no headers."""
    cluster = Ranks(0, tuple(tuple(range(h * ranks, (h + 1) * ranks)) for h in range(hosts)))
    size = 128 * hosts * ranks * ranks * hosts
    net = Network(replace(profile(), links={"inter": Link(1e9), "intra": Link(1e9)}), Topology(hosts, ranks))
    amounts = features(4 * size, 4 * size, None, net, tensors=0)
    for route in [*tree(("cpu",)), *(r for r in NAMED.values() if ranks > 1 or not r.hierarchical)]:
        program = compile_route("any", route, ("x",), (size,), torch.float32, cluster)
        moved = [step for step in program.steps if isinstance(step, Communicate)]
        priced = [load for load in loads(route, net.topology) if load.kind not in ("enc", "dec")]
        assert [load.kind for load in priced] == [KINDS[type(step)] for step in moved]
        held = [
            program.size(0, program.buffer(step.source), lambda table, owner, wide: 4 * table.numel(owner))
            for step in moved
        ]
        assert [float(load.held @ amounts) for load in priced] == held, route


def test_a_ring_by_hand() -> None:
    """A quarter goes round: encoded 4 times, decoded 3 times, then all quarters are gathered and decoded."""
    raw, net = 4 * MB, network()
    times = seconds(net, "ring", "cast", raw)
    assert times["pass.flat"] == pytest.approx(3 * (raw / 2 / 4 + 32) * 8e-9, rel=1e-3)
    assert times["ag.flat"] == pytest.approx(3 * (raw / 2 / 4 + 32) * 8e-9, rel=1e-3)
    assert times["enc.cpu"] == pytest.approx(4 * (1e-5 + raw / 4 / 8e9), rel=1e-3)
    assert times["dec.cpu"] == pytest.approx(3 * (1e-5 + raw / 4 / 8e9) + 4 * 1e-5 + raw / 8e9, rel=1e-3)
    assert times["latency"] == pytest.approx(3 * 100e-6 / 3 + 100e-6, rel=1e-3)


def test_every_tensor_is_a_frame() -> None:
    net, cost = network(), network().profile.codecs["cast"]
    (first, *_) = Pricing(net).coded(Route.parse("allgather"), cost)
    one, many = (float(first.seconds @ features(MB, MB / 2, cost, net, tensors)) for tensors in (1, 100))
    assert many - one == pytest.approx(99 * 1e-5, rel=1e-3)
    at_once = replace(cost, encode={"cpu": line(1e-5, 1e-9 / 8)})
    (first, *_) = Pricing(net).coded(Route.parse("allgather"), at_once)
    assert float(first.seconds @ features(MB, MB / 2, at_once, net, 100)) == pytest.approx(one, rel=1e-6)


def test_allgather_grows_with_the_number_of_ranks() -> None:
    few, many = (seconds(network(n), "allgather", "topk", MB) for n in (4, 16))
    assert many["dec.cpu"] > 3.9 * few["dec.cpu"]
    assert many["ag.flat"] > 4 * few["ag.flat"]


def test_sparse_sums_are_larger_than_their_addends() -> None:
    steps = seconds(network(), "alltoall", "topk", 64 * MB)
    assert steps["ag.flat"] == pytest.approx(4 * steps["a2a.flat"], rel=0.05)


def test_copies_are_part_of_a_route() -> None:
    copies = {"host_to_device": line(1e-5, 1e-10), "device_to_host": line(1e-5, 1e-10)}
    net = network(copies=copies)
    labels = [t.label for t in Pricing(net).coded(Route.parse("allgather"), net.profile.codecs["cast"])]
    assert labels == ["device_to_host", "enc.cpu", "ag.flat", "latency", "dec.cpu", "host_to_device"]
    plain = [t.label for t in Pricing(net).plain(Route.parse("allreduce"))]
    assert plain == ["rs.flat", "latency", "ag.flat", "latency"], "as the runtime does beside compressed ones"


def test_free_compression_leaves_the_wire_alone() -> None:
    net = network()
    labels = [t.label for t in Pricing(net, free=True).coded(Route.parse("alltoall"), net.profile.codecs["cast"])]
    assert labels == ["a2a.flat", "latency", "ag.flat", "latency"]


def test_the_whole_tree_is_offered() -> None:
    both = replace(profile(), links={"inter": Link(1e9), "intra": Link(1e11)})
    net = Network(both, Topology(4, 2))
    assert len(routes(net.topology, "cpu")) == 174
    offered = choices(Pricing(net), Limits(codecs=("topk",)), "cpu")
    assert len(offered) == 174
    assert sum(not c.compresses for c in offered) == 9
    summable = choices(Pricing(net), Limits(codecs=("cast",)), "cpu")
    assert len(summable) == 175, "allreduce of summable payloads is an extension"
    assert len({c.option for c in offered}) == 174


def test_limits() -> None:
    net = network()
    priced = Pricing(net)
    assert not any(c.compresses and c.encodes > 1 for c in choices(priced, Limits(lossy=True, max_encodes=1), "cpu"))
    harmless = {str(c.codec.codec) for c in choices(priced, Limits(), "cpu") if c.codec}
    assert harmless == {"gcomp:mode=lossless"}
    word = choices(priced, Limits(lossy=True, allow=lambda option: option.codec == "cast"), "cpu")
    assert {c.option.codec for c in word} == {"identity", "cast"}
    with pytest.raises(PlanError, match="'zstd' was not measured"):
        choices(priced, Limits(codecs=("zstd",)), "cpu")
    with pytest.raises(PlanError, match="did you mean 'zstd'"):
        choices(priced, Limits(codecs=("zsdt",)), "cpu")


def test_a_codec_of_whole_messages_takes_its_own_route_and_has_few_headers() -> None:
    cost = CodecCost(parse("noise"), 7.0, {"cpu": line(1e-5, 2e-10)}, {"cpu": line(1e-5, 2e-10)})
    net = Network(profile(codecs={"noise": cost}), Topology(4))
    (choice,) = [c for c in choices(Pricing(net), Limits(codecs=("noise",)), "cpu") if c.compresses]
    assert choice.option == Option("noise", "cpu", "alltoall")
    sent = {t.label: t.seconds for t in choice.tasks}
    few, many = (float(sent["a2a.flat"] @ features(MB, MB / 7, cost, net, tensors)) for tensors in (1, 1000))
    assert few == many == pytest.approx((0.75 * MB / 7 + 3 * 32) * 8e-9, rel=1e-3)


@given(st.lists(st.integers(1, 1 << 22), min_size=1, max_size=20), st.sampled_from([2, 4, 8]))
def test_even_chunks_hold_everything_once(numels: list[int], world: int) -> None:
    cut = chunks(numels, world, Cut())
    sizes = [sum(piece.numel for piece in chunk) for chunk in cut]
    assert max(sizes) - min(sizes) <= 1
    whole = [(piece.tensor, i) for chunk in cut for piece in chunk for i in (piece.start, piece.stop)]
    assert whole == sorted(whole)
    assert sum(sizes) == sum(numels)


@pytest.mark.parametrize("cut", [Cut(), Cut(1 << 14), Cut(1 << 14, False), Cut(1 << 15, True, 1 << 14)])
@pytest.mark.parametrize("world", [2, 4])
def test_chunks_are_those_of_the_runner(cut: Cut, world: int) -> None:
    rng = np.random.default_rng(world)
    for _ in range(20):
        numels = [int(n) * 128 * world for n in rng.integers(1, 200, size=rng.integers(1, 30))]
        names = [f"t{i}" for i in range(len(numels))]
        tables = Table.of(names, numels, [world]).chunks(*cut)
        sent = [sum(map(table.numel, range(world))) for table in tables]
        planned = [sum(piece.numel for piece in chunk) for chunk in chunks(numels, world, cut)]
        assert len(planned) == len(sent)
        near = max(numels) if not cut.cuts else world * CUT  # where the runner may cut a part, or none
        assert planned == pytest.approx(sent, abs=near)


@pytest.mark.parametrize("hosts", [(4, 1), (2, 2)])
def test_what_is_cut_is_what_the_runner_cuts(hosts: tuple[int, int]) -> None:
    """Every choice on a CPU, by its program."""
    costs = {
        name: CodecCost(parse(name), 4.0, {"cpu": line(1e-5, 2e-10)}, {"cpu": line(1e-5, 2e-10)}) for name in CODECS
    }
    net = Network(profile(codecs=costs), Topology(*hosts, 1e9, 1e11))
    ranks = Ranks(0, tuple(tuple(range(i, i + hosts[1])) for i in range(0, 4, hosts[1])))
    size, cuts = 1 << 23, set()
    for choice in choices(Pricing(net), Limits(lossy=True), "cpu"):
        cut, option = cut_of(choice, on_gpu=False), choice.option
        cuts.add(cut)
        assert option.route is not None
        codec = codes_messages(parse(option.codec), option.route)
        if codec is None:
            assert cut is None, option
            continue
        message = HostMessage(codec, option.route, ["x"], [torch.empty(size)])
        assert len(chunks([size], 4, cut)) == len(message.program(ranks).chunks), option
    assert len(cuts) == 4


def test_twins() -> None:
    for choice in choices(Pricing(network()), Limits(lossy=True), "cpu"):
        if choice.compresses:
            assert twin(twin(choice.option, "gpu"), "cpu") == choice.option


@pytest.mark.parametrize(("hosts", "ranks"), [(0, 1), (1, 1), (4, 0), (-2, 8)])
def test_impossible_clusters(hosts: int, ranks: int) -> None:
    with pytest.raises(PlanError, match=r"at least|nothing to exchange"):
        Topology(hosts, ranks)


def test_links_that_nobody_knows() -> None:
    with pytest.raises(PlanError, match="--intra"):
        Network(profile(), Topology(4, 2))
    with pytest.raises(PlanError, match="above 0"):
        Topology(4, 1, 0.0)
    missing: Profile = profile(collectives=())
    with pytest.raises(PlanError, match="no measurement of 'ar'"):
        Network(missing, Topology(4)).cost("ar", "flat")


def test_what_is_assumed_is_said() -> None:
    both = replace(profile(), links={"inter": Link(1e9), "intra": Link(1e11)})
    net = Network(both, Topology(4, 2))
    net.cost("rs", "intra")
    assert "collectives of the intra group have the latency of those in the inter group" in net.assumptions
    assert np.isfinite(net.cost("rs", "intra").s_per_byte)


def test_ranks_that_share_cores_code_slower_and_say_so() -> None:
    alone, shared = network(), network(cores_per_rank=0.25)
    times = [seconds(net, "alltoall", "cast", MB) for net in (alone, shared)]
    assert times[1]["enc.cpu"] == pytest.approx(4 * 1.75 * times[0]["enc.cpu"])
    assert times[1]["a2a.flat"] == times[0]["a2a.flat"]
    assert any("0.25 of a processor core" in text for text in shared.assumptions)
    assert alone.assumptions == []


def test_sockets_take_their_part_of_the_processor() -> None:
    """At any rate the same; DDP's own sums wait for whichever takes longer."""
    worked = tuple(replace(c, cpu=line(1e-4, 2e-9)) for c in profile().collectives)
    for rate in (1e8, 1e10):
        net = network(rate=rate, collectives=worked, cores_per_rank=0.5, chunk_s=1e-3)
        sockets = seconds(net, "allgather", "cast", MB)["sockets"]
        assert sockets == pytest.approx(1.5 * (1e-3 / 2 + 2e-9 * (MB / 2 + 32)) / 0.5, rel=1e-3)
        busy, _ = Pricing(net).ddp(MB)
        assert busy == pytest.approx(max(1.5 * 8 / rate, 2e-9 / 0.5) * MB, rel=1e-3)


def test_with_a_core_of_their_own_sockets_hold_up_nothing_but_their_bytes() -> None:
    worked = tuple(replace(c, cpu=line(1e-4, 50e-9)) for c in profile().collectives)
    net = network(collectives=worked, cores_per_rank=4, chunk_s=1e-3)
    found = seconds(net, "allgather", "cast", MB)
    assert found["sockets"] == pytest.approx(1e-3 / 2)
    assert found["ag.flat"] == pytest.approx(50e-9 * (MB / 2 + 32), rel=1e-6)
    quick = network(collectives=tuple(replace(c, cpu=line(1e-4, 1e-9)) for c in worked), cores_per_rank=4)
    assert seconds(quick, "allgather", "cast", MB)["ag.flat"] == pytest.approx(24e-9 * (MB / 2 + 32), rel=1e-6)


def test_plain_gradients_are_priced_by_nccl_where_it_carries_them() -> None:
    """Coded ones are not, and threads that spin while they wait for NCCL are no work."""
    spinning = tuple(replace(c, cpu=line(1e-4, 100e-9)) for c in profile().collectives)
    own = Collective("ddp", "inter", 4, line(1e-3, 14e-9))
    net = network(collectives=(*spinning, own))
    assert net.by_nccl
    busy, after = Pricing(net).ddp(MB)
    assert (busy, after) == (pytest.approx(1e-3 + 14e-9 * MB), 0.0)
    assert net.cost("ar", "flat").source == "ar.inter"
    assert net.cost("ddp", "flat").source == "ddp.inter"
    faster, _ = Pricing(network(rate=1e10, collectives=(*spinning, own))).ddp(MB)
    assert faster == pytest.approx(1e-3 + (1.2e-9 + 2e-9) * MB), "what is not the wire stays"
    assert network().cost("ddp", "flat") == network().cost("ar", "flat"), "one measurement is enough where both are one"


def test_sums_have_payloads_of_their_own() -> None:
    """In BF16 arithmetic gradients have half of the bits that their means have."""
    cost = replace(profile().codecs["gcomp:mode=lossless"], ratio=3.0, sum_ratios={"stem": 1.25})
    assert (cost.sum_ratio_of("stem"), cost.sum_ratio_of("head")) == (1.25, 3.0)
    net = network()
    amounts = features(MB, MB / 3, cost, net, 1.0, MB / 1.25)
    tasks = Pricing(net).coded(Route.parse("alltoall"), cost)
    found = {task.label: float(task.seconds @ amounts) for task in tasks}
    assert found["a2a.flat"] == pytest.approx(6e-9 * (MB / 3 + 4 * 32), rel=1e-6)
    assert found["ag.flat"] == pytest.approx(24e-9 * (MB / 1.25 / 4 + 32), rel=1e-6)


def test_all_rounds_of_low_rank_cost_what_was_measured_for_all() -> None:
    curves = {"cpu": line(3e-3, 1e-9)}
    cost = CodecCost(parse("powersgd:rank=4"), 100.0, curves, curves)
    net = network()
    tasks = Pricing(net).factors(cost, "cpu")
    coding = sum(float(t.seconds @ features(MB, MB / 100, cost, net)) for t in tasks if t.label == "enc.cpu")
    assert coding == pytest.approx(3e-3 + 1e-9 * MB)

"""Emulated hosts: what their ranks see and exchange, how fast, and how a run ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradzip import cli, emulate
from gradzip.emulate import Cluster, Line, Result, launch, network
from gradzip.errors import EmulationError, GradzipWarning

NAMESPACES = pytest.mark.usefixtures("namespaces")


@pytest.fixture(params=["1gbit", None], ids=["namespaces", "loopback"])
def rate(request: pytest.FixtureRequest) -> str | None:
    """Runs a test both ways, or skips the one that this machine does not allow."""
    if request.param is not None:
        request.getfixturevalue("namespaces")
    chosen: str | None = request.param
    return chosen


def shell(script: str, rate: str | None, hosts: int = 3, **options: Any) -> tuple[Result, list[str]]:
    lines: list[Line] = []
    result = emulate.run(["sh", "-c", script], hosts=hosts, rate=rate, measure=False, on_line=lines.append, **options)
    return result, [str(line) for line in lines]


# -- rates and environment -------------------------------------------------------------------------------------------


def test_rates_are_read_and_written() -> None:
    assert [emulate.parse_rate(text) for text in ("100mbit", "1gbit", "2.5Gbit")] == [10**8, 10**9, 25 * 10**8]
    assert [emulate.format_rate(rate) for rate in (95.6e6, 1e9, 2.39e9)] == ["95.6 Mbit/s", "1 Gbit/s", "2.39 Gbit/s"]


@pytest.mark.parametrize("text", ["", "fast", "1", "100mbps", "100 mbit/s", "-1gbit", "1e3mbit"])
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(EmulationError, match=r"like 100mbit, 1gbit or 2\.5gbit"):
        emulate.parse_rate(text)


def test_impossible_clusters_are_refused() -> None:
    shapes: list[dict[str, Any]] = [
        {"hosts": 0},
        {"hosts": 1000},
        {"hosts": 2, "ranks_per_host": 0},
        {"hosts": 2, "rate": 1000},
    ]
    for shape in shapes:
        with pytest.raises(EmulationError):
            Cluster(**shape)


@pytest.mark.parametrize("text", ["1mbit", "100mbit", "300mbit", "1gbit", "10gbit"])
def test_a_packet_always_fits_the_burst(text: str) -> None:
    """tbf cuts up larger ones, and flows were seen to stall on it."""
    rate = emulate.parse_rate(text)
    assert 2 * 1500 < network.largest_packet_bytes(rate) <= network.burst_bytes(rate) // 2
    assert network.largest_packet_bytes(rate) <= 65536


def test_every_rank_finds_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cluster = Cluster(hosts=2, ranks_per_host=2)
    places = [cluster.environment(rank, "emu0", ("10.0.0.1", 29500)) for rank in range(cluster.world)]
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    assert [tuple(int(place[name]) for name in names) for place in places] == [
        (0, 0, 0, 4, 2, 2),
        (1, 1, 0, 4, 2, 2),
        (2, 0, 1, 4, 2, 2),
        (3, 1, 1, 4, 2, 2),
    ]
    for place in places:
        assert (place["MASTER_ADDR"], place["MASTER_PORT"]) == ("10.0.0.1", "29500")
        assert place["GLOO_SOCKET_IFNAME"] == place["NCCL_SOCKET_IFNAME"] == "emu0"
        assert place["NCCL_IB_DISABLE"] == "1"
        assert int(place["OMP_NUM_THREADS"]) >= 1
        assert "NCCL_HOSTID" not in place, "NCCL must refuse two ranks on one GPU by itself"


def test_what_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    own = Cluster(hosts=2).environment(0, "lo", ("127.0.0.1", 1))
    assert "OMP_NUM_THREADS" not in own
    assert "TORCH_CPP_LOG_LEVEL" not in own


def test_gpus_are_shared_out_among_hosts() -> None:
    cluster = Cluster(hosts=2, ranks_per_host=2, gpus=("0", "1", "2", "5"))
    own = [cluster.environment(rank, "emu0", ("10.0.0.1", 1)) for rank in range(4)]
    assert [place["CUDA_VISIBLE_DEVICES"] for place in own] == ["0,1", "0,1", "2,5", "2,5"]
    assert [place["NCCL_HOSTID"] for place in own] == ["host0", "host0", "host1", "host1"]


def test_sharing_a_gpu_makes_every_rank_a_host_to_nccl() -> None:
    cluster = Cluster(hosts=2, ranks_per_host=2, gpu_share=True, gpus=("0",))
    own = [cluster.environment(rank, "emu0", ("10.0.0.1", 1)) for rank in range(4)]
    assert len({place["NCCL_HOSTID"] for place in own}) == 4
    assert all("CUDA_VISIBLE_DEVICES" not in place for place in own)


def test_a_gpu_service_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control, log = tmp_path / "nvidia-cuda-mps-control", tmp_path / "log"
    control.write_text(f'#!/bin/sh\necho "$CUDA_MPS_PIPE_DIRECTORY $* $([ $# -gt 0 ] || cat)" >>{log}\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    _, lines = shell("echo $CUDA_MPS_PIPE_DIRECTORY; ls $CUDA_MPS_LOG_DIRECTORY", None, hosts=2, gpu_share=True)
    pipe = lines[0].split()[1]
    assert sorted(lines) == [f"[0.0] {pipe}", f"[1.1] {pipe}"]
    assert log.read_text().split() == [pipe, "-d", pipe, "quit", "-t", "5"]
    assert not Path(pipe).parent.exists()


def test_sharing_a_gpu_without_the_service_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_find", lambda name: None)
    with pytest.warns(GradzipWarning, match="nvidia-cuda-mps-control"):
        result, _ = shell("exit 0", None, gpu_share=True)
    assert result.exit_code == 0


# -- what ranks exchange ---------------------------------------------------------------------------------------------

ALL_REDUCE = """
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
x = torch.full((1000,), 10.0 ** dist.get_rank())
dist.all_reduce(x)
print(x.unique().tolist())
dist.destroy_process_group()
"""


def test_hosts_sum_through_gloo(rate: str | None) -> None:
    ranks_per_host = 2 if rate else 1
    lines: list[Line] = []
    command = [sys.executable, "-c", ALL_REDUCE]
    result = emulate.run(command, hosts=2, ranks_per_host=ranks_per_host, rate=rate, on_line=lines.append)
    assert result.exit_code == 0, lines
    world = result.cluster.world
    expected = [f"[{rank // ranks_per_host}.{rank}] [{'1' * world}.0]" for rank in range(world)]
    assert sorted(str(line) for line in lines if line.stream == "out") == expected
    assert result.rates is not None
    assert len(result.rates.ring) == 2


@NAMESPACES
def test_hosts_have_their_own_network() -> None:
    _, lines = shell("readlink /proc/self/ns/net", "1gbit", ranks_per_host=2)
    own = {line.split()[0]: line.split()[1] for line in lines}
    assert own["[0.0]"] == own["[0.1]"]
    assert len({own["[0.0]"], own["[1.2]"], own["[2.4]"], os.readlink("/proc/self/ns/net")}) == 4


@NAMESPACES
def test_the_limit_limits() -> None:
    free = emulate.run(["true"], hosts=2, rate=None).rates
    assert free is not None
    for _ in range(5):  # a receiver that had to wait for a processor finds at once what came meanwhile
        limited = emulate.run(["true"], hosts=2, rate="100mbit").rates
        assert limited is not None
        if limited.one_flow > 10e6 and max(limited.one_flow, *limited.ring) < 115e6:
            break
    assert max(limited.one_flow, *limited.ring) < 115e6
    assert 10e6 < limited.one_flow < free.one_flow / 3


INCAST = """
import os, select, socket, time
rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], 4000)
if rank == 0:
    with socket.create_server(address) as server:
        senders = [server.accept()[0] for _ in range(2)]
        start, size = time.monotonic(), 0
        for sender in senders:
            sender.sendall(b"!")
        while senders:
            for sender in select.select(senders, [], [])[0]:
                data = sender.recv(1 << 16)
                size += len(data)
                if not data:
                    senders.remove(sender)
        print(8 * size / (time.monotonic() - start))
else:
    while True:
        try:
            sender = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    sender.recv(1)
    sender.sendall(bytes(1_500_000))
"""


@NAMESPACES
def test_what_a_host_receives_is_limited_too() -> None:
    lines: list[Line] = []
    emulate.run([sys.executable, "-IS", "-c", INCAST], hosts=3, rate="50mbit", measure=False, on_line=lines.append)
    (line,) = lines
    assert float(line.text) < 1.3 * 50e6


# -- how a run ends --------------------------------------------------------------------------------------------------


def test_the_exit_code_is_that_of_the_failure(rate: str | None) -> None:
    result, lines = shell("echo $RANK; echo error >&2; [ $RANK != 1 ] || exit 7", rate)
    assert result.exit_code == 7
    assert result.first_failure == 1
    assert result.codes == (0, 7, 0)
    assert sorted(lines) == sorted(f"[{rank}.{rank}] {text}" for rank in range(3) for text in (rank, "error"))


def test_death_by_signal_is_a_failure() -> None:
    result, _ = shell("[ $RANK = 0 ] || kill -9 $$", None, hosts=2)
    assert result.codes == (0, -9)
    assert result.exit_code == 137


def test_the_first_failure_ends_the_others(rate: str | None, tmp_path: Path) -> None:
    """Rank 1 fails; rank 0 still reports, rank 2 ends when asked to, rank 3 does not listen."""
    script = f"""cd {tmp_path}; case $RANK in
        0) until [ -s failing ]; do sleep 0.05; done
           while kill -0 $(cat failing) 2>/dev/null; do sleep 0.05; done; echo noticed; exit 3;;
        1) until [ -e deaf ]; do sleep 0.05; done; echo $$ >failing; exit 7;;
        2) exec sleep 1000;;
        3) trap '' TERM; touch deaf; while :; do sleep 0.1; done;;
    esac"""
    result, lines = shell(script, rate, hosts=4, grace=5.0)
    assert result.exit_code == 7
    assert result.codes == (3, 7, -signal.SIGTERM, -signal.SIGKILL)
    assert lines == ["[0.0] noticed"]


def test_nothing_that_a_rank_started_survives_it(rate: str | None, tmp_path: Path) -> None:
    script = f"cd {tmp_path}; (while :; do date +%N >$RANK; sleep 0.05; done) & until [ -s $RANK ]; do sleep 0.05; done"
    result, _ = shell(script, rate, hosts=2)
    assert result.exit_code == 0
    assert result.seconds < 100
    last = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    subprocess.run(["sleep", "0.2"], check=True)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == last


def test_all_output_comes_through() -> None:
    script = r"""printf 'one\r\ntwo\rthree\n\377'; printf 'no end' >&2; head -c 200000 /dev/zero | tr '\0' x"""
    lines: list[Line] = []
    emulate.run(["sh", "-c", script], hosts=1, rate=None, on_line=lines.append)
    out = [line.text for line in lines if line.stream == "out"]
    assert out[:3] == ["one", "two", "three"]
    assert "".join(out[3:]) == "\N{REPLACEMENT CHARACTER}" + 200000 * "x"
    assert [line.text for line in lines if line.stream == "err"] == ["no end"]


def test_a_command_that_does_not_exist(rate: str | None) -> None:
    with pytest.raises(EmulationError, match="cannot run 'no-such-command'"):
        emulate.run(["no-such-command"], hosts=2, rate=rate, measure=False)


# -- what is missing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("program", "package"), [("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux")])
def test_missing_programs_are_named(
    program: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "_find", lambda name: None if name == program else f"/usr/sbin/{name}")
    assert cli.main(["emulate", "--hosts", "2", "--", "true"]) == 1
    said = capsys.readouterr().err
    assert f"no `{program}` here (apt install {package})" in said
    assert "--no-limit" in said
    assert emulate.obstacle() is not None


@pytest.mark.parametrize(
    ("switch", "value", "cure"),
    [
        ("kernel/unprivileged_userns_clone", "0", "sudo sysctl kernel.unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "apparmor_restrict_unprivileged_userns=0"),
        ("user/max_user_namespaces", "0", "sudo sysctl user.max_user_namespaces="),
        ("user/max_user_namespaces", "1000", "--privileged"),
    ],
)
def test_the_switch_that_forbids_namespaces_is_named(
    switch: str, value: str, cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unshare = tmp_path / "unshare"
    unshare.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n")
    unshare.chmod(0o755)
    (tmp_path / switch).parent.mkdir()
    (tmp_path / switch).write_text(value + "\n")
    monkeypatch.setattr(launch, "_find", lambda name: str(tmp_path / name))
    monkeypatch.setattr(launch, "_SYSCTL", tmp_path)
    said = emulate.obstacle()
    assert said is not None
    assert "Operation not permitted" in said
    assert cure in said
    assert "--no-limit" in said


@NAMESPACES
def test_a_kernel_without_the_limiter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tc = tmp_path / "tc"
    tc.write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2\nexit 2\n")
    tc.chmod(0o755)
    real = launch._find
    monkeypatch.setattr(launch, "_find", lambda name: str(tc) if name == "tc" else real(name))
    with pytest.raises(EmulationError, match=r"Specified qdisc kind is unknown.*modprobe -a bridge veth sch_tbf"):
        shell("exit 0", "1gbit")


# -- command line ----------------------------------------------------------------------------------------------------


def test_the_command_line_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["emulate", "--hosts", "2", "--ranks-per-host", "2", "--no-limit", "--json"]
    assert cli.main([*argv, "--", "sh", "-c", "echo $RANK of $WORLD_SIZE; exit $((RANK == 3))"]) == 1
    out, err = capfd.readouterr()
    shown = json.loads(out)
    assert shown["exit_codes"] == [0, 0, 0, 1]
    assert (shown["exit_code"], shown["first_failure"], shown["rate_bps"]) == (1, 3, None)
    assert len(shown["measured_ring_bps"]) == 2
    assert "[1.3] 3 of 4" in err
    assert "rank 3 on host 1 failed first, with exit code 1" in err


def test_the_command_line_prints_what_ranks_print(capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["emulate", "--hosts", "1", "--no-limit", "--no-measure", "sh", "-c", "echo out; echo err >&2"]
    assert cli.main(argv) == 0
    out, err = capfd.readouterr()
    assert out == "[0.0] out\n"
    assert err.splitlines() == ["gradzip: 1 hosts with 1 rank each, no limit", "[0.0] err"]


@pytest.mark.parametrize("argv", [["--hosts", "2"], ["--rate", "fast", "--", "true"], ["--hosts", "0", "--", "true"]])
def test_a_wrong_request_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["emulate", *argv]) == 1
    assert capsys.readouterr().err.startswith("gradzip: ")

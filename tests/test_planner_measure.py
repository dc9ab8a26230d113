"""`gradzip profile` on a script that knows nothing of it, from start to plan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import fake_gpu
import pytest
import torch
from ranks import free_port, run_ranks
from torch import nn

from gradzip import cli, wire
from gradzip.codecs import Context, parse
from gradzip.engines import noise_layout
from gradzip.exchange.coding import Message
from gradzip.exchange.compiler import compile_route
from gradzip.exchange.interpreter import Interpreter
from gradzip.exchange.message_codecs import message_codec
from gradzip.exchange.program import Communicate
from gradzip.exchange.topology import Topology as Ranks
from gradzip.feedback import Memory
from gradzip.planner import answer as answers
from gradzip.planner import inject_folder
from gradzip.planner.answer import Request, answer
from gradzip.planner.choices import Limits
from gradzip.planner.measure import Settings, coding, mirror
from gradzip.planner.measure import noise as of_noise
from gradzip.planner.network import Topology
from gradzip.planner.profile import Profile
from gradzip.routes import NAMED

SCRIPT = """
import sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

assert "already" in sys.modules, "another sitecustomize was not run"
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 4))
model = DistributedDataParallel(net, bucket_cap_mb=1)
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(dist.get_rank())
for step in range({steps}):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(8, 64)).float().square().mean()
    time.sleep(0.002)  # the loss: part of forward
    loss.backward()
    optimizer.step()
    print("step", step, flush=True)
print("the script went on")
dist.destroy_process_group()
"""


@contextmanager
def started(tmp_path: Path, *options: str, steps: int = 1000) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks, on two hosts as it seems; they end with the test, whatever becomes of that."""
    script, others = tmp_path / "train.py", tmp_path / "others"
    script.write_text(SCRIPT.format(steps=steps))
    others.mkdir()
    (others / "sitecustomize.py").write_text("import sys; sys.modules['already'] = sys")
    words = [sys.executable, "-m", "gradzip", "profile", *options, "--", sys.executable, str(script)]
    common = {"WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": free_port(), "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"OMP_NUM_THREADS": 1, "GRADZIP_ENGINE": "reference"}
    path = os.pathsep.join([str(others), *sys.path])
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            own = {name: str(value) for name, value in (common | {"RANK": rank}).items()}
            environment = {**os.environ, **own, "PYTHONPATH": path}
            process = subprocess.Popen(words, env=environment, text=True, start_new_session=True, **pipes)
            ranks.append(stack.enter_context(process))
            stack.callback(end_group, process.pid)
        yield ranks


def end_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def test_a_script_is_measured_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "profile.json"
    options = ["--steps", "12", "--out", str(out), "--codec", "cast", "--codec", "powersgd"]
    options += ["--codec", "gcomp:mode=lossless"]
    with started(tmp_path, *options) as ranks:
        ended = [rank.communicate(timeout=250) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    assert "7 steps measured, 6 tensors" in ended[0][1]
    assert "the script went on" not in ended[0][0]
    measured = Profile.load(out)
    assert {t.name for t in measured.tensors} == {f"{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias")}
    order = [t.name for t in measured.tensors]
    assert order.index("4.weight") < order.index("2.weight") < order.index("0.weight")
    assert 0.002 < measured.forward_s < 1
    assert (measured.hosts, measured.ranks_per_host) == (2, 1)
    assert measured.step_s is not None
    assert measured.step_s > measured.backward_s
    assert set(measured.codecs) == {"cast", "gcomp:mode=lossless", "powersgd"}
    assert measured.codecs["cast"].ratio == pytest.approx(2, rel=0.05)
    assert measured.codecs["powersgd"].ratio > 10
    assert {c.kind for c in measured.collectives} == {"ar", "rs", "ag", "a2a", "red", "gat", "bc"}
    assert measured.bucket_bytes == 1 << 20
    assert all(c.cpu is not None for c in measured.collectives)
    assert measured.cores_per_rank is not None
    assert 0 < measured.cores_per_rank <= (os.cpu_count() or 1)
    exact = measured.codecs["gcomp:mode=lossless"]
    assert set(exact.sum_ratios) == set(exact.ratios)
    assert exact.ratios["2.weight"] > 1.3 * exact.sum_ratios["2.weight"], "a rank's own gradient has fewer bits"
    assert measured.codecs["cast"].sum_ratios == {}
    assert "that took" in ended[0][1]
    assert measured.exposed_s is not None
    monkeypatch.setattr(answers, "SURE", 0.0)  # on a busy machine the planner doubts what it measured, and is right
    monkeypatch.setattr(answers.Answer, "crowding", 0.0)
    found = answer(Request(measured, Topology(2, 1, 1e7), Limits(lossy=True)))
    assert found.pays


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    options = ["--steps", "1000000", "--out", str(out), "--codec", "cast"]
    with started(tmp_path, *options, steps=1000000) as ranks:
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            if line.strip() == "step 20":
                break
        for rank in ranks:
            os.killpg(rank.pid, signal.SIGINT)
        for rank in ranks:
            rank.communicate(timeout=250)
    assert Profile.load(out).steps >= 10


@pytest.mark.parametrize(
    "text",
    ["gcomp", "gcomp:mode=lossless", "gcomp:ulps=256", "cast", "topk", "powersgd:rank=2", "noise", "sign", "randomk"],
)
def test_codecs_are_timed_through_the_runtime(text: str) -> None:
    """In the mirror all ranks send the same: the mean is the gradient itself, as far as the codec keeps it."""
    torch.manual_seed(0)
    matrix, bias = nn.Parameter(torch.randn(96, 64)), nn.Parameter(torch.randn(64))
    for parameter in (matrix, bias):
        parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer = torch.optim.SGD([matrix, bias], lr=0.01, momentum=0.9)
    optimizer.step()
    gradients = [(name, p, p.grad) for name, p in (("matrix", matrix), ("bias", bias)) if p.grad is not None]
    kept = [p.grad.clone() for p in (matrix, bias) if p.grad is not None]
    cost = coding._cost(parse(text), gradients, optimizer, 4)
    assert set(cost.encode) == set(cost.decode) == {"cpu"}
    assert set(cost.ratios) == {"matrix", "bias"}
    assert cost.ratio > (1 if text != "topk" else 5)
    for curve in (cost.encode["cpu"], cost.decode["cpu"]):
        assert all(size > 0 and seconds >= 0 for size, seconds in curve.points)
        assert curve.line.at(1e6) > 0
    assert all(torch.equal(g, before) for (_, _, g), before in zip(gradients, kept)), "gradients are left alone"


@pytest.mark.parametrize("alike", [0.0, 0.9])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_frames_of_noise_are_as_large_as_those_of_an_exchange(kind: type[torch.optim.Optimizer], alike: float) -> None:
    """Of a rank's own gradient and of the sum, whether ranks have much in common or nothing."""
    torch.manual_seed(0)
    world, parameter = 4, nn.Parameter(torch.zeros(64, 512))
    common = alike * torch.randn(64, 512)
    ranks = [common + (1 - alike) * torch.randn(64, 512) for _ in range(world)]
    optimizer = kind([parameter], lr=0.1)  # type: ignore[call-arg]
    parameter.grad = torch.randn(64, 512) * torch.logspace(-2, 2, 512)
    optimizer.step()
    shapes = of_noise.Shapes(optimizer, {parameter: "x"}).of(["x"])
    assert (shapes[0] is None) == (kind is torch.optim.SGD)
    codec = message_codec(parse("noise"))
    assert codec is not None
    sent: dict[str, list[int]] = {}

    class Weighed(Interpreter):
        def _communicate(self, step: Communicate, ranks: Sequence[int]) -> None:
            frames = [frame for term in self._coded[1][step.source] for frame in term]
            frames = [frame for frame in frames if frame.numel()]  # a rank sends itself none
            sent[step.name] = [frame.numel() - wire.HEADER_BYTES for frame in frames]
            super()._communicate(step, ranks)

    topology = Ranks(0, tuple((rank,) for rank in range(world)))
    values = [parameter.numel()]
    program = compile_route(codec.text, NAMED["alltoall"], ["x"], values, torch.float32, topology, True)
    known = noise_layout.Shapes(shapes)
    messages = [Message(["x"], torch.float32, rank, world, 7, shapes=known) for rank in range(world)]
    Weighed(program, codec, messages).run([[gradient.flatten()] for gradient in ranks])
    gradients, means = [("x", parameter, ranks[1])], [("x", parameter, torch.stack(ranks).sum(0) / world)]
    cost = coding._cost(parse("noise"), gradients, optimizer, world, means)
    raw = 4 * parameter.numel()
    assert raw / cost.ratios["x"] == pytest.approx(4 / 3 * sum(sent["AllToAll"]), rel=0.02)
    assert raw / cost.sum_ratios["x"] == pytest.approx(4 * sum(sent["AllGather"]), rel=0.02)


def test_messages_that_stand_for_those_of_others_end_as_their_mean() -> None:
    """All ranks have the same gradient: what comes back is that, with little noise."""
    torch.manual_seed(0)
    given = torch.randn(1024).repeat(4)
    sent = [given.clone()]
    stand = mirror.Stand(parse("noise:share=0.1%"), "cpu", torch.device("cpu"), 4)
    stages = stand.sender(sent, [Context("x", world=4)], Memory(0))()
    assert len(stages) == 3
    off = (sent[0] - given).square().mean() / given.square().mean()
    assert 0 < off < 0.004


def test_values_cost_something_whatever_frames_seem_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured while the machine did other things makes each frame dearer than a whole message."""
    monkeypatch.setattr(mirror.Stand, "stages", lambda self, tensors, contexts: [1e-4 * len(tensors) ** 2] * 3)
    for text in ("cast", "topk"):
        stand = mirror.Stand(parse(text), "cpu", torch.device("cpu"), 4)
        for curve in coding._curves(stand, "x", torch.randn(8192), None):
            assert all(seconds > 0 for _, seconds in curve.points)
            assert curve.line.at(1e6) > 0


def test_the_mirror_gives_back_what_it_is_sent() -> None:
    stand = mirror.Stand(parse("gcomp:mode=lossless"), "cpu", torch.device("cpu"), 4)
    values = torch.randn(1024).repeat(4)
    sent = [values.clone()]
    stages = stand.sender(sent, [Context("x", world=4)], Memory(0))()
    assert len(stages) == 3
    assert torch.equal(sent[0], values)


def reflected(rank: int, text: str) -> tuple[list[float], bool]:
    """What the mirror gives back to chunks on a device, for which a stand-in with late copies is taken."""
    fake_gpu.install()
    stand = mirror.Stand(parse(text), "gpu", torch.device("cpu"), 4)
    values = torch.randn(256).repeat(4)
    sent = [values.clone()]
    stages = stand.sender(sent, [Context("x", world=4)], Memory(0))()
    return stages, torch.equal(sent[0], values)


@pytest.mark.parametrize(("text", "stages"), [("gcomp:mode=lossless", 3), ("topk:ratio=1,feedback=false", 2)])
def test_the_mirror_gives_back_what_a_device_sends(text: str, stages: int) -> None:
    ((times, same),) = run_ranks(1, reflected, text)
    assert len(times) == stages
    assert min(times) > 0
    assert same


def test_settings_survive_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(7, "x.json", ("cast",), 1e9, True)
    monkeypatch.setenv("GRADZIP_PROFILE", settings.to_text())
    assert Settings.from_environment() == settings
    assert (inject_folder() / "sitecustomize.py").is_file()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["profile"], "no command to run"),
        (["profile", "--steps", "3", "--", "true"], "at least 7"),
        (["profile", "--codec", "gcmop", "--", "true"], "did you mean 'gcomp'"),
        (["profile", "--", "no-such-program"], "cannot run 'no-such-program'"),
    ],
)
def test_wrong_requests_say_why(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 1
    assert message in capsys.readouterr().err

"""The GPU engine: its kernels in Triton's interpreter here, and on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradzip import engines
from gradzip.codecs import Context, parse
from gradzip.engines.layout import Floor
from gradzip.errors import CodecError, EngineError

MODES = ["gcomp:mode=lossless", "gcomp:keep=7", "gcomp:keep=5", "gcomp", "gcomp:mode=paper"]


@pytest.mark.timeout(600)
def test_kernels_write_and_read_the_reference_bytes() -> None:
    pytest.importorskip("triton", reason="the GPU engine needs triton: pip install 'gradzip[gpu]'")
    script = Path(__file__).with_name("interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("ok:") >= 24


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cpu_tensors_are_not_for_this_engine() -> None:
    with engines.use("triton"), pytest.raises((EngineError, ValueError)):
        parse("gcomp:mode=lossless").encode(torch.ones(10))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("codec", MODES)
@pytest.mark.parametrize("numel", [1, 4097, 300_000])
def test_frames_cross_between_cpu_and_gpu(codec: str, numel: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 1e-3
    x[::9] = 0
    floor = torch.full((numel,), -20, dtype=torch.int8)
    cpu, gpu = Context(floor=floor), Context(floor=floor.cuda())
    frame = parse(codec).encode(x, cpu)
    assert torch.equal(parse(codec).encode(x.cuda(), gpu).cpu(), frame)
    back = parse(codec).decode(frame.cuda(), gpu).cpu()
    assert torch.equal(back.view(torch.int32), parse(codec).decode(frame, cpu).view(torch.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zeros", [0.0, 0.1, 1.0])
def test_large_inputs_come_back(dtype: torch.dtype, zeros: float) -> None:
    x = (torch.randn(5_000_001, device="cuda") * 1e-3).to(dtype)
    x[torch.rand(x.numel(), device="cuda") < zeros] = 0
    codec = parse("gcomp:mode=lossless")
    frame = codec.encode(x)
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(codec.decode(frame).view(kind), x.view(kind))
    total = torch.ones_like(x)
    codec.decode(frame, out=total, add=True)
    assert torch.equal(total, torch.ones_like(x) + x)


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [-184, -176, -168, -160])
def test_floors_are_the_same_on_both_sides(depth: int) -> None:
    """From nearly lossless to nearly all zero; the CPU floors are made from CPU copies of the optimizer's state."""
    numel = 400_000
    x = torch.randn(numel) * 1e-3
    theta, second = torch.randn(numel) * 0.05, torch.rand(numel) * 1e-8
    cpu = Context(floor=Floor(theta, second, depth, 0, 60), shift=1)
    gpu = Context(floor=Floor(theta.cuda(), second.cuda(), depth, 0, 60), shift=1)
    frame = parse("gcomp").encode(x, cpu)
    assert torch.equal(parse("gcomp").encode(x.cuda(), gpu).cpu(), frame)
    assert torch.equal(parse("gcomp").decode(frame.cuda(), gpu).cpu(), parse("gcomp").decode(frame, cpu))


@pytest.mark.gpu
@pytest.mark.parametrize("codec", MODES)
def test_damaged_payloads(codec: str) -> None:
    """A damaged payload is refused or decodes to something, as on the CPU; it never brings the device down."""
    numel = 9000
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1)) * 1e-3
    x[::5] = 0
    floor = torch.full((numel,), -13, dtype=torch.int8)
    frame = parse(codec).encode(x, Context(floor=floor))
    positions = torch.randint(24, frame.numel(), (200,), generator=torch.Generator().manual_seed(2)).tolist()
    for at in positions:
        damaged = frame.clone()
        damaged[at] ^= 1 << at % 8
        results = []
        for device in ("cpu", "cuda"):
            try:
                back = parse(codec).decode(damaged.to(device), Context(floor=floor.to(device)))
                results.append(back.cpu().view(torch.int32).tolist())
            except CodecError:
                results.append(None)
        assert results[0] == results[1], f"byte {at}"


@pytest.mark.gpu
def test_outputs_at_odd_addresses() -> None:
    x = torch.randn(10_000, device="cuda")
    codec = parse("gcomp:mode=lossless")
    room = torch.empty(codec.bound(x.numel(), x.dtype) + 3, dtype=torch.uint8, device="cuda")
    frame = codec.encode(x, out=room[3:])
    assert torch.equal(frame, codec.encode(x))
    assert torch.equal(codec.decode(frame), x)

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
from gradzip.errors import EngineError

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

"""Runs the GPU kernels in Triton's interpreter against the reference engine; `test_gpu_engine.py` starts it.

A process of its own, because Triton looks at TRITON_INTERPRET when it is imported. Prints one line per case.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "1"

import torch

from gradzip import engines
from gradzip.codecs import Context, parse
from gradzip.engines.layout import Floor
from gradzip.errors import CodecError

Case = tuple[str, str, torch.Tensor, Context]


def gradients(numel: int, zeros: float = 0.1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator) * 1e-3 * torch.exp(torch.randn(numel, generator=generator))
    return torch.where(torch.rand(numel, generator=generator) < zeros, 0.0, x)


def floors(numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel + 1)
    f = torch.randint(-25, -8, (numel,), generator=generator)
    f[::17] = -128
    return f.to(torch.int8)


def cases() -> Iterator[Case]:
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-42, 3.4e38, -3.4e38, 1.0, -2.5])
    odd = torch.cat([special, gradients(190)])
    for codec in ("gcomp:mode=lossless", "gcomp:keep=7", "gcomp:keep=5", "gcomp:keep=0", "gcomp:keep=3,round=truncate"):
        yield "special values", codec, odd, Context()
    for codec in ("gcomp", "gcomp:mode=paper"):
        yield "special values", codec, odd, Context(floor=floors(odd.numel()))
        yield "a block and a bit", codec, gradients(4100), Context(floor=floors(4100))
    for codec in ("gcomp:mode=lossless", "gcomp:keep=7"):
        yield "a full block without zeros", codec, gradients(4096, 0.0), Context()
    high = torch.tensor([127, 104, 103, -128], dtype=torch.int8).repeat(50)
    yield "floors at the upper end", "gcomp", torch.cat([odd[:10], gradients(190) * 2.0**110]), Context(floor=high)
    theta, second = gradients(300, 0.02) * 50, gradients(300).abs() * 1e-6
    yield "floors from theta", "gcomp", gradients(300), Context(floor=Floor(theta, None, -140))
    yield "floors from both moments", "gcomp", gradients(300), Context(floor=Floor(theta, second, -150, 3, 40), shift=2)
    coarse = torch.full((4096,), -11, dtype=torch.int8)
    yield "sparse", "gcomp", gradients(4096, 0.97), Context(floor=coarse)
    yield "all zero", "gcomp:mode=lossless", torch.zeros(4096), Context()
    yield "one exponent", "gcomp:mode=lossless", torch.ones(700), Context()
    noise = torch.randint(-(2**31), 2**31 - 1, (600,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    yield "incompressible", "gcomp:mode=lossless", noise.view(torch.float32), Context()
    yield "escapes", "gcomp:mode=lossless,limit=2", gradients(500), Context()
    yield "shared book", "gcomp:mode=lossless,book=shared", gradients(500), Context()
    yield "bf16 in float32", "gcomp:mode=lossless", gradients(500).bfloat16().float(), Context()
    for dtype in (torch.bfloat16, torch.float16):
        yield str(dtype), "gcomp:mode=lossless", gradients(300).to(dtype), Context()
    for numel in (0, 1, 31, 33):
        yield f"{numel} values", "gcomp:mode=lossless", gradients(numel), Context()


def outcome(engine: str, codec: str, payload: torch.Tensor, context: Context) -> bytes | None:
    """The decoded bytes; None if the payload was refused."""
    with engines.use(engine):
        try:
            return parse(codec).decode(payload, context).view(torch.uint8).numpy().tobytes()
        except CodecError:
            return None


def main() -> int:
    engine = engines.load("triton")
    assert engine.NAME == "triton"
    failed = 0
    for name, codec, x, context in cases():
        frames = {}
        for which in ("reference", "triton"):
            with engines.use(which):
                frames[which] = parse(codec).encode(x, context)
        same = torch.equal(frames["reference"], frames["triton"])
        expected = outcome("reference", codec, frames["reference"], context)
        good = same and outcome("triton", codec, frames["reference"], context) == expected
        if x.dtype == torch.float32:
            total = torch.arange(x.numel(), dtype=torch.float32)
            with engines.use("triton"):
                parse(codec).decode(frames["reference"], context, out=total, add=True)
            with engines.use("reference"):
                plain = torch.arange(x.numel(), dtype=torch.float32) + parse(codec).decode(frames["reference"], context)
            good = good and torch.equal(total.view(torch.int32), plain.view(torch.int32))
        failed += not good
        print(f"{'ok' if good else 'FAILED'}: {codec}, {name}")
    x, context = gradients(100), Context(floor=floors(100))
    for codec in ("gcomp:mode=lossless", "gcomp"):
        with engines.use("reference"):
            frame = parse(codec).encode(x, context)
        for at in range(24, frame.numel(), 7):
            damaged = frame.clone()
            damaged[at] ^= 1 << at % 8
            good = outcome("triton", codec, damaged, context) == outcome("reference", codec, damaged, context)
            failed += not good
            if not good:
                print(f"FAILED: {codec}, damaged at byte {at}")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 100))

"""How long the kernels of the codec noise take on a GPU, one by one: 25 MiB and 1 GiB of float32.

    python bench/noise_kernels.py                 all of it
    python bench/noise_kernels.py --values 6553600 --once    one run, for a profiler

Every size is verified first: what is decoded lies within one level of what was encoded. Times are medians of GPU
events, with the L2 cache flushed in between, and of the host's clock for what a call costs the host.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from gradzip.engines import noise_layout as layout
from gradzip.engines.cuda import launch, noise, noise_message
from gradzip.engines.cuda.noise import Decoder, Encoder, Geometry, Measurer
from gradzip.engines.cuda.noise_message import Layout, NoiseKernels
from gradzip.exchange.parts import Table
from gradzip.wire import HEADER_BYTES

WORLD = 4
DEVICE = torch.device("cuda")


def tensors_of(values: int) -> list[torch.Tensor]:
    """Tensors of different scales, one behind the other like in a bucket."""
    sizes, left = list[int](), values
    while left:
        sizes.append(min(left, 2_359_296 if len(sizes) % 4 == 0 else 589_824 if len(sizes) % 4 < 3 else 512))
        left -= sizes[-1]
    flat = torch.randn(values, device=DEVICE)
    parts = list(flat.split(sizes))
    for number, part in enumerate(parts):
        part *= 10.0 ** -(number % 5)
    return parts


class Codec:
    """All frames of a message, encoded and decoded by one rank."""

    def __init__(self, values: int, share: float, dtype: torch.dtype = torch.float32) -> None:
        self.tensors = [tensor.to(dtype) for tensor in tensors_of(values)]
        self.out = [torch.full_like(tensor, 7.0) for tensor in self.tensors]
        names = [f"t{number}" for number in range(len(self.tensors))]
        table = Table.of(names, [tensor.numel() for tensor in self.tensors], [WORLD])
        columns = table.columns()
        counts = [[part.numel for part in table.of_owner(owner)] for owner in range(WORLD)]
        slot = max(noise_message.slot_for(count, 7.0 if share >= 0.01 else 14.0) for count in counts)
        self.slots = torch.zeros(WORLD * slot, dtype=torch.uint8, device=DEVICE)
        geometry = Geometry(counts)
        geometry.frames["slot"] = self.slots.data_ptr() + np.arange(WORLD) * slot
        geometry.frames["room"] = slot
        keys = [layout.name_key(1, name, "own", 0) for name in names]

        def rows(tensors: list[torch.Tensor]) -> np.ndarray:
            message = Layout(
                tensors, columns.tensor, columns.start, columns.length, columns.owner, WORLD, 0, keys, keys
            )
            found = message.rows(np.ones(len(columns.tensor), np.bool_), keys)
            found["place"] = geometry.places
            return found

        self.levels = torch.zeros(len(names), 2, device=DEVICE)
        nothing = [None] * len(names)
        factor = share * (6.0 * WORLD / (WORLD + 1))
        self.measurer = Measurer(self.tensors, nothing, factor, self.levels)
        self.encoder = Encoder(DEVICE, dtype, geometry, rows(self.tensors), self.levels, HEADER_BYTES, 9, 0)
        self.status = torch.zeros(WORLD, dtype=torch.int32, device=DEVICE)
        self.decoder = Decoder(DEVICE, dtype, geometry, rows(self.out), HEADER_BYTES, 9, 1, self.status)
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)
        self.values = values

    def encode(self) -> None:
        self.measurer.run(3)
        self.encoder.run(3)

    def decode(self) -> None:
        self.decoder.run(3)

    def verify(self) -> float:
        """Bits a value; raises where something is wrong."""
        self.encode()
        self.decode()
        assert not bool(self.status.any()), self.status
        results = self.encoder.results.cpu().numpy().view(noise.RESULT)
        assert not results["notch"].any()
        assert not results["poisoned"].any()
        for tensor, out, level in zip(self.tensors, self.out, self.levels[:, 0].tolist()):
            worst = float((out.float() - tensor.float()).abs().max())
            assert worst <= level * 1.01 + 1e-2 * (tensor.dtype != torch.float32), (worst, level)
            found = float((out.float() - tensor.float()).double().square().mean()) / level**2
            assert tensor.numel() < 100_000 or 0.15 < found < 0.18, found  # unbiased rounding: 1/6
        return 8.0 * int(results["bytes"].sum()) / self.values


_flush = torch.empty(64 << 20, device=DEVICE)


def gpu_time(call: Callable[[], object], runs: int = 15) -> float:
    """Seconds."""
    found = []
    for _ in range(runs + 3):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        _flush.fill_(1.0)
        _flush.mul_(1.0)
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last) / 1e3)
    return statistics.median(found[3:])


def host_time(call: Callable[[], None], runs: int = 200) -> float:
    found = []
    for _ in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(found)


def report(values: int, share: float, dtype: torch.dtype = torch.float32) -> None:
    codec = Codec(values, share, dtype)
    bits = codec.verify()
    size = codec.bytes
    encode, decode = gpu_time(codec.encode), gpu_time(codec.decode)
    kind = str(dtype).removeprefix("torch.")
    print(f"{size / 2**20:7.0f} MiB {kind} share {share:g}: {bits:.3f} bits")
    for name, took in ("encode", encode), ("decode", decode):
        print(f"            {name:16s} {took * 1e6:8.1f} us {size / took / 1e9:6.0f} GB/s")
    calls: list[tuple[str, Callable[[int], None]]] = [("measure", codec.measurer.run)]
    calls += zip(("encode", "coarsen", "place"), codec.encoder.calls)
    calls += zip(("open", "decode"), codec.decoder.calls)
    for name, call in calls:
        print(f"              {name:14s} {gpu_time(partial(call, 3)) * 1e6:8.1f} us")
    host = host_time(codec.encode), host_time(codec.decode)
    print(f"            host: encode {host[0] * 1e6:.0f} us, decode {host[1] * 1e6:.0f} us", flush=True)


def message(values: int) -> None:
    tensors = tensors_of(values)
    names = [f"t{number}" for number in range(len(tensors))]
    table = Table.of(names, [tensor.numel() for tensor in tensors], [WORLD])
    c = table.columns()
    keys = [layout.name_key(1, name, "own", 0) for name in names]
    counts = [[part.numel for part in table.of_owner(owner)] for owner in range(WORLD)]
    slot = max(noise_message.slot_for(count, 6.0) for count in counts)
    start = time.perf_counter()
    one = NoiseKernels(Layout(tensors, c.tensor, c.start, c.length, c.owner, WORLD, 0, keys, keys), 0.01, slot, slot)
    other = NoiseKernels(Layout(tensors, c.tensor, c.start, c.length, c.owner, WORLD, 1, keys, keys), 0.01, slot, slot)
    torch.cuda.synchronize()
    made = time.perf_counter() - start
    one.encode(3)
    other.encode(3)
    for peer in range(1, WORLD):
        one.received[peer * slot : (peer + 1) * slot] = other.sent[:slot]
    one.reduce(3)
    assert not bool(one.status.any()), one.status
    for owner in range(WORLD):  # frames of other owners are missing: those of this one stand for them in the timing
        one.gathered[owner * slot : (owner + 1) * slot] = one.sum_frame
    print(
        f"message of {4 * values / 2**20:.0f} MiB, {len(tensors)} tensors, {WORLD} ranks; made in {made * 500:.1f} ms"
    )
    for name, call in ("encode", one.encode), ("reduce", one.reduce), ("decode", one.decode):
        run = partial(call, 3)
        print(f"            {name:16s} {gpu_time(run) * 1e6:8.1f} us, host {host_time(run) * 1e6:.0f} us", flush=True)


def variants(values: int) -> None:
    """Registers against groups at once."""
    for least in (4, 6, 8, 10):
        launch.load_once.cache_clear()
        noise._FEW_ENCODERS = least
        codec = Codec(values, 0.01)
        codec.verify()
        resident = codec.encoder.calls[0].resident
        took = gpu_time(partial(codec.encoder.calls[0], 3))
        print(f"encode, at least {least} groups a multiprocessor: {took * 1e6:.1f} us, {resident / 132:.1f} at once")


def copy_time() -> float:
    one, other = torch.empty(1 << 28, device=DEVICE), torch.empty(1 << 28, device=DEVICE)
    return gpu_time(lambda: one.copy_(other))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--values", type=int)
    parser.add_argument("--once", action="store_true")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    if chosen.once:
        codec = Codec(chosen.values, 0.01)
        codec.encode()
        codec.decode()
        torch.cuda.synchronize()
        return
    took = copy_time()
    print(f"copy of 1 GiB: {2 * 2**30 / took / 1e9:.0f} GB/s read and written", flush=True)
    for values in [chosen.values] if chosen.values else [6_553_600, 1 << 28]:
        report(values, 0.01)
    if chosen.values:
        return
    report(6_553_600, 0.1)
    report(6_553_600, 0.0003)
    report(6_553_600, 0.01, torch.bfloat16)
    message(6_553_600)
    variants(1 << 27)


if __name__ == "__main__":
    main()

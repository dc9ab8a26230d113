"""How long the kernels of the codec noise take on a GPU, one by one: 25 MiB, 256 MiB and 1 GiB of float32.

    python bench/noise_kernels.py --csv bench/results/noise_gpu.csv    all of it, half a minute on an H200
    python bench/noise_kernels.py --variants      registers against groups at once, instead
    python bench/noise_kernels.py --values 6553600 --once    one run, for a profiler

Every size is verified first: frames have the bytes of the native engine's, and what is decoded the bits. Times are
medians of GPU events, with the L2 cache flushed in between, and of the host's clock for what a call costs the host.
A line for each kernel follows its total.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from gradzip.engines import native_noise
from gradzip.engines import noise_layout as layout
from gradzip.engines.cuda import launch, noise, noise_message
from gradzip.engines.cuda.noise import Decoder, Encoder, Geometry, Measurer
from gradzip.engines.cuda.noise_message import Layout, NoiseKernels
from gradzip.engines.noise_layout import Part, Slot
from gradzip.exchange.parts import Table
from gradzip.wire import HEADER_BYTES

WORLD, STEP, DIGEST = 4, 3, 9
BUCKET = 6_553_600  # values of DDP's bucket of 25 MiB
CASES = (
    *((values, 0.01, torch.float32) for values in (BUCKET, 1 << 26, 1 << 28)),
    *((BUCKET, share, torch.float32) for share in (0.1, 0.0003)),
    (BUCKET, 0.01, torch.bfloat16),
)
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
        self.names, self.table, self.share = names, table, share
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
        self.encoder = Encoder(DEVICE, dtype, geometry, rows(self.tensors), self.levels, HEADER_BYTES, DIGEST, 0)
        self.status = torch.zeros(WORLD, dtype=torch.int32, device=DEVICE)
        self.decoder = Decoder(DEVICE, dtype, geometry, rows(self.out), HEADER_BYTES, DIGEST, 1, self.status)
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)
        self.values = values

    def encode(self) -> None:
        self.measurer.run(STEP)
        self.encoder.run(STEP)

    def decode(self) -> None:
        self.decoder.run(STEP)

    def verify(self) -> float:
        """Bits a value; raises where a frame or a value differs from the native engine's."""
        self.encode()
        self.decode()
        assert not bool(self.status.any()), self.status
        results = self.encoder.results.cpu().numpy().view(noise.RESULT)
        sources, found = ([x.cpu().float() for x in tensors] for tensors in (self.tensors, self.out))
        levels = [
            layout.level(statistics, self.share, WORLD)
            for statistics in native_noise.statistics_of([Part(x) for x in sources])
        ]
        assert levels == self.levels[:, 0].tolist()
        for owner, frame in enumerate(self.slots.view(WORLD, -1).cpu()):
            parts = self.table.of_owner(owner)
            keys = [layout.key_of(1, STEP, self.names[part.tensor], "own", 0) for part in parts]
            own = [
                Part(sources[part.tensor][part.start : part.stop], levels[part.tensor], None, part.start, key)
                for part, key in zip(parts, keys)
            ]
            slot = Slot(own, torch.zeros_like(frame))
            (written,) = native_noise.encode_frames([slot], STEP, DIGEST)
            assert (written.size, 0, False) == tuple(results[owner].tolist()), (written, results[owner])
            assert torch.equal(frame[: written.size], slot.out[: written.size]), f"frame {owner} differs"
            decoded = [Part(torch.empty(part.numel)) for part in parts]
            native_noise.decode_frame(slot.out, decoded, STEP, DIGEST)
            for part, one in zip(parts, decoded):
                values = one.values.to(self.tensors[0].dtype).float()
                assert torch.equal(values, found[part.tensor][part.start : part.stop]), f"part {part} differs"
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


def host_time(call: Callable[[], None], runs: int = 50) -> float:
    found = []
    for _ in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(found)


Call = Callable[[int], None]
COLUMNS = ("of", "MiB", "dtype", "share", "bits", "what", "kernel", "us", "GB_per_s", "host_us")


class Report:
    """Lines that are printed, and rows of a file."""

    def __init__(self, of: str, size: int, dtype: torch.dtype, share: float, bits: float) -> None:
        kind = str(dtype).removeprefix("torch.")
        self._size, self._head = size, [of, round(size / 2**20), kind, share, round(bits, 3)]
        self.rows: list[list[object]] = []
        print(f"{size / 2**20:7.0f} MiB {kind} share {share:g}, {of}: {bits:.3f} bits", flush=True)

    def time(self, what: str, run: Callable[[], None], kernels: str, calls: Sequence[Call]) -> None:
        self._line(what, "", gpu_time(run), host_time(run))
        for kernel, call in zip(kernels.split(), calls, strict=True):
            self._line(what, kernel, gpu_time(partial(call, STEP)))

    def _line(self, what: str, kernel: str, took: float, host: float | None = None) -> None:
        speed, by_host = self._size / took / 1e9, "" if host is None else f", host {host * 1e6:.0f} us"
        indent = " " * (12 if host is not None else 14)
        print(f"{indent}{kernel or what:16s} {took * 1e6:8.1f} us {speed:6.0f} GB/s{by_host}", flush=True)
        told = "" if host is None else round(host * 1e6)
        self.rows.append([*self._head, what, kernel, round(took * 1e6, 1), round(speed), told])


def report(values: int, share: float, dtype: torch.dtype = torch.float32) -> list[list[object]]:
    codec = Codec(values, share, dtype)
    found = Report("frames of one rank", codec.bytes, dtype, share, codec.verify())
    encode: list[Call] = [codec.measurer.run, *codec.encoder.calls]
    found.time("encode", codec.encode, "measure encode coarsen place", encode)
    found.time("decode", codec.decode, "open decode", codec.decoder.calls)
    return found.rows


def message(values: int) -> list[list[object]]:
    tensors = tensors_of(values)
    names = [f"t{number}" for number in range(len(tensors))]
    table = Table.of(names, [tensor.numel() for tensor in tensors], [WORLD])
    c = table.columns()
    keys = [layout.name_key(1, name, "own", 0) for name in names]
    counts = [[part.numel for part in table.of_owner(owner)] for owner in range(WORLD)]
    slot = max(noise_message.slot_for(count, 6.0) for count in counts)
    one = NoiseKernels(Layout(tensors, c.tensor, c.start, c.length, c.owner, WORLD, 0, keys, keys), 0.01, slot, slot)
    other = NoiseKernels(Layout(tensors, c.tensor, c.start, c.length, c.owner, WORLD, 1, keys, keys), 0.01, slot, slot)
    one.encode(STEP)
    other.encode(STEP)
    for peer in range(1, WORLD):
        one.received[peer * slot : (peer + 1) * slot] = other.sent[:slot]
    one.reduce(STEP)
    assert not bool(one.status.any()), one.status
    for owner in range(WORLD):  # frames of other owners are missing: those of this one stand for them in the timing
        one.gathered[owner * slot : (owner + 1) * slot] = one.sum_frame
    sent = one.own_results.cpu().numpy().view(noise.RESULT)["bytes"].sum()
    bits = 8.0 * int(sent) / (values * (WORLD - 1) / WORLD)
    found = Report(f"a message of {len(tensors)} tensors and {WORLD} ranks", 4 * values, torch.float32, 0.01, bits)
    for name, stage, kernels in (
        ("encode", one.encode, "measure encode coarsen place"),
        ("reduce", one.reduce, "open add encode coarsen place"),
        ("decode", one.decode, "open decode"),
    ):
        found.time(name, partial(stage, STEP), kernels, stage.calls)
    return found.rows


def variants(values: int) -> None:
    """Registers against groups at once."""
    for kernel, choices in ("noise_encode", (7, 8, 9, 10, 12)), ("noise_decode", (6, 8, 10, 12, 14, 16)):
        usual = noise.GROUPS[kernel]
        for least in choices:
            launch.load_once.cache_clear()
            noise.GROUPS[kernel] = least
            codec = Codec(values, 0.01)
            codec.encode()
            call = codec.encoder.calls[0] if kernel == "noise_encode" else codec.decoder.calls[1]
            codec.decode()
            took = gpu_time(partial(call, STEP))
            at_once = call.resident / torch.cuda.get_device_properties(DEVICE).multi_processor_count
            print(
                f"{kernel}, at least {least} groups a multiprocessor: {took * 1e6:.1f} us, {at_once:.0f} at once",
                flush=True,
            )
        noise.GROUPS[kernel] = usual


def copy_time() -> float:
    one, other = torch.empty(1 << 28, device=DEVICE), torch.empty(1 << 28, device=DEVICE)
    return gpu_time(lambda: one.copy_(other))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--values", type=int)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--csv", type=Path)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    if chosen.once:
        codec = Codec(chosen.values, 0.01)
        codec.encode()
        codec.decode()
        torch.cuda.synchronize()
        return
    if chosen.variants:
        return variants(chosen.values or 1 << 26)
    took = copy_time()
    print(f"copy of 1 GiB: {2 * 2**30 / took / 1e9:.0f} GB/s read and written", flush=True)
    rows = [row for values in [chosen.values] if values for row in report(values, 0.01)]
    if not rows:
        for values, share, dtype in CASES:
            rows += report(values, share, dtype)
        rows += message(BUCKET) + message(1 << 26)
    if chosen.csv:
        with chosen.csv.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


if __name__ == "__main__":
    main()

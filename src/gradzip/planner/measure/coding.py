"""What codecs cost and save on real gradients: the real codecs, at the sizes of chunks, on all ranks at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ... import sensitivity
from ...codecs import Codec, Context, parse
from ...codecs.gcomp import GComp
from ...codecs.sparse import SparseFrame
from ...collectives import flatten
from ...engines.layout import Floor
from ...errors import GradzipError
from ...feedback import clean_name
from ..profile import CodecCost, Curve

SIZES = (16 << 10, 256 << 10, 1 << 20, 4 << 20)  # bytes
ROUNDS = 3
LEAST_SECONDS = 0.01  # that a measurement lasts
COPY_SIZES = (64 << 10, 1 << 20, 16 << 20)

Gradient = tuple[str, torch.Tensor, torch.Tensor]  # name, parameter, gradient


def measure_codecs(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    texts: Sequence[str],
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, CodecCost]:
    """Costs by the codecs' text forms; one that cannot code these gradients is left out, and said."""
    gradients = [(clean_name(n), p, p.grad) for n, p in model.named_parameters() if p.grad is not None]
    costs = {}
    for text in texts:
        codec = parse(text)
        dist.barrier(model.process_group)  # all ranks code at the same time, as they will
        try:
            costs[str(codec)] = _cost(codec, gradients, optimizer)
        except GradzipError as error:
            say(f"{codec} is left out: {error}")
    return costs


def _cost(codec: Codec, gradients: Sequence[Gradient], optimizer: torch.optim.Optimizer) -> CodecCost:
    own = {g.device.type for _, _, g in gradients}
    with torch.no_grad():
        if codec.rounds > 1:
            return _low_rank(codec, gradients)
        floors = _floors(codec, optimizer)
        ratios = _ratios(codec, gradients, floors)
        devices = ("cpu", "gpu") if own == {"cuda"} else ("cpu",)
        encode, decode = {}, {}
        name, parameter, gradient = max(gradients, key=lambda item: item[2].numel())
        for device in devices:
            place = torch.device("cpu") if device == "cpu" else gradient.device
            flat, floor = flatten(gradient, parameter).to(place), _moved(floors.get(parameter), place)
            encode[device], decode[device] = _curves(codec, name, flat, floor)
    raw = sum(g.numel() * g.element_size() for _, _, g in gradients)
    payload = sum(g.numel() * g.element_size() / ratios[n] for n, _, g in gradients)
    return CodecCost(codec, raw / payload, encode, decode, ratios, grows=isinstance(codec, SparseFrame))


def _floors(codec: Codec, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, Any]:
    """Near mode needs to know what the optimizer can feel."""
    if isinstance(codec, GComp) and codec.mode == "near":
        return dict(sensitivity.rules(optimizer, codec.ulps, 1.0))
    if isinstance(codec, GComp) and codec.mode == "paper":
        return {p: flatten(r, p) for p, r in sensitivity.reaches(optimizer, 1.0).items()}
    return {}


def _moved(floor: Any, place: torch.device) -> Any:
    if isinstance(floor, torch.Tensor):
        return floor.to(place)
    if isinstance(floor, Floor) and floor.theta.device != place:
        second = None if floor.second is None else floor.second.to(place)
        return Floor(floor.theta.to(place), second, floor.c0, floor.c1, floor.c2)
    return floor


def _ratios(codec: Codec, gradients: Sequence[Gradient], floors: dict[torch.Tensor, Any]) -> dict[str, float]:
    found = {}
    for name, parameter, gradient in gradients:
        flat = flatten(gradient, parameter)
        frame = codec.encode(flat, Context(name, floor=floors.get(parameter)))
        found[name] = flat.numel() * flat.element_size() / frame.numel()
    return found


def _curves(codec: Codec, name: str, flat: torch.Tensor, floor: Any) -> tuple[Curve, Curve]:
    encode, decode = [], []
    for size in SIZES:
        count = min(size // flat.element_size(), flat.numel())
        part, own_floor = flat[:count].contiguous(), None if floor is None else floor[:count]
        ctx = Context(name, floor=own_floor)
        room = torch.empty(codec.bound(count, part.dtype), dtype=torch.uint8, device=part.device)
        frame = codec.encode(part, ctx, room)
        out = torch.zeros_like(part)
        codec.decode(frame, ctx, out)
        bytes_coded = count * flat.element_size()
        encode.append((float(bytes_coded), _time(lambda: _encode(codec, part, ctx, room), flat.device)))  # noqa: B023
        decode.append((float(bytes_coded), _time(lambda: codec.decode(frame, ctx, out, True), flat.device)))  # noqa: B023
        if count == flat.numel():
            break
    return Curve(tuple(encode)), Curve(tuple(decode))


def _encode(codec: Codec, values: torch.Tensor, ctx: Context, room: torch.Tensor) -> None:
    """As the runtime does it: with error feedback what was lost before is added, and what is lost now is kept."""
    if codec.error_memory is None:
        codec.encode(values, ctx, room)
        return
    compensated = values + values
    frame = codec.encode(compensated, ctx, room)
    compensated.clone().sub_(codec.decode(frame, ctx))


def _low_rank(codec: Codec, gradients: Sequence[Gradient]) -> CodecCost:
    """All rounds together, without the averages; a third of it is charged before, between and after them."""
    device = "gpu" if gradients[0][2].is_cuda else "cpu"
    ratios, points = {}, []
    for name, _, gradient in gradients:
        sent = 0

        def count(flat: torch.Tensor) -> None:
            nonlocal sent
            sent += flat.numel() * flat.element_size()

        ctx = Context(name)
        codec.reduce([gradient.clone()], [ctx], count)
        size = gradient.numel() * gradient.element_size()
        ratios[name] = size / max(sent, 1)
        if gradient.dim() > 1 and size >= SIZES[0]:
            seconds = _time(lambda: codec.reduce([gradient], [ctx], lambda flat: None), gradient.device)  # noqa: B023
            points.append((float(size), seconds))
    curve = Curve(tuple(points) or ((1.0, 0.0),))
    raw = sum(g.numel() * g.element_size() for _, _, g in gradients)
    payload = sum(g.numel() * g.element_size() / ratios[n] for n, _, g in gradients)
    return CodecCost(codec, raw / payload, {device: curve}, {device: curve}, ratios)


def measure_copies(device: torch.device) -> dict[str, Curve]:
    """Between the GPU and pinned memory of the host; nothing where there is no GPU."""
    if device.type != "cuda":
        return {}
    up, down = [], []
    for size in COPY_SIZES:
        here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(size, dtype=torch.uint8, device=device)
        up.append((float(size), _time(lambda: there.copy_(here, non_blocking=True), device)))  # noqa: B023
        down.append((float(size), _time(lambda: here.copy_(there, non_blocking=True), device)))  # noqa: B023
    return {"host_to_device": Curve(tuple(up)), "device_to_host": Curve(tuple(down))}


def _time(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call: the median of some rounds, each long enough to be timed."""
    work()
    calls, times = 1, list[float]()
    while len(times) < ROUNDS:
        _finish(device)
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        _finish(device)
        passed = time.perf_counter() - begin
        if passed < LEAST_SECONDS and calls < 4096:
            calls *= 2
            continue
        times.append(passed / calls)
    return statistics.median(times)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

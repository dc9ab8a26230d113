"""What codecs cost and save on real gradients: messages that the host runner takes, on all ranks at once.

What a rank sends first is its own gradient, before it is averaged; what it sends then is a mean. These may differ much:
of gradients from BF16 arithmetic half of the bits are 0, of their mean none.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ... import sensitivity, wire
from ...codecs import Codec, Context, parse
from ...codecs.gcomp import GComp
from ...codecs.sparse import SparseFrame
from ...engines.layout import Floor
from ...errors import GradzipError, Unsupported
from ...exchange.coding import MessageCodec
from ...exchange.flattening import flatten
from ...exchange.message_codecs import fills_frames
from ...feedback import clean_name
from ..profile import CodecCost, Curve
from . import rounds
from .mirror import ROUNDS_ON_GPU, STEP, Stand
from .noise import Shapes, as_sent

SIZES = (1 << 12, 1 << 16, MessageCodec.chunk)  # values that each rank gets of a chunk
SIZES_ON_GPU = (*SIZES, 2 * MessageCodec.chunk)  # it takes more to tell what a GPU codes from what it is told
MOST = max(SIZES_ON_GPU)
MANY, SMALL = 16, 1 << 10  # tensors of a chunk that has many, and the values of each that a rank gets
_FRAMES_AT_MOST = 0.9  # of a message's time is that of frames: noise must not make values cost nothing
COPY_SIZES = (64 << 10, 1 << 20, 16 << 20)

Gradient = tuple[str, torch.Tensor, torch.Tensor]  # name, parameter, gradient


def measure_codecs(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    texts: Sequence[str],
    say: Callable[[str], None] = lambda text: None,
    own: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, CodecCost]:
    """Costs by the codecs' text forms; one that cannot code these gradients is left out, and said.

    `own` are this rank's gradients before they were averaged, as far as they are known.
    """
    means = [(clean_name(n), p, p.grad) for n, p in model.named_parameters() if p.grad is not None]
    gradients = [(name, p, (own or {}).get(name, mean)) for name, p, mean in means]
    world = dist.get_world_size(model.process_group)
    costs = {}
    for text in texts:
        codec = parse(text)
        dist.barrier(model.process_group)  # all ranks code at the same time, as they will
        try:
            costs[str(codec)] = _cost(codec, gradients, optimizer, world, means if own else ())
        except GradzipError as error:
            say(f"{codec} is left out: {error}")
    return costs


def _cost(
    codec: Codec,
    gradients: Sequence[Gradient],
    optimizer: torch.optim.Optimizer,
    world: int,
    means: Sequence[Gradient] = (),
) -> CodecCost:
    own = {g.device.type for _, _, g in gradients}
    with torch.no_grad():
        if codec.rounds > 1:
            return _low_rank(codec, gradients, world)
        if fills_frames(codec):
            return _of_messages(codec, gradients, optimizer, world, means)
        floors = _floors(codec, optimizer)
        ratios = _ratios(codec, gradients, floors, own=True)
        sums = {} if codec.fixed_size else _ratios(codec, means, floors)
        encode, decode = {}, {}
        name, parameter, gradient = max(gradients, key=lambda item: item[2].numel())
        for device in ("cpu", "gpu") if own == {"cuda"} else ("cpu",):
            place = torch.device("cpu") if device == "cpu" else gradient.device
            flat, floor = flatten(gradient, parameter)[:MOST].to(place), floors.get(parameter)
            floor = None if floor is None else floor[:MOST].to(place)
            encode[device], decode[device] = _curves(Stand(codec, device, place, world), name, flat, floor)
    return CodecCost(codec, _overall(gradients, ratios), encode, decode, ratios, isinstance(codec, SparseFrame), sums)


def _overall(gradients: Sequence[Gradient], ratios: Mapping[str, float]) -> float:
    raw = sum(g.numel() * g.element_size() for _, _, g in gradients)
    return raw / sum(g.numel() * g.element_size() / ratios[n] for n, _, g in gradients)


def _of_messages(
    codec: Codec,
    gradients: Sequence[Gradient],
    optimizer: torch.optim.Optimizer,
    world: int,
    means: Sequence[Gradient],
) -> CodecCost:
    """A codec that codes whole messages. What the headers of its frames take, a message has once."""
    if any(g.is_cuda for _, _, g in gradients):
        raise Unsupported("it goes by streams on a GPU, and what it costs there is not measured yet")
    ratios, sums = dict[str, float](), dict[str, float]()
    average = {name: mean for name, _, mean in means}
    shapes = Shapes(optimizer, {parameter: name for name, parameter, _ in gradients})
    for name, parameter, gradient in gradients:
        own, mean = (flatten(x, parameter) for x in (gradient, average.get(name, gradient)))
        context = Context(name, world=world, shape=shapes.of([name])[0])
        for found, sent, values in zip((ratios, sums), as_sent(codec, own, mean, world), (own, mean)):
            size = sent.encode(values, context).numel() - wire.HEADER_BYTES
            found[name] = values.numel() * values.element_size() / max(size, 1)
    name, parameter, gradient = max(gradients, key=lambda item: item[2].numel())
    flat, shape = flatten(gradient, parameter)[:MOST], shapes.of([name])[0]
    encode, decode = _curves(Stand(codec, "cpu", flat.device, world), name, flat, None, shape)
    each = shapes.seconds_per_value / gradient.element_size()  # all shapes are renewed before the first encode
    encode = Curve(tuple((size, seconds + each * size) for size, seconds in encode.points), encode.frame_s)
    return CodecCost(codec, _overall(gradients, ratios), {"cpu": encode}, {"cpu": decode}, ratios, False, sums)


def _floors(codec: Codec, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, Any]:
    """Near mode needs to know what the optimizer can feel."""
    if isinstance(codec, GComp) and codec.mode == "near":
        return dict(sensitivity.rules(optimizer, codec.ulps, 1.0))
    if isinstance(codec, GComp) and codec.mode == "paper":
        return {p: flatten(r, p) for p, r in sensitivity.reaches(optimizer, 1.0).items()}
    return {}


def _repeated(floor: Any, values: int, times: int) -> Any:
    """The floors of the first values, so many times."""
    if isinstance(floor, Floor):
        second = None if floor.second is None else floor.second[:values].repeat(times)
        return dataclasses.replace(floor, theta=floor.theta[:values].repeat(times), second=second)
    return None if floor is None else floor[:values].repeat(times)


def _ratios(
    codec: Codec, gradients: Sequence[Gradient], floors: dict[torch.Tensor, Any], own: bool = False
) -> dict[str, float]:
    found = {}
    for name, parameter, gradient in gradients:
        flat, context = flatten(gradient, parameter), Context(name, floor=floors.get(parameter))
        used = codec.for_own(flat, context) if own and isinstance(codec, GComp) else codec
        frame = used.encode(flat, context)
        found[name] = flat.numel() * flat.element_size() / frame.numel()
    return found


# -- through the runner ------------------------------------------------------------------------------------------------


def _curves(
    stand: Stand, name: str, flat: torch.Tensor, floor: Any, shape: torch.Tensor | None = None
) -> tuple[Curve, Curve]:
    """Encoding is the first stage of a message, decoding the last one."""
    world = stand.world

    def stages(values: int, tensors: int) -> tuple[float, float]:
        """So many tensors, of which each rank gets so many values: the same ones, or the mirror would be wrong."""
        whole, floors = _filled(flat, values).repeat(world), _repeated(floor, values, world)
        shapes = None if shape is None else _filled(shape, values).repeat(world)
        contexts = [Context(f"{name} {i}", STEP, world=world, floor=floors, shape=shapes) for i in range(tensors)]
        first, *_, last = stand.stages([whole] * tensors, contexts)
        return first, last / stand.contributions

    there_are = max(flat.numel() // stand.grain, 1) * stand.grain
    sizes = sorted({min(size, there_are) for size in (SIZES_ON_GPU if flat.is_cuda else SIZES)})
    single = [stages(size, 1) for size in sizes]
    small = min(SMALL, there_are)
    many = stages(small, MANY)
    frames = world if stand.contributions == 1 else 1  # of a tensor
    curves = []
    for number, times in enumerate(zip(*single)):
        points = [(float(size * world * flat.element_size()), seconds) for size, seconds in zip(sizes, times)]
        together = Curve(tuple(points)).line.at(MANY * small * world * flat.element_size())
        frame_s = max(0.0, many[number] - together) / (frames * (MANY - 1))
        frame_s = min(frame_s, _FRAMES_AT_MOST * min(times) / frames)
        curves.append(Curve(tuple((size, t - frames * frame_s) for size, t in points), frame_s))
    return curves[0], curves[1]


def _filled(flat: torch.Tensor, values: int) -> torch.Tensor:
    """The first values, or all there are as often as it takes."""
    return flat[:values].repeat(-(-values // flat.numel()))[:values]


def _low_rank(codec: Codec, gradients: Sequence[Gradient], world: int) -> CodecCost:
    """All rounds together, without the averages; a third of it is charged before, between and after them."""
    device = "gpu" if gradients[0][2].is_cuda else "cpu"
    ratios = {}
    for name, _, gradient in gradients:
        averaged = rounds.averaged_bytes(codec, gradient, Context(name, world=world))
        ratios[name] = gradient.numel() * gradient.element_size() / max(averaged, 1)
    matrices = sorted((g for g in gradients if g[2].dim() > 1), key=lambda g: g[2].numel()) or list(gradients)
    points = []
    for chosen in (matrices[:1], matrices[-1:], matrices):
        size = sum(g.numel() * g.element_size() for _, _, g in chosen)
        contexts = [Context(name, world=world) for name, _, _ in chosen]
        points.append((float(size), rounds.seconds(codec, [g for _, _, g in chosen], contexts)))
    curve = Curve(tuple(points))
    return CodecCost(codec, _overall(gradients, ratios), {device: curve}, {device: curve}, ratios)


def measure_copies(device: torch.device) -> dict[str, Curve]:
    """Between the GPU and pinned memory of the host; nothing where there is no GPU."""
    if device.type != "cuda":
        return {}
    up, down = [], []
    for size in COPY_SIZES:
        here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(size, dtype=torch.uint8, device=device)
        up.append((float(size), _copied(there, here)))
        down.append((float(size), _copied(here, there)))
    return {"host_to_device": Curve(tuple(up)), "device_to_host": Curve(tuple(down))}


def _copied(to: torch.Tensor, of: torch.Tensor) -> float:
    times = []
    for _ in range(1 + ROUNDS_ON_GPU):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        to.copy_(of, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])

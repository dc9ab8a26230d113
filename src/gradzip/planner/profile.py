"""profile.json: what was measured of a training run, and what it was measured on.

Everything that the planner knows about a machine comes from here. Units are in the names: `_s` seconds, `_bytes` bytes,
`bits_per_s`. A reader that meets another schema, a negative time or an unknown codec says which entry is wrong.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import jsonfile
from ..codecs import Codec, parse
from ..errors import CodecError, PlanError, nearest
from ..exchange.message_codecs import fills_frames
from ..jsonfile import is_count, is_number, shown

SCHEMA = "gradzip-profile"
VERSION = 2
DEVICES = ("cpu", "gpu")
TRANSPORTS = ("host", "nccl")  # what carries coded data: sockets from host memory, or NCCL from GPU memory
GROUPS = ("intra", "inter", "flat")
# `ddp` is DDP's own all-reduce, where other means than those of coded data carry it (NCCL beside host memory).
KINDS = ("ar", "rs", "ag", "a2a", "red", "gat", "bc", "ddp")
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True)
class Line:
    """seconds = latency_s + s_per_byte * bytes; `residual` is how far off that is, relative to the times measured."""

    latency_s: float
    s_per_byte: float
    residual: float = 0.0

    def at(self, size_bytes: float) -> float:
        return self.latency_s + self.s_per_byte * size_bytes

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> Line:
        """The slope between the two largest sizes, and the least that it leaves: delays only ever add to small ones.

        Least squares would let a hiccup of a small message, which is nothing, change what large ones are said to take.
        """
        (size, seconds), *smaller = sorted(points, reverse=True)
        slope = 0.0
        if not smaller:
            latency, slope = (0.0, seconds / size) if size else (seconds, 0.0)
        else:
            before, sooner = next((point for point in smaller if point[0] < size), (size, seconds))
            slope = max(0.0, (seconds - sooner) / (size - before)) if before < size else 0.0
            left = [t - slope * x for x, t in points]
            latency = min((rest for rest in left if rest >= 0), default=0.0)
            if not slope:
                latency = statistics.median(t for _, t in points)
            elif max(left) < 0:
                slope = seconds / size
        off = sum((latency + slope * x - t) ** 2 for x, t in points)
        return cls(latency, slope, math.sqrt(off / max(sum(t * t for _, t in points), 1e-300)))


@dataclass(frozen=True)
class Curve:
    """Measured (bytes, seconds) pairs, and the line through them; of coding, every frame takes `frame_s` besides."""

    points: tuple[tuple[float, float], ...]
    frame_s: float = 0.0
    line: Line = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "line", Line.fit(self.points))


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    ready_s: float  # after the start of backward
    dtype: str = "float32"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        return self.numel * self.item_bytes


@dataclass(frozen=True)
class CodecCost:
    """What a codec costs by the bytes of raw gradient, on each device where it was measured, and what it saves.

    Seconds on the CPU are those of a core: how long they last depends on the cores that a rank has.
    """

    codec: Codec
    ratio: float  # raw bytes / payload bytes, over all gradients
    encode: Mapping[str, Curve]
    decode: Mapping[str, Curve]
    ratios: Mapping[str, float] = field(default_factory=dict)  # of single tensors of one rank, by name
    grows: bool = False  # the payload of a sum is the union of its addends', as with sparse codecs
    sum_ratios: Mapping[str, float] = field(default_factory=dict)  # of the mean of all ranks, where it is not the same

    @cached_property
    def name(self) -> str:
        return str(self.codec)

    @cached_property
    def by_message(self) -> bool:
        """A frame holds parts of all tensors of a message, and not of one alone."""
        return fills_frames(self.codec)

    def ratio_of(self, name: str) -> float:
        return self.ratios.get(name, self.ratio)

    def sum_ratio_of(self, name: str) -> float:
        """Of the mean of all ranks: gradients from BF16 arithmetic, say, have fewer bits than their sums."""
        return self.sum_ratios.get(name, self.ratio_of(name))


@dataclass(frozen=True)
class Collective:
    """A collective as it was measured alone: seconds by the bytes that each rank puts in.

    `cpu` is what it takes of a rank's cores meanwhile, which coding then has to do without.
    """

    kind: str
    group: str
    peers: int
    curve: Curve
    cpu: Curve | None = None


@dataclass(frozen=True)
class Link:
    bits_per_s: float  # what data really gets through
    nominal_bits_per_s: float | None = None  # what it is called

    @property
    def efficiency(self) -> float:
        return self.bits_per_s / self.nominal_bits_per_s if self.nominal_bits_per_s else 1.0


@dataclass(frozen=True)
class Profile:
    model: str
    tensors: tuple[Tensor, ...]  # in the order in which gradients become ready
    forward_s: float
    backward_s: float
    optimizer_s: float
    hosts: int
    ranks_per_host: int
    transport: str
    codecs: Mapping[str, CodecCost]
    collectives: tuple[Collective, ...]
    links: Mapping[str, Link]
    copies: Mapping[str, Curve] = field(default_factory=dict)  # host_to_device, device_to_host
    step_s: float | None = None  # a whole step, as it was run
    exposed_s: float | None = None  # of the exchange that was measured, what backward did not hide
    chunk_s: float = 0.0  # of a core, that the runtime's threads take for each chunk beside coding
    cores_per_rank: float | None = None  # while all ranks of a machine are at work; None: one
    bucket_bytes: int | None = None  # DDP's bucket_cap_mb in that run
    steps: int = 0  # how many were measured
    origin: Mapping[str, str] = field(default_factory=dict)  # what was measured and what was computed, in words

    @property
    def size_bytes(self) -> int:
        return sum(t.size_bytes for t in self.tensors)

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Where gradients can be coded; the device that they lie on last."""
        return tuple(d for d in DEVICES if any(d in cost.encode for cost in self.codecs.values()))

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        return cls.from_json(jsonfile.load(path, "profile", PlanError), str(path))

    def save(self, path: str | Path) -> None:
        Path(path).write_text(_text(self.to_json()) + "\n")

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "origin": dict(self.origin),
            "model": self.model,
            "steps": self.steps,
            "hosts": self.hosts,
            "ranks_per_host": self.ranks_per_host,
            "transport": self.transport,
            "forward_s": self.forward_s,
            "backward_s": self.backward_s,
            "optimizer_s": self.optimizer_s,
            "step_s": self.step_s,
            "exposed_s": self.exposed_s,
            "chunk_s": self.chunk_s,
            "cores_per_rank": self.cores_per_rank,
            "bucket_bytes": self.bucket_bytes,
            "links": {
                name: {"bits_per_s": link.bits_per_s, "nominal_bits_per_s": link.nominal_bits_per_s}
                for name, link in self.links.items()
            },
            "collectives": [
                {
                    "kind": c.kind,
                    "group": c.group,
                    "peers": c.peers,
                    **_curve_json(c.curve),
                    "cpu": None if c.cpu is None else _curve_json(c.cpu),
                }
                for c in self.collectives
            ],
            "copies": {name: _curve_json(curve) for name, curve in self.copies.items()},
            "codecs": {
                text: {
                    "ratio": cost.ratio,
                    "ratios": dict(cost.ratios),
                    "sum_ratios": dict(cost.sum_ratios),
                    "grows": cost.grows,
                    "encode": {device: _curve_json(curve) for device, curve in cost.encode.items()},
                    "decode": {device: _curve_json(curve) for device, curve in cost.decode.items()},
                }
                for text, cost in self.codecs.items()
            },
            "tensors": [
                {"name": t.name, "shape": list(t.shape), "dtype": t.dtype, "ready_s": t.ready_s} for t in self.tensors
            ],
        }

    @classmethod
    def from_json(cls, data: object, source: str = "the profile") -> Profile:
        top = _Reader(data, source)
        found = (top.data.get("schema"), top.data.get("version"))
        if found != (SCHEMA, VERSION):
            raise PlanError(
                f"{source} is no profile that this version reads: it says schema {shown(found[0])}, version "
                f"{shown(found[1])}; "
                f"wanted {SCHEMA!r}, {VERSION}. Make a new one with `gradzip profile`"
            )
        tensors = tuple(_tensor(r) for r in top.items("tensors"))
        if not tensors:
            raise PlanError(f"{source}: tensors is empty: there is nothing to plan")
        names = [t.name for t in tensors]
        if len(set(names)) < len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise PlanError(f"{source}: tensors has {twice!r} twice")
        codecs = {text: _codec(text, r, set(names)) for text, r in top.entries("codecs")}
        return cls(
            model=top.text("model"),
            tensors=tuple(sorted(tensors, key=lambda t: t.ready_s)),
            forward_s=top.number("forward_s"),
            backward_s=top.number("backward_s", least=max(t.ready_s for t in tensors) * (1 - 1e-9)),
            optimizer_s=top.number("optimizer_s"),
            hosts=top.count("hosts"),
            ranks_per_host=top.count("ranks_per_host"),
            transport=top.choice("transport", TRANSPORTS),
            codecs=codecs,
            collectives=tuple(
                Collective(
                    r.choice("kind", KINDS), r.choice("group", GROUPS), r.count("peers", 2), r.curve(), r.part("cpu")
                )
                for r in top.items("collectives")
            ),
            links={name: _link(r) for name, r in top.entries("links", ("intra", "inter"))},
            copies={n: r.curve() for n, r in top.entries("copies", ("host_to_device", "device_to_host"))},
            step_s=top.optional("step_s"),
            exposed_s=None if top.data.get("exposed_s") is None else top.number("exposed_s"),
            chunk_s=top.number("chunk_s"),
            cores_per_rank=top.optional("cores_per_rank"),
            bucket_bytes=None if top.data.get("bucket_bytes") is None else top.count("bucket_bytes"),
            steps=top.count("steps", 0),
            origin={key: str(value) for key, value in top.mapping("origin").items()},
        )


def _text(value: object, depth: int = 0) -> str:
    """JSON with one tensor, curve or collective per line: readable, and a change of one shows as one."""
    inner = "\n" + " " * (depth + 1)
    if isinstance(value, dict) and not {"points", "shape"} & set(value):
        if any(isinstance(item, dict | list) for item in value.values()):
            items = (f"{json.dumps(key)}: {_text(item, depth + 1)}" for key, item in value.items())
            return "{" + inner + f",{inner}".join(items) + inner[:-1] + "}"
        return json.dumps(value)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[" + inner + f",{inner}".join(_text(item, depth + 1) for item in value) + inner[:-1] + "]"
    return json.dumps(value)


def _curve_json(curve: Curve) -> dict[str, Any]:
    line = curve.line
    fit = {"latency_s": line.latency_s, "s_per_byte": line.s_per_byte, "relative_residual": line.residual}
    return {"points": [{"bytes": x, "seconds": t} for x, t in curve.points], "frame_s": curve.frame_s, "fit": fit}


def _tensor(r: _Reader) -> Tensor:
    shape = r.get("shape", list)
    if not all(is_count(n, 1) for n in shape) or not is_count(math.prod(shape)):
        raise r.wrong("shape", "sizes are whole numbers from 1 on")
    return Tensor(r.text("name"), tuple(shape), r.number("ready_s"), r.choice("dtype", tuple(ITEM_BYTES)))


def _link(r: _Reader) -> Link:
    return Link(r.positive("bits_per_s"), r.optional("nominal_bits_per_s"))


def _codec(text: str, r: _Reader, names: set[str]) -> CodecCost:
    try:
        codec = parse(text)
    except CodecError as error:
        raise PlanError(f"{r.where}: {error}") from error
    ratios = _ratios(r, "ratios", names)
    sum_ratios = _ratios(r, "sum_ratios", names) if "sum_ratios" in r.data else {}
    encode = {d: c.curve() for d, c in r.entries("encode", DEVICES)}
    decode = {d: c.curve() for d, c in r.entries("decode", DEVICES)}
    if set(encode) != set(decode) or not encode:
        raise PlanError(f"{r.where}: encode and decode must be there for the same devices, at least for one")
    return CodecCost(codec, r.positive("ratio"), encode, decode, ratios, r.get("grows", bool), sum_ratios)


def _ratios(r: _Reader, key: str, names: set[str]) -> Mapping[str, float]:
    ratios = r.mapping(key)
    for name, ratio in ratios.items():
        if name not in names:
            raise PlanError(f"{r.where}.{key} names {name!r}, which is not among the tensors{nearest(name, names)}")
        if not is_number(ratio) or not ratio > 0:
            raise PlanError(f"{r.where}.{key}[{name!r}] is {shown(ratio)}: a ratio is a finite number above 0")
    return ratios


class _Reader:
    """One object of the file, with its place for messages."""

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, dict):
            raise PlanError(f"{where} is {type(data).__name__}, wanted an object")
        self.data, self.where = data, where

    def wrong(self, key: str, cure: str) -> PlanError:
        return PlanError(f"{self.where}: {key} is {shown(self.data[key])}: {cure}")

    def get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        if key not in self.data:
            raise PlanError(f"{self.where}: {key} is missing")
        value = self.data[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            names = kind.__name__ if isinstance(kind, type) else "number"
            raise self.wrong(key, f"wanted {names}")
        return value

    def number(self, key: str, least: float = 0.0) -> float:
        value = self.get(key, (int, float))
        if not is_number(value):
            raise self.wrong(key, f"it must be finite and at most {jsonfile.LARGEST:g}")
        value = float(value)
        if value < 0:
            raise self.wrong(key, "it cannot be negative")
        if value < least:
            raise self.wrong(key, f"it cannot be below {least:.6g}")
        return value

    def positive(self, key: str) -> float:
        value = self.number(key)
        if value == 0:
            raise self.wrong(key, "it must be above 0")
        return value

    def optional(self, key: str) -> float | None:
        return None if self.data.get(key) is None else self.positive(key)

    def count(self, key: str, least: int = 1) -> int:
        value: int = self.get(key, int)
        if not is_count(value, least):
            raise self.wrong(key, f"wanted a whole number of at least {least}")
        return value

    def text(self, key: str) -> str:
        value: str = self.get(key, str)
        return value

    def choice(self, key: str, among: Sequence[str]) -> str:
        value = self.text(key)
        if value not in among:
            raise self.wrong(key, f"wanted one of {', '.join(among)}{nearest(value, among)}")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        value: dict[str, Any] = self.get(key, dict)
        return value

    def items(self, key: str) -> list[_Reader]:
        return [_Reader(item, f"{self.where}: {key}[{i}]") for i, item in enumerate(self.get(key, list))]

    def entries(self, key: str, among: Sequence[str] | None = None) -> list[tuple[str, _Reader]]:
        found = self.mapping(key)
        for name in found:
            if among is not None and name not in among:
                raise PlanError(f"{self.where}: {key} has {name!r}; there are {', '.join(among)}{nearest(name, among)}")
        return [(name, _Reader(item, f"{self.where}: {key}.{name}")) for name, item in found.items()]

    def curve(self) -> Curve:
        points = [(r.number("bytes"), r.number("seconds")) for r in self.items("points")]
        if not points:
            raise PlanError(f"{self.where}: points is empty: nothing was measured")
        return Curve(tuple(points), self.number("frame_s"))

    def part(self, key: str) -> Curve | None:
        return None if self.data.get(key) is None else _Reader(self.data[key], f"{self.where}.{key}").curve()

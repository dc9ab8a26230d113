"""Exchanges between processes over Gloo, for tests/test_collectives.py and the long tests beside it."""

from __future__ import annotations

import functools
import os
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from ranks import TIMEOUT

from gradzip.codecs import Context, parse
from gradzip.exchange import coding, rounds
from gradzip.exchange.message_codecs import codes_messages, route_of
from gradzip.exchange.on_host.rounds import submit_rounds
from gradzip.exchange.on_host.runner import HostMessage, runner_of
from gradzip.exchange.outcome import Outcome
from gradzip.exchange.peers.channel import Channel, open_channel
from gradzip.feedback import Memory
from gradzip.routes import NAMED, Route

HOSTS, LOCAL = 2, 2


def connect(per_host: int = LOCAL) -> Channel:
    os.environ["LOCAL_WORLD_SIZE"] = str(per_host)
    world = dist.group.WORLD
    assert world is not None
    return open_channel(world, torch.device("cpu"), timeout=TIMEOUT)


class Exchanger:
    """Sends messages of tensors that keep their names, and hence their residuals, from call to call."""

    def __init__(self, to: Channel) -> None:
        self.channel, self.memory, self.step = to, Memory(to.rank), 0
        self._waiting: list[tuple[threading.Event, list[Outcome]]] = []

    def send(self, codec: str, route: str | None, tensors: dict[str, torch.Tensor]) -> None:
        """Starts an exchange in place; `finish` waits for it."""
        chosen = parse(codec)
        by = route_of(chosen, route, self.channel.topology.default_route)
        contexts = [
            Context(name, self.step, rank=self.channel.rank, world=self.channel.world, state=self._state(name, codec))
            for name in tensors
        ]
        done, outcomes = threading.Event(), list[Outcome]()

        def end(outcome: Outcome) -> None:
            outcomes.append(outcome)
            done.set()

        self._waiting.append((done, outcomes))
        whole = codes_messages(chosen, by)
        if whole is not None:
            self._send_whole(HostMessage(whole, by, list(tensors), list(tensors.values())), end)
            return
        start = functools.partial(rounds.of, chosen, list(tensors.values()), contexts, self.memory)
        about = self._about(list(tensors), next(iter(tensors.values())).dtype)
        submit_rounds(runner_of(self.channel), codec, start, about, end)

    def _send_whole(self, sent: HostMessage, end: Callable[[Outcome], None]) -> None:
        about = self._about(sent.names, sent.dtype)
        about.memory = self.memory
        runner_of(self.channel).submit(sent.program(self.channel.topology), sent.values, about, end)

    def _about(self, names: Sequence[str], dtype: torch.dtype) -> coding.Message:
        return coding.Message(names, dtype, self.channel.rank, self.channel.world, self.step)

    def _state(self, name: str, codec: str) -> dict[str, Any]:
        return self.memory.state(name, parse(codec).name)

    def finish(self) -> list[Outcome]:
        ended = []
        for done, outcomes in self._waiting:
            assert done.wait(60), "an exchange hangs"
            if outcomes[0].error is not None:
                raise outcomes[0].error
            ended.append(outcomes[0])
        self._waiting = []
        self.memory.commit()
        self.step += 1
        return ended


def whole_numbers(numel: int, rank: int) -> torch.Tensor:
    """Sums and means of these are exact in float32, in whatever order."""
    return ((torch.arange(numel) * 7919 + rank * 104729) % 1000 * 4 - 2000).float()


def covering(routes: list[Route]) -> list[Route]:
    """Few of the tree's routes that have, together, every step next to every step that it ever stands next to."""
    pairs = {route: {(a, b) for a, b in zip(route.steps, route.steps[1:])} for route in routes}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        best = max(routes, key=lambda route: len(pairs[route] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return chosen


def run_routes(rank: int, names: list[str], numel: int) -> list[str]:
    """Those routes whose result is not exactly the mean."""
    exchanger = Exchanger(connect())
    mean = torch.stack([whole_numbers(numel, r) for r in range(HOSTS * LOCAL)]).sum(0) / (HOSTS * LOCAL)
    wrong = []
    for start in range(0, len(names), 32):  # so many at once, for speed
        batch = {name: whole_numbers(numel, rank) for name in names[start : start + 32]}
        for name, values in batch.items():
            codec = "gcomp:mode=lossless" if Route.parse(name).compresses else "identity"
            exchanger.send(codec, name, {"x": values})
        exchanger.finish()
        wrong += [name for name, values in batch.items() if not torch.equal(values, mean)]
    return wrong


# --- Random messages -------------------------------------------------------------------------------------------------

CODECS = (
    *("identity", "gcomp:mode=lossless", "gcomp:keep=5", "cast", "cast:to=fp16", "topk:ratio=0.1", "randomk:ratio=0.2"),
    *("sign", "qsgd:bits=4", "powersgd:rank=2", "zlib"),
)


def random_messages(rank: int, seed: int, rounds: int, packings: int) -> dict[str, Any]:
    """Random tensors by random codecs and routes, packed in several ways: bits by packing, and what differed."""
    to = connect(per_host=2 if dist.get_world_size() == 4 else 1)
    exchangers = [Exchanger(to) for _ in range(packings)]
    choose, bits, differing = random.Random(seed), list[int](), list[str]()
    for number in range(rounds):
        codec = choose.choice(CODECS)
        routes = [None] if parse(codec).rounds > 1 else [None, *NAMED]
        routes = [r for r in routes if r is None or fits(codec, r)]
        route = choose.choice(routes)
        shapes = [(choose.choice([1, 3, 40, 257]), choose.choice([1, 2, 64])) for _ in range(choose.randint(1, 5))]
        narrow = codec in ("gcomp:mode=lossless", "cast", "identity") and choose.random() < 0.3
        dtype = torch.bfloat16 if narrow else torch.float32
        draw = torch.Generator().manual_seed(1000 * number + rank)
        raw = {f"t{i}-{s}": torch.randn(s, generator=draw).to(dtype) for i, s in enumerate(shapes)}
        results = []
        for packing, exchanger in enumerate(exchangers):
            tensors = {name: value.t().clone().t() if number % 3 == 0 else value.clone() for name, value in raw.items()}
            names = list(tensors)
            cut = 1 + (number + packing) % len(names) if packing else len(names)
            for start in range(0, len(names), cut):
                exchanger.send(codec, route, {name: tensors[name] for name in names[start : start + cut]})
            exchanger.finish()
            results.append(torch.cat([t.float().reshape(-1) for t in tensors.values()]))
        # Torch's own 16-bit sums depend on where a value lies, by design.
        if not (codec.startswith("cast") and route == "allreduce"):
            differing += [
                f"{number}: {codec} by {route}"
                for other in results[1:]
                if not torch.equal(other.view(torch.int32), results[0].view(torch.int32))
            ]
        bits.append(int(results[0].view(torch.int32).sum(dtype=torch.int64)))
    return {"bits": bits, "differing": differing, "finite": finite_factors(exchangers[0])}


def finite_factors(exchanger: Exchanger) -> list[bool]:
    """Whether means of powersgd count as finite: huge ones, whose sum is not, and those with a NaN or an infinity."""
    said = []
    for value in (3e37, torch.nan, torch.inf, 1.0):
        x = torch.zeros(20, 30)
        x[0] = value
        exchanger.send("powersgd:rank=1", None, {f"row of {value}": x})
        said.append(exchanger.finish()[0].finite)
        assert said[-1] == bool(x.isfinite().all())
    return said


def fits(codec: str, route: str) -> bool:
    try:
        route_of(parse(codec), route)
    except ValueError:
        return False
    return True

"""The same means as `exact`, for all workers at once: few large operations for a GPU instead of many small ones.

Gradients of all W workers lie in one buffer of W rows. gcomp's modes and casts are arithmetic on it (rounding.py), and
real frames are made at `probe` alone, which compares them with that arithmetic and gives their sizes. PowerSGD is the
library's own `reduce`, called once with the matrices of all workers, whose averages add up rows in the order of ranks.
Sparse codecs and signs select by the library's own functions, a row for each worker: among all values of a tensor, as
in all tables, and not among those of each owner's part.

Where a codec is linear (`linear`), one worker with the pictures of all stands for them: the mean of projections and of
residuals is the projection and the residual of the mean gradient. Only rounding differs.

Sums are formed in the order of ranks and divided, residuals are kept as `gradzip.feedback` keeps them. A codec that is
not here is refused: `ExactWorkers` has them all.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from gradzip.codecs import Codec, Context, parse
from gradzip.codecs.base import Reduced
from gradzip.codecs.baseline import Cast, Identity
from gradzip.codecs.gcomp import GComp
from gradzip.codecs.lowrank import PowerSGD
from gradzip.codecs.quantized import Sign
from gradzip.codecs.random import key_of
from gradzip.codecs.selection import block, magnitudes, sample
from gradzip.codecs.sparse import RandomBlock, RandomK, TopK
from gradzip.engines.layout import Floor
from gradzip.errors import Unsupported
from gradzip.exchange.parts import Table
from gradzip.exchange.topology import Topology
from gradzip.exchange.way import Way
from gradzip.hooks.ways import Ways
from gradzip.policy import Adaptive, Policy, Rules, small

from . import rounding

ELEMENTWISE = (Identity, GComp, Cast)


def linear(policy: Policy) -> bool:
    """Whether the mean gradient says all that the workers' own gradients do: all codecs only project."""
    parts = [getattr(policy, name, None) for name in ("low", "high")]  # Accordion's
    rules = [part for part in (policy, *parts) if isinstance(part, Rules)]
    codecs = [parse(option.codec) for part in rules for option in part.rules.values()]
    return bool(codecs) and all(
        isinstance(codec, Identity | PowerSGD) or (isinstance(codec, RandomK | RandomBlock) and not codec.unbiased)
        for codec in codecs
    )


@dataclass(frozen=True)
class Place:
    """Where a parameter's values lie in each row."""

    name: str
    start: int
    stop: int
    shape: torch.Size


class StackedWorkers:
    """Gradients, error memory and codec state of W workers. Fill `rows`, call `mean`, step the optimizer."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, policy: Policy, world: int
    ) -> None:
        self.world, self.step = world, 0
        self.sent = 0.0  # bytes that one worker has contributed so far, frames and all; gcomp's count as float32
        named = dict(model.named_parameters())
        if any(not p.is_contiguous() for p in named.values()):
            raise Unsupported("parameters must be contiguous here: keep channels_last to the activations")
        names: dict[torch.Tensor, str] = {p: n for n, p in named.items()}
        device = next(iter(names)).device
        self.policy, self._optimizer = policy, optimizer
        topology = Topology(0, tuple((r,) for r in range(world)))
        self._ways = Ways(names, device, [optimizer] if optimizer else [], topology)
        # Those that are compressed lie together, so that one operation takes them all.
        ordered = sorted(named, key=lambda name: small(named[name].shape))
        self.places, at = dict[str, Place](), 0
        for name in ordered:
            size = named[name].numel()
            self.places[name] = Place(name, at, at + size, named[name].shape)
            at += size
        self.stack = torch.zeros(world, at, device=device)
        self._mean = torch.zeros(at, device=device)
        self._residual: torch.Tensor | None = None  # of each worker's gradients
        self._sum_residual: torch.Tensor | None = None
        self._states: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        self._own_states = [defaultdict[str, dict[str, Any]](dict) for _ in range(world)]  # gcomp's, of each worker
        self._exact: dict[str, list[bool]] = {}  # workers whose own gradient goes lossless in this step
        #: for each worker, where its gradients go: in the order of the model's parameters
        self.rows = [[self._view(self.stack[w], self.places[n]) for n in named] for w in range(world)]
        for name, parameter in named.items():
            parameter.grad = self._view(self._mean, self.places[name])

    @staticmethod
    def _view(flat: torch.Tensor, place: Place) -> torch.Tensor:
        return flat[place.start : place.stop].view(place.shape)

    @torch.no_grad()
    def mean(self, probe: bool = False) -> dict[str, float]:
        """Puts the means where the parameters' `grad` are, and ends the step; with `probe`, what real frames say."""
        ways = self._ways.of(self.policy, 1.0)
        found: dict[str, float] = {}
        if self._residual is None and any(way.codec.error_memory is not None for way in ways.values()):
            self._residual, self._sum_residual = torch.zeros_like(self.stack), torch.zeros_like(self._mean)
        self._choose_own(ways)
        if self._residual is not None:
            self.stack += self._residual
        by_codec: dict[Codec, list[Place]] = {}
        for place in self.places.values():
            codec = ways[place.name].codec
            if codec.error_memory not in (None, "fp32"):
                raise Unsupported(f"{codec}: residuals are kept in float32 here")
            by_codec.setdefault(codec, []).append(place)
            self.sent += _payload(codec, place.shape)
        for codec, places in by_codec.items():
            if isinstance(codec, ELEMENTWISE):
                self._elementwise(codec, places, ways, found if probe else None)
            elif isinstance(codec, PowerSGD):
                self._low_rank(codec, places)
            else:
                for place in places:
                    self._selected(codec, place)
        self.step += 1
        if isinstance(self.policy, Adaptive):
            for name, place in self.places.items():
                self.policy.observe(name, self._view(self._mean, place))
            self.policy.end_step([float(group["lr"]) for group in getattr(self._optimizer, "param_groups", [])])
        return found

    def end_epoch(self) -> None:
        if isinstance(self.policy, Adaptive):
            self.policy.end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on, besides the model and the optimizer."""
        state = {"step": self.step, "sent": self.sent, "residual": self._residual, "sums": self._sum_residual}
        state |= {"states": dict(self._states), "own": [dict(own) for own in self._own_states]}
        if isinstance(self.policy, Adaptive):
            state |= {"policy": self.policy.state_dict(), "history": list(self.policy.history)}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.sent = state["step"], state["sent"]
        self._residual, self._sum_residual = state["residual"], state["sums"]
        self._states.update(state["states"])
        for own, saved in zip(self._own_states, state["own"]):
            own.update(saved)
        if isinstance(self.policy, Adaptive):
            self.policy.load_state_dict(state["policy"])
            self.policy.history[:] = state["history"]

    def _keep(self, codec: Codec, start: int, stop: int, decoded: torch.Tensor) -> None:
        if self._residual is None:
            return
        kept = self._residual[:, start:stop]
        if codec.error_memory is None:
            kept.zero_()
        else:
            torch.sub(self.stack[:, start:stop], decoded, out=kept)

    # -- every value by itself ----------------------------------------------------------------------------------

    def _choose_own(self, ways: dict[str, Way]) -> None:
        self._exact = {}
        for place in self.places.values():
            codec = ways[place.name].codec
            if isinstance(codec, GComp):
                context = Context(place.name, self.step, world=self.world, floor=ways[place.name].floor)
                rows = list(self.stack[:, place.start : place.stop])
                states = [of_worker[place.name] for of_worker in self._own_states]
                self._exact[place.name] = codec.own_exact(rows, [context] * self.world, states)

    def _elementwise(
        self, codec: Codec, places: list[Place], ways: dict[str, Way], found: dict[str, float] | None
    ) -> None:
        for together in _runs(places):
            start, stop = together[0].start, together[-1].stop
            x, out = self.stack[:, start:stop], self._mean[start:stop]
            floors = _floors([ways[p.name] for p in together])
            decoded = _coded(codec, x, floors)
            for place in together:
                inner = slice(place.start - start, place.stop - start)
                for worker, exact in enumerate(self._exact.get(place.name, ())):
                    if exact:
                        decoded[worker, inner] = x[worker, inner]
                if isinstance(codec, Cast) and codec.error_memory is None:
                    for part in Table.of([place.name], [place.stop - place.start], [self.world]).parts:
                        at = slice(inner.start + part.start, inner.start + part.stop)
                        decoded[part.owner, at] = x[part.owner, at]  # who adds up rounds nothing of its own
            self._keep(codec, start, stop, decoded)
            _sum_rows(decoded, out)
            feeds, of_sums = codec.error_memory is not None, isinstance(codec, GComp) and codec.codes_sums
            unit = 1.0  # what the sum's residual is kept in, as by exchange/on_host/gcomp.py
            if not of_sums:
                out.div_(self.world)
                unit = 1 / self.world
            target = out + self._sum_residual[start:stop] * unit if feeds and self._sum_residual is not None else out
            if not isinstance(codec, Identity):
                result = _coded(codec, target, floors, self._shift(codec))
                if feeds and self._sum_residual is not None:
                    self._sum_residual[start:stop] = (target - result) / unit
                if found is not None and isinstance(codec, GComp):
                    self._probe(codec, together, ways, decoded, target, result, found)
                out.copy_(result)
            if of_sums:
                out.div_(self.world)

    def _shift(self, codec: Codec) -> int:
        """Of what is encoded as a sum: paper mode compares values with reaches, and gets them as means."""
        return 0 if isinstance(codec, GComp) and codec.mode == "paper" else self.world.bit_length() - 1

    def _probe(
        self,
        codec: GComp,
        places: list[Place],
        ways: dict[str, Way],
        decoded: torch.Tensor,
        target: torch.Tensor,
        result: torch.Tensor,
        found: dict[str, float],
    ) -> None:
        """Real frames of worker 0's gradients and of the sums: their sizes, and whether they decode to what is here."""
        begin, shift = places[0].start, self._shift(codec)
        for place in places:
            part = slice(place.start, place.stop)
            inner = slice(place.start - begin, place.stop - begin)
            whole = Context(place.name, self.step, world=self.world, floor=ways[place.name].floor)
            used = codec.exact if self._exact[place.name][0] else codec
            frame = used.encode(self.stack[0, part], whole)
            _same(codec.decode(frame, whole), decoded[0, inner], f"{codec} of {place.name}")
            on_sums = Context(place.name, self.step, world=self.world, floor=whole.floor, shift=shift)
            sums = codec.encode(target[inner], on_sums)
            _same(codec.decode(sums, on_sums), result[inner], f"{codec} of the sum of {place.name}")
            found["values"] = found.get("values", 0) + place.stop - place.start
            found["own_bytes"] = found.get("own_bytes", 0) + frame.numel()
            found["sum_bytes"] = found.get("sum_bytes", 0) + sums.numel()
            found["zeros"] = found.get("zeros", 0) + float((self.stack[0, part] == 0).sum())
            found["coded_zeros"] = found.get("coded_zeros", 0) + float((decoded[0, inner] == 0).sum())

    # -- low rank -----------------------------------------------------------------------------------------------

    def _low_rank(self, codec: PowerSGD, places: list[Place]) -> None:
        if codec.alternate:
            raise Unsupported("powersgd:alternate=true goes by ExactWorkers")
        places = sorted(places, key=lambda place: place.name)  # as they travel
        tensors, contexts = [], []
        for place in places:
            state = self._states[place.name]  # equal for all workers
            for w in range(self.world):
                tensors.append(self._view(self.stack[w], place))
                contexts.append(Context(place.name, self.step, world=self.world, state=state))
        sizes = iter(_averages(codec, places))

        def average(flat: torch.Tensor) -> None:
            self._average(flat, next(sizes))

        results: list[Reduced] = codec.reduce(tensors, contexts, average)
        for number, place in enumerate(places):
            own = results[number * self.world : (number + 1) * self.world]
            self._mean[place.start : place.stop] = own[0].mean.reshape(-1)
            if self._residual is not None:
                for w, result in enumerate(own):
                    kept = self._residual[w, place.start : place.stop]
                    kept.zero_() if result.residual is None else kept.copy_(result.residual.reshape(-1))

    def _average(self, flat: torch.Tensor, sizes: list[tuple[int, int]]) -> None:
        """Replaces each stretch of W equally long parts by W times their mean; sizes are (stretches, part)."""
        lengths = [count * self.world * size for count, size in sizes]
        pieces = [
            piece.view(count, self.world, size) for piece, (count, size) in zip(flat.split_with_sizes(lengths), sizes)
        ]
        rows = torch.cat([piece.transpose(0, 1).reshape(self.world, -1) for piece in pieces], 1)
        total = torch.empty_like(rows[0])
        _sum_rows(rows, total)
        total.div_(self.world)
        for piece, mean in zip(pieces, total.split_with_sizes([count * size for count, size in sizes])):
            piece.copy_(mean.view(piece.shape[0], 1, piece.shape[2]).expand_as(piece))

    # -- some of the values, or their signs ---------------------------------------------------------------------

    def _selected(self, codec: Codec, place: Place) -> None:
        x, out = self.stack[:, place.start : place.stop], self._mean[place.start : place.stop]
        numel = out.numel()
        if isinstance(codec, TopK):
            decoded = torch.where(_largest(x, codec.kept(numel)), x, 0)
            _sum_rows(decoded, out)
            out.div_(self.world)
        elif isinstance(codec, Sign):
            scale = (x.abs().sum(1, dtype=torch.float64) / max(numel, 1)).float()[:, None]
            decoded = torch.where(x.signbit(), -scale, scale)
            _sum_rows(decoded, out)
            out.div_(self.world)
        elif isinstance(codec, RandomK | RandomBlock) and not codec.unbiased:
            key, count = key_of(0, self.step, place.name), codec.kept(numel)
            if isinstance(codec, RandomK):
                index = sample(key, numel, count, x.device)[0]
            else:
                index = (torch.arange(count, device=x.device) + block(key, numel)) % numel
            chosen = x[:, index]
            decoded = torch.zeros_like(x)
            decoded[:, index] = chosen
            total = torch.empty_like(chosen[0])
            _sum_rows(chosen, total)
            out.zero_()
            out[index] = total.div_(self.world)
        else:
            raise Unsupported(f"{codec} has no stacked form: take ExactWorkers")
        self._keep(codec, place.start, place.stop, decoded)


def _runs(places: list[Place]) -> list[list[Place]]:
    """Places that lie next to each other."""
    order, runs = sorted(places, key=lambda place: place.start), list[list[Place]]()
    for place in order:
        if runs and runs[-1][-1].stop == place.start:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def _floors(ways: list[Way]) -> torch.Tensor | None:
    if ways[0].floor is None:
        return None
    parts = [way.floor.tensor() if isinstance(way.floor, Floor) else way.floor for way in ways]
    return torch.cat([part for part in parts if part is not None])


def _coded(codec: Codec, x: torch.Tensor, floors: torch.Tensor | None, shift: int = 0) -> torch.Tensor:
    """decode(encode(x)) for all workers."""
    if isinstance(codec, Cast):
        return x.to(codec.dtype).float()
    if isinstance(codec, GComp) and codec.mode == "near":
        assert floors is not None
        return rounding.near(x, floors, shift)
    if isinstance(codec, GComp) and codec.mode == "paper":
        assert floors is not None
        return rounding.paper(x, floors, shift)
    if isinstance(codec, GComp) and codec.keep is not None:
        return rounding.keep(x, codec.keep, codec.round == "truncate")
    if isinstance(codec, Identity) or codec.lossless:
        return x
    raise Unsupported(f"{codec} has no stacked form: take ExactWorkers")


def _sum_rows(rows: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(rows[0])
    for row in rows[1:]:
        out.add_(row)


def _averages(codec: PowerSGD, places: list[Place]) -> list[list[tuple[int, int]]]:
    """For each average that the codec asks for: how many stretches of W parts follow each other, and their length."""
    plain = [(1, place.stop - place.start) for place in places if not codec.factored(place.shape)]
    groups: dict[tuple[int, int], int] = {}
    for place in places:
        if codec.factored(place.shape):
            matrix = (place.shape[0], place.shape[1:].numel())
            groups[matrix] = groups.get(matrix, 0) + 1
    ordered = sorted(groups.items(), key=lambda group: group[0][1])  # those with as many columns follow each other
    left = [(count, rows * codec.rank) for (rows, _), count in ordered]
    right = [(count, columns * codec.rank) for (_, columns), count in ordered]
    return [sizes for sizes in (plain, left, right) if sizes]


def _largest(x: torch.Tensor, k: int) -> torch.Tensor:
    """Which k values of each row are the largest; of equal ones the first (codecs/selection.py)."""
    magnitude = magnitudes(x)
    limit = magnitude.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, equal = magnitude > limit, magnitude == limit
    room = k - above.sum(1, keepdim=True)
    return above | (equal & (equal.cumsum(1) <= room))


def _same(frame: torch.Tensor, here: torch.Tensor, what: str) -> None:
    if not torch.equal(frame, here):
        raise AssertionError(f"{what}: {int((frame != here).sum())} of {here.numel()} values differ from the codec's")


@lru_cache(maxsize=4096)
def _payload(codec: Codec, shape: torch.Size) -> float:
    if isinstance(codec, PowerSGD):
        return 4 * codec.sent(shape)
    if isinstance(codec, Identity | GComp):
        return 4 * shape.numel()
    return codec.bound(shape.numel(), torch.float32)

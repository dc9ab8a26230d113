"""What a rank carries from one step to the next, by parameter name: residuals and codec state.

A residual is what a lossy encode lost; error feedback adds it to the next gradient. Changes of a step are held back
until `commit`: a step whose gradients were not finite is skipped by every optimizer that checks, and must leave no
trace here either (`drop`).
"""

from __future__ import annotations

import math
import re
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import saved
from .codecs.base import REGISTRY, Apart, Kept, wide
from .errors import Unsupported, nearest
from .sensitivity.near import memory_order

_WRAPPERS = re.compile(r"(^|(?<=\.))(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")

Value = torch.Tensor | int | float

GRADIENT = "gradient"  # the stage of a rank's own gradient; those of sums on the way are called `sum1.0-1024`
_FOLDED = "folded-"  # before the stage of a sum: what it lost goes with the gradient next time


def clean_name(name: str) -> str:
    """A parameter's name without what wrappers (DDP, torch.compile and the like) put into it."""
    return _WRAPPERS.sub("", name)


class _Bundle:
    """What many parameters keep as one, under a codec."""

    def __init__(self, owner: object, names: Sequence[str], codec: str, kept: Kept) -> None:
        self.owner = weakref.ref(owner)  # it may hold buckets that DDP gives up
        self.names, self.codec, self.kept = names, codec, kept


class Memory:
    """Residuals, kept unscaled, and the state that codecs keep in `Context.state`.

    What a reduction in place keeps of all its gradients stays together: nothing is done for each of them in a step.
    Whoever asks for a single one takes it apart.
    """

    def __init__(self, rank: int, patient: bool = False) -> None:
        """`patient`: residuals of a gradient that is all zero wait, as DDP may drop what is sent for it.

        So it is for parameters that no rank has used, which only DDP knows in the end.
        """
        self.rank, self.patient = rank, patient
        self._waiting: set[str] = set()  # keys of residuals that were not sent in this step
        self._copied: list[torch.Tensor] = []  # on a GPU, maybe still to be: another stream made what is copied
        self.forms: dict[str, str | None] = {}  # by name: how residuals are kept, as in Codec.error_memory
        self._residuals: dict[str, torch.Tensor] = {}  # by "stage/name"
        self._states: dict[str, dict[str, Any]] = {}  # by "codec/name"
        self._next_residuals: dict[str, torch.Tensor | None] = {}
        self._spares: dict[str, torch.Tensor] = {}  # room for the next residuals: those of the step before last
        self._wants_room: set[str] = set()
        self._next_states: dict[str, dict[str, Any]] = {}
        self._has_folded = False  # whether there may be residuals of sums to go with the gradient
        self._bundles: dict[str, _Bundle] = {}  # by name
        self._next_bundles: list[tuple[_Bundle, Kept]] = []
        self._bundling = threading.Lock()

    # -- residuals ----------------------------------------------------------------------------------------------

    def compensated(self, name: str, x: torch.Tensor, scale: float = 1.0, stage: str = GRADIENT) -> torch.Tensor:
        """x plus what was lost of it before, in the type of sums; x itself where nothing was.

        `stage` tells the encodes of one route apart; `scale` is the loss scale that x carries.
        """
        residual = self._residual(name, stage)
        if self.patient and not bool(x.any()):
            self._waiting.add(f"{stage}/{name}")
            return x
        total = x if residual is None else wide(x) + _at_work(residual, x) * scale
        for key in self._folded(name) if stage == GRADIENT else ():
            start, _, stop = key.partition("/")[0].partition(".")[2].partition("-")
            total = wide(total).clone() if total is x else total
            flat = total.permute(memory_order(total)).view(-1)
            flat[int(start) : int(stop)] += _at_work(self._residuals[key], x) * scale
        return total

    def compensated_all(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], scale: float = 1.0
    ) -> list[torch.Tensor]:
        """`compensated` for many gradients at once: in place where they are in the type of sums."""
        simple = not self.patient and not self._has_folded and is_exact(scale)
        result, changed, added = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        for name, x in zip(names, tensors):
            residual = self._residual(name)
            if simple and residual is None:
                result.append(x)
            elif simple and residual is not None and residual.dtype == x.dtype == torch.float32:
                changed.append(x)
                added.append(residual if residual.device == x.device else _at_work(residual, x))
                result.append(x)
            else:
                result.append(self.compensated(name, x, scale))
        if changed:
            torch._foreach_add_(changed, added, alpha=scale)
        return result

    def to_add(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], scale: float = 1.0
    ) -> list[torch.Tensor | None]:
        """What is to be added to gradients, times the scale, by a caller who can do so; the rest has been added.

        For gradients in float32: residuals that can be added as they are, contiguous like the gradients.
        """
        simple = not self.patient and not self._has_folded and is_exact(scale)
        left = list[torch.Tensor | None]()
        for name, x in zip(names, tensors):
            residual = self._residual(name)
            plain = residual is not None and residual.dtype == torch.float32 and residual.device == x.device
            if simple and (residual is None or (plain and residual.is_contiguous())):
                left.append(residual)
                continue
            total = self.compensated(name, x, scale)
            if total is not x:
                x.copy_(total)
            left.append(None)
        return left

    def compensate(self, name: str, x: torch.Tensor, scale: float = 1.0, stage: str = GRADIENT) -> None:
        """`compensated` in place, for x in the type of sums."""
        residual = self._residual(name, stage)
        if residual is None or self.patient or (stage == GRADIENT and self._folded(name)):
            total = self.compensated(name, x, scale, stage)
            if total is not x:
                x.copy_(total)
            return
        at_work = _at_work(residual, x)
        x.add_(at_work, alpha=scale) if is_exact(scale) else x.add_(at_work * scale)

    def room(self, name: str, x: torch.Tensor, stage: str = GRADIENT) -> torch.Tensor:
        """Memory for what will be lost of x, flat and in the order of x's values in memory; `keep` takes it."""
        self._wants_room.add(f"{stage}/{name}")
        spare = self._spares.pop(f"{stage}/{name}", None)
        if spare is None or spare.numel() != x.numel() or spare.device != x.device:
            return torch.empty(x.numel(), dtype=torch.float32, device=x.device)
        return spare

    def lost(self, name: str, residual: torch.Tensor | None, scale: float = 1.0, stage: str = GRADIENT) -> None:
        """Notes what this step's encode lost; None: everything got through, also what was lost before."""
        self.keep(name, None if residual is None else wide(residual) / scale, stage)

    def lost_all(self, names: Sequence[str], residuals: Sequence[torch.Tensor | None], scale: float = 1.0) -> None:
        """`lost` for many gradients at once, of residuals in the type of sums that the caller gives away."""
        if scale != 1:
            given = [residual for residual in residuals if residual is not None]
            if given:
                torch._foreach_div_(given, scale)
        for name, residual in zip(names, residuals):
            if residual is not None or self._has_folded or self._residual(name) is not None:
                self.keep(name, residual)

    def keep(self, name: str, residual: torch.Tensor | None, stage: str = GRADIENT) -> None:
        """The same for a residual without scale, which the caller gives away."""
        key, form, kept = f"{stage}/{name}", self.forms.get(name), residual
        if residual is not None and form in ("bf16", "cpu"):
            kept = residual.bfloat16() if form == "bf16" else residual.cpu()
        if kept is not residual or key in self._waiting:
            self._spare(key, residual)
        if key in self._waiting:
            self._set_apart(key)
            return
        self._next_residuals[key] = kept
        if stage == GRADIENT and self._has_folded:
            self._next_residuals |= dict.fromkeys(self._folded(name))

    def _set_apart(self, key: str) -> None:
        """What waits must not hold the memory that it shared with what does not."""
        waiting = self._residuals.get(key)
        if waiting is not None and waiting.untyped_storage().nbytes() > waiting.nbytes:
            self._residuals[key] = waiting.clone()
            self._copied.append(waiting)

    def _spare(self, key: str, residual: torch.Tensor | None) -> None:
        """Keeps memory for the next residual; flat, as `room` gives it out."""
        if key in self._wants_room and residual is not None and residual.dtype == torch.float32:
            self._spares[key] = residual.permute(memory_order(residual)).reshape(-1)

    @property
    def residuals(self) -> bool:
        """Whether something is held back."""
        bundled = {bundle.kept for bundle in self._bundles.values()}
        return bool(self._residuals) or any(r is not None for kept in bundled for r in kept.residuals)

    def residual(self, name: str, stage: str = GRADIENT) -> torch.Tensor | None:
        """What was lost of the gradient of that name, or of a sum, as it is kept."""
        return None if stage == GRADIENT and self._folded(name) else self._residual(name, stage)

    def holds(self, name: str) -> bool:
        """Whether something is to be added to the gradient of that name."""
        return self._residual(name) is not None or bool(self._folded(name))

    @property
    def changes(self) -> bool:
        """Whether this step has noted something so far."""
        return bool(self._next_residuals or self._next_bundles or any(self._next_states.values()))

    def _residual(self, name: str, stage: str = GRADIENT) -> torch.Tensor | None:
        self._take_apart(name)
        return self._residuals.get(f"{stage}/{name}")

    def fold(self) -> None:
        """Puts what was lost of sums back to this rank's gradients: the sum is the same, whatever route they take."""
        self._take_all_apart()
        for key in [key for key in self._residuals if key.startswith("sum")]:
            self._residuals[f"{_FOLDED}{key}"] = self._residuals.pop(key)
            self._has_folded = True
        self._spares.clear()
        self._wants_room.clear()

    def _folded(self, name: str) -> list[str]:
        if not self._has_folded:
            return []
        return [key for key in self._residuals if key.startswith(_FOLDED) and key.partition("/")[2] == name]

    # -- codec state --------------------------------------------------------------------------------------------

    def state(self, name: str, codec: str) -> dict[str, Any]:
        """The state of one parameter under one codec, for this step to change; by codec name, so that it survives
        a change of the codec's options."""
        key = f"{codec}/{name}"
        self._take_states_apart(name, codec)
        return self._next_states.setdefault(key, dict(self._states.get(key, {})))

    def states(self, names: Sequence[str], codec: str) -> list[Mapping[str, Any]]:
        """The states of many parameters under one codec, not to be changed."""
        if any(bundle.codec == codec for bundle in set(self._bundles.values())):
            for name in names:
                self._take_states_apart(name, codec)
        return [self._states.get(f"{codec}/{name}", {}) for name in names]

    # -- what many parameters keep as one -----------------------------------------------------------------------

    def of_all(
        self, owner: object, names: Sequence[str], codec: str, tensors: Sequence[torch.Tensor], scale: float
    ) -> Kept:
        """What is kept of these gradients: as `owner` left it where nothing else has to be done, or each by itself."""
        kept = self.kept_by(owner, names)
        if kept is not None and is_exact(scale):
            return kept
        return Apart(self.to_add(names, tensors, scale), [self.state(name, codec) for name in names])

    def kept_by(self, owner: object, names: Sequence[str]) -> Kept | None:
        """What `owner` has left of all of these, if nothing else has to be added to them."""
        bundle = self._bundles.get(names[0])
        return bundle.kept if bundle is not None and bundle.owner() is owner and not self._has_folded else None

    def keep_all(self, owner: object, names: Sequence[str], codec: str, kept: Kept) -> None:
        """Takes what this step leaves of all of them."""
        bundle = self._bundles.get(names[0])
        if bundle is None or bundle.owner() is not owner:
            if self.patient or self._has_folded or any(self.forms.get(name) in ("bf16", "cpu") for name in names):
                self.lost_all(names, kept.residuals)
                for name, sums in zip(names, kept.sums):
                    for stage, residual in sums.items():
                        self.keep(name, residual, stage)
                self._next_states |= {f"{codec}/{name}": state for name, state in zip(names, kept.states)}
                return
            bundle = _Bundle(owner, names, codec, kept)
        self._next_bundles.append((bundle, kept))

    def _take_apart(self, name: str) -> None:
        bundle = self._bundles.get(name)
        if bundle is None:
            return
        with self._bundling:  # those of a bundle may be asked for on several threads
            if self._bundles.get(name) is not bundle:
                return
            for each, residual, state in zip(bundle.names, bundle.kept.residuals, bundle.kept.states):
                if residual is not None:
                    self._residuals[f"{GRADIENT}/{each}"] = residual
                if state:
                    self._states[f"{bundle.codec}/{each}"] = state
            for each, sums in zip(bundle.names, bundle.kept.sums):
                self._residuals |= {f"{stage}/{each}": residual for stage, residual in sums.items()}
            for each in bundle.names:
                del self._bundles[each]

    def _take_states_apart(self, name: str, codec: str) -> None:
        bundle = self._bundles.get(name)
        if bundle is not None and bundle.codec == codec:
            self._take_apart(name)

    def _take_all_apart(self) -> None:
        for name in list(self._bundles):
            self._take_apart(name)

    def _put_together(self, bundle: _Bundle) -> None:
        for name in bundle.names:
            if self._bundles.get(name) is not bundle:
                self._take_apart(name)
                self._residuals.pop(f"{GRADIENT}/{name}", None)
                self._spares.pop(f"{GRADIENT}/{name}", None)
                self._states.pop(f"{bundle.codec}/{name}", None)
                self._bundles[name] = bundle
        for name, sums in zip(bundle.names, bundle.kept.sums):
            for stage in sums:
                self._residuals.pop(f"{stage}/{name}", None)

    # -- steps --------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        for key, residual in self._next_residuals.items():
            if residual is None:
                self._residuals.pop(key, None)
                self._spares.pop(key, None)
                continue
            self._spare(key, self._residuals.get(key))
            self._residuals[key] = residual
        self._states.update({key: state for key, state in self._next_states.items() if state})
        for bundle, kept in self._next_bundles:
            if self._bundles.get(bundle.names[0]) is not bundle:
                self._put_together(bundle)
            bundle.kept = kept
        self._has_folded = self._has_folded and any(key.startswith(_FOLDED) for key in self._residuals)
        self._next_residuals = {}
        self.drop()

    def drop(self) -> None:
        for key, residual in self._next_residuals.items():
            self._spare(key, residual)
        self._next_residuals, self._next_states, self._next_bundles, self._waiting = {}, {}, [], set()
        self._copied.clear()

    # -- what is held -------------------------------------------------------------------------------------------

    def held(self) -> dict[str, int]:
        """Bytes held from step to step, by parameter name."""
        self._take_all_apart()
        out: dict[str, int] = {}
        for key, residual in (*self._residuals.items(), *self._spares.items()):
            name = key.partition("/")[2]
            out[name] = out.get(name, 0) + residual.nbytes
        for key, state in self._states.items():
            name = _whole(key.partition("/")[2])
            out[name] = out.get(name, 0) + sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor))
        return {name: size for name, size in out.items() if size}

    # -- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Value]:
        """Flat, tensors and numbers only. What differs between ranks has the rank in its key."""
        self._take_all_apart()
        own = f"rank{self.rank}/"
        out: dict[str, Value] = {f"{own}residual/{key}": r.clone() for key, r in self._residuals.items()}
        for key, state in self._states.items():
            for field, value in state.items():
                if not isinstance(value, torch.Tensor | int | float):
                    raise Unsupported(f"cannot save {field!r} of {key}: codec state is tensors and numbers")
                whose = own if field.startswith("own_") else ""
                out[f"{whose}codec/{key}/{field}"] = value.clone() if isinstance(value, torch.Tensor) else value
        return out | {f"{own}entries": len(out)}  # tells a checkpoint that was read in part

    def load_state_dict(
        self, state: Mapping[str, Value], shapes: Mapping[str, torch.Size], device: torch.device
    ) -> None:
        """Takes the codecs' state and this rank's residuals; those of other ranks are passed over.

        `shapes` are those of the model's parameters. Nothing is taken of a state that does not fit.
        """
        own = f"rank{self.rank}/"
        self.check_state_dict(state, shapes)
        residuals: dict[str, torch.Tensor] = {}
        states: dict[str, dict[str, Any]] = {}
        for key, value in state.items():
            kind, _, rest = key.removeprefix(own).partition("/")
            if kind == "codec":
                owner, _, field = rest.rpartition("/")
                kept = value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
                states.setdefault(owner, {})[field] = kept
            elif kind == "residual" and isinstance(value, torch.Tensor):
                name = rest.partition("/")[2]
                home = torch.device("cpu") if self.forms.get(name) == "cpu" else device
                residuals[rest] = value.to(home, copy=True)
        self.drop()
        self._residuals, self._states, self._bundles = residuals, states, {}
        self._has_folded = any(key.startswith(_FOLDED) for key in residuals)

    def check_state_dict(self, state: Mapping[str, Value], shapes: Mapping[str, torch.Size]) -> None:
        """Raises Unsupported for the first field that this rank could not go on with."""
        own = f"rank{self.rank}/"
        found = 0
        for key, value in state.items():
            kind, _, rest = key.removeprefix(own).partition("/")
            if kind == "codec":
                _check_codec_state(key, rest, value, shapes)
            elif kind == "residual" and key.startswith(own):
                stage, _, name = rest.partition("/")
                _check_residual(key, stage, name, value, shapes)
            elif key.startswith(own) and rest + kind != "entries":
                raise Unsupported(f"the state's {key!r} is not a field that gradzip saves: {saved.CURE}")
            found += kind in ("codec", "residual")
        if f"{own}entries" not in state:
            return
        expected = saved.counter(state, f"{own}entries")
        if expected != found:
            raise Unsupported(
                f"the state holds {found} of the {expected} entries that rank {self.rank} saved. A checkpoint of "
                "torch.distributed.checkpoint is read by handle.load_checkpoint(path), which asks for all of them"
            )


def _at_work(residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A residual where and in what it is added to x."""
    # To the CPU a copy that nobody waits for would be read before it is there.
    return wide(residual.to(x.device, non_blocking=x.device.type != "cpu"))


def is_exact(scale: float) -> bool:
    """Whether products with it are exact, as with powers of two: then one rounding less makes no difference."""
    return abs(math.frexp(scale)[0]) == 0.5


def _whole(name: str) -> str:
    """The parameter that a stretch such as `weight[0:100]` is of."""
    return re.sub(r"\[\d+:\d+\]$", "", name)


def _check_codec_state(key: str, rest: str, value: object, shapes: Mapping[str, torch.Size]) -> None:
    owner, _, field = rest.rpartition("/")
    codec, _, part = owner.partition("/")
    name = _whole(part)
    _check_name(name, shapes)
    if codec not in REGISTRY:
        raise Unsupported(f"the state's {key!r} is of a codec that is not registered here{nearest(codec, REGISTRY)}")
    shape = shapes[name]
    if part != name:
        start, stop = (int(n) for n in part.removeprefix(name)[1:-1].split(":"))
        if not 0 <= start < stop <= shape.numel():
            raise Unsupported(f"the state's {key!r} is of values that {name!r} of shape {tuple(shape)} does not have")
        shape = torch.Size([stop - start])
    REGISTRY[codec].check_state(field, key, value, shape)


def _check_residual(key: str, stage: str, name: str, value: object, shapes: Mapping[str, torch.Size]) -> None:
    _check_name(name, shapes)
    if stage == GRADIENT:
        saved.floats(key, value, shapes[name])
        return
    place = re.fullmatch(rf"(?:{_FOLDED})?sum\d+\.(\d+)-(\d+)", stage)
    start, stop = map(int, place.groups()) if place else (0, 0)
    if not 0 <= start < stop <= shapes[name].numel():
        raise Unsupported(
            f"the state's {key!r} is of values that {name!r} of shape {tuple(shapes[name])} does not have"
        )
    saved.floats(key, value, numel=stop - start)


def _check_name(name: str, shapes: Mapping[str, torch.Size]) -> None:
    if name not in shapes:
        raise Unsupported(f"the state is of another model: this one has no parameter {name!r}{nearest(name, shapes)}")

"""attach: what it accepts, and the hook that DDP calls.

DDP calls the hook for one bucket after the other, in the same order on all ranks. The hook hands the bucket's gradients
to the backward pass that is under way: exchange/on_stream/backward.py enqueues them on CUDA streams, and
exchange/on_host/backward.py sends them by the channel that all handles of these ranks share. DDP waits for the futures
at the end of backward.
"""
# Annotations are not postponed in this file: DDP looks at those of the hook and accepts classes only.

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..codecs import Codec
from ..errors import Unsupported, nearest
from ..exchange.on_stream import runner as on_stream
from ..exchange.peers import channel
from ..option import Option
from ..plan import Plan
from ..policy import Fixed, Policy, as_policy
from ..sensitivity.survey import unwrap
from . import default, runners, settings
from .default import Default
from .disabled import Disabled
from .handle import Handle
from .settings import CHECK, checks_results
from .ways import parameter_names

SWITCH = "GRADZIP"  # off: attach does nothing
POLICY = "GRADZIP_POLICY"  # a codec's text form, auto, or the path of a plan.json: used instead of what the code says

# What keeps gradients in pieces, and what can be had there today. By the names of classes: none is imported for this.
_SHARDED = {
    "FullyShardedDataParallel": "FSDP reduces in 16 bits with MixedPrecision(reduce_dtype=torch.bfloat16)",
    "FSDPModule": "FSDP2 reduces in 16 bits with MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)",
    "DeepSpeedEngine": "DeepSpeed has communication_data_type, and compressed optimizers such as 1-bit Adam",
}
_COMPOSABLE = "torch.distributed._composable.replicate"  # modules that define the classes which replicate() mixes in
# Where Lightning Fabric and torch.compile keep the model that they wrap. Fabric first: it also shows what is inside.
_WRAPPERS = ("_forward_module", "_orig_mod")


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    policy: str | Codec | Option | Policy | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    mesh: DeviceMesh | None = None,
    timeout: timedelta | None = None,
    heartbeat: timedelta | None = None,
    transport: str | None = None,
) -> Handle:
    """Compresses the gradients of a DDP model from its next backward on. Call it on all ranks.

    The policy is a codec's text form such as "powersgd:rank=2", a Codec, an Option or a Policy. The default is "noise"
    with Adam, AdamW and SGD, "noise:share=0.3%" with Muon, and "gcomp" (near-lossless) otherwise; without an optimizer
    it is "gcomp:mode=lossless" (hooks/default.py).
    A list of optimizers is one for each part of the model; a parameter's rules come from the one that holds it.
    `scaler` is the GradScaler of mixed-precision training. `mesh` tells which ranks share a host (two dimensions, hosts
    first); by default the launcher's LOCAL_WORLD_SIZE does. A rank counts as dead when its heartbeat stops for
    `heartbeat` (30 s), or one message takes longer than `timeout` (30 min). `transport` is refused: what carries
    messages follows from model and policy (hooks/runners.py).

    "auto" profiles the first steps of the run and lets a few codecs race on the next ones; "auto:quality=near",
    "auto:quality=lossy" and "auto:codecs=gcomp,powersgd" say which (planner/auto.py).

    The environment has the last word: GRADZIP=off leaves the model as it is, GRADZIP_POLICY is used instead of
    `policy`. Set them alike on all ranks.
    """
    ddp = _unwrapped(model)
    _check(ddp)
    optimizers = _optimizers(optimizer)
    taken = _default(ddp, optimizers) if policy is None and not os.environ.get(POLICY, "").strip() else None
    _compare_settings(ddp, policy, scaler, timeout, heartbeat, transport, taken)
    runners.check_unchosen(transport)
    if _switched_off():
        return Disabled()
    policy = _from_environment() or policy
    arguments: dict[str, Any] = {"scaler": scaler, "mesh": mesh, "timeout": timeout, "heartbeat": heartbeat}
    if taken is not None:
        policy, arguments["default"] = taken.policy, taken
    assert policy is not None
    if isinstance(policy, str) and policy.partition(":")[0] == "auto":
        return _automatic(ddp, optimizers, policy, arguments)
    return _attached(ddp, optimizers, as_policy(policy), arguments)


def _attached(
    model: DistributedDataParallel,
    optimizers: Sequence[torch.optim.Optimizer],
    policy: Policy,
    arguments: dict[str, Any],
) -> Handle:
    handle = Handle(model, optimizers, policy, **arguments)  # complains before anything has changed
    slot = _slots.get(model)
    if slot is None:
        slot = _slots[model] = _Slot(model.process_group)
        model.register_comm_hook(slot, _hook)
    slot.handle = handle
    handle.on_detach = slot.leave
    return handle


def _automatic(
    model: DistributedDataParallel,
    optimizers: Sequence[torch.optim.Optimizer],
    policy: str,
    arguments: dict[str, Any],
) -> Handle:
    from ..planner.auto import Auto, Pilot  # who does not plan need not load the planner

    wanted = Auto.parse(policy)
    if not optimizers:
        raise Unsupported("auto counts the optimizer's steps: attach(model, optimizer, 'auto')")
    if len(optimizers) > 1:
        raise Unsupported(
            f"auto plans with one optimizer, and was given {len(optimizers)}: name a codec instead, such as "
            "attach(model, optimizers, 'gcomp'); `gradzip profile` and `gradzip plan` help to choose it"
        )
    handle = _attached(model, optimizers, Fixed("identity"), arguments)
    handle.pilot = Pilot(handle, model, optimizers[0], wanted)
    return handle


# -- what is accepted --------------------------------------------------------------------------------------------------


def _unwrapped(model: object) -> DistributedDataParallel:
    """The DDP model inside the wrapper of torch.compile or Lightning Fabric."""
    while not isinstance(model, DistributedDataParallel):
        kinds = [kind.__name__ for kind in type(model).__mro__]
        if any(kind.__module__.startswith(_COMPOSABLE) for kind in type(model).__mro__):
            raise Unsupported(
                f"attach cannot compress the gradients of {kinds[0]}, a module that replicate() of "
                "torch.distributed._composable has changed: gradzip works with DistributedDataParallel. "
                "Write attach(DistributedDataParallel(model), optimizer) instead of replicate(model)"
            )
        for name, today in _SHARDED.items():
            if name in kinds:
                raise Unsupported(
                    f"attach works on DistributedDataParallel models, and {kinds[0]} keeps gradients in shards: "
                    f"gradzip cannot reach them yet. What works today: {today}; or DDP, if the model fits on each GPU"
                )
        inner = next((m for name in _WRAPPERS if isinstance(m := getattr(model, name, None), nn.Module)), None)
        if inner is None:
            raise Unsupported(
                f"attach needs a DistributedDataParallel model, not {kinds[0]}: "
                "wrap it first, as in attach(DistributedDataParallel(model), optimizer)"
            )
        model = inner
    return model


def _optimizers(given: Any) -> list[torch.optim.Optimizer]:
    """The optimizers inside what Accelerate, Lightning and others wrap around them."""
    several = list(given) if isinstance(given, Sequence) else [] if given is None else [given]
    if given is not None and not several:
        raise Unsupported("attach was given an empty list of optimizers: give the model's, or leave the argument out")
    found = [unwrap(each) for each in several]
    for each in found:
        if not isinstance(each, torch.optim.Optimizer):
            raise Unsupported(f"{type(each).__name__} is no torch.optim.Optimizer, and has none as .optimizer")
    return found


def _check(model: DistributedDataParallel) -> None:
    if getattr(model, "_use_python_reducer", False):
        raise Unsupported(
            "this model averages inside the compiled graph (DDP's python reducer), where no hook can compress: "
            "set torch._dynamo.config.optimize_ddp to True, the default, before DistributedDataParallel(model)"
        )
    if getattr(model, "skip_all_reduce_unused_params", False):
        raise Unsupported(
            "this model leaves out buckets that no rank uses (skip_all_reduce_unused_params), and gradzip would wait "
            "for them: leave that out, and find_unused_parameters=True takes care of them"
        )
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1 or any(device.type not in ("cpu", "cuda") for device in devices):
        names = ", ".join(sorted(map(str, devices)))
        raise Unsupported(f"attach works on models on the CPU or on one GPU, and this one has parameters on {names}")
    if model in _slots:
        if _slots[model].handle is not None:
            raise Unsupported("this model has a handle already: change its policy by set_policy, or detach it first")
    elif model._comm_hooks:
        name = getattr(model._comm_hooks[0][0], "__qualname__", str(model._comm_hooks[0][0]))
        raise Unsupported(
            f"this model has another hook, {name}, and DDP takes one for good: leave out register_comm_hook and DDP's "
            "own mixed_precision, and make the model anew"
        )


def _default(model: DistributedDataParallel, optimizers: Sequence[torch.optim.Optimizer]) -> Default | None:
    """What is taken where no policy is named; None where this process leaves the model as it is."""
    if _switched_off():
        return None
    names = {p: name for p, name in parameter_names(model).items() if p.requires_grad}
    device = next((p.device for p in names if p.device.type == "cuda"), None)
    reason = None if device is None else on_stream.reason_against(model.process_group, device)
    return default.choose(optimizers, names, reason)


def _switched_off() -> bool:
    word = os.environ.get(SWITCH, "").strip().lower()
    if word not in ("", "on", "off"):
        raise Unsupported(f"{SWITCH}={word!r}{nearest(word, ('on', 'off'))}: set it to off, to on, or not at all")
    return word == "off"


def _compare_settings(
    model: DistributedDataParallel,
    policy: str | Codec | Option | Policy | None,
    scaler: torch.amp.GradScaler | None,
    timeout: timedelta | None,
    heartbeat: timedelta | None,
    transport: str | None,
    taken: Default | None,
) -> None:
    """These settings decide whether ranks meet at all.

    Policies are compared later: by the host runner in each step, by the stream runner when they change.
    """
    alike = {
        SWITCH: "off" if _switched_off() else "on",
        CHECK: "1" if checks_results() else "",
        POLICY: os.environ.get(POLICY, "").strip(),
        runners.TRANSPORT: os.environ.get(runners.TRANSPORT, "").strip().lower(),
        "transport=": transport or "",
        "timeout=": str(timeout or ""),
        "heartbeat=": str(heartbeat or ""),
        "scaler=": type(scaler).__name__ if scaler is not None else "",
        "policy=": policy if isinstance(policy, str) and policy.partition(":")[0] == "auto" else "",
        "the default": "" if taken is None else taken.words,
    }
    settings.compare(model.process_group, alike, timeout or channel.TIMEOUT)


def _from_environment() -> str | Policy | None:
    word = os.environ.get(POLICY, "").strip()
    return Plan.load(word) if word.endswith(".json") else word or None


# -- the hook ----------------------------------------------------------------------------------------------------------


@dataclass
class _Slot:
    """A model's hook. DDP takes one hook for good, so it outlives the handle and averages plainly without one."""

    group: dist.ProcessGroup
    handle: Handle | None = None

    def leave(self) -> None:
        self.handle = None


_slots: "weakref.WeakKeyDictionary[DistributedDataParallel, _Slot]" = weakref.WeakKeyDictionary()


def _hook(slot: _Slot, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return _plain_average(slot.group, bucket) if slot.handle is None else slot.handle.reduce(bucket)


def _plain_average(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does without a hook, to the bit."""
    buffer = bucket.buffer().mul_(1 / dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
    return averaged

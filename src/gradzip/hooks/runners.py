"""Which runner carries the gradients of a step: see exchange/on_stream/runner.py and exchange/on_host/runner.py."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..errors import Unsupported
from ..exchange.backward import Backward
from ..exchange.codecs import stream_codec
from ..exchange.gradients import PLAIN, Way
from ..exchange.on_stream import factors as factors_on_device
from ..exchange.on_stream import runner as on_stream
from ..exchange.peers.channel import Channel, open_channel
from ..exchange.peers.transports import NCCL, asked_for
from ..routes import FACTORS

STREAM, HOST, TORCH = "stream", "host", "torch"

# Whether the host runner carries gradients of models on GPUs, in the place of collectives/. It has run on emulated
# kernels alone. To turn it on takes an NVIDIA GPU: `pytest -m gpu tests/test_from_device_gpu.py` must pass, under
# compute-sanitizer too, and `bench/exchange_gpu.py --host-runner both` must show steps no longer than by collectives/,
# with replicas identical. Goals for four ranks that share an H200 at 10 Gbit/s, keep=7, as `bound` there:
# 1.15 on ResNet-18, 1.05 on ResNet-50, 1.0 on GPT-2; cpu_ms of at most 8 on ResNet-50.
ON_HOST_RUNNER_FROM_GPU = False

# What has been run on streams of real GPUs: codecs by name, "a policy that learns", and "error feedback" of codecs of
# one round. Others stay where they were. Before one is added, `pytest -m gpu tests/test_on_stream_gpu.py`, which has
# all of them, and bench/exchange_gpu.py, for example with "stream sign", must have run with it on: replicas identical,
# a step not longer than on the host runner, and no wait of the host in hooks once DDP has rebuilt its buckets. For
# powersgd: ResNet-50 in 50 ms and GPT-2 in 70 ms at 10 Gbit/s.
RUN_ON_GPUS = {"noise", "int8", "int4", "fp8", "cast", "identity"}
LEARNS, FEEDS_BACK = "a policy that learns", "error feedback"


def carries_from(device: torch.device, transport: str | None) -> bool:
    """Whether the host runner may carry gradients that lie there; by NCCL they go in collectives/."""
    if device.type == "cpu":
        return True
    return ON_HOST_RUNNER_FROM_GPU and asked_for(transport) != NCCL


def by_collectives(device: torch.device, transport: str | None) -> bool:
    """Whether collectives/ serves a model: those on GPUs. Who asks for NCCL without a GPU is told so there."""
    return device.type != "cpu" or asked_for(transport) == NCCL


def connect(
    model: DistributedDataParallel,
    device: torch.device,
    mesh: DeviceMesh | None,
    timeout: timedelta | None,
    heartbeat: timedelta | None,
    transport: str | None,
) -> tuple[Channel, type[Backward]]:
    """The channel of a model's ranks, and what backward passes of the host are made of; Unsupported where it cannot be.

    Models on CPUs do not load collectives/.
    """
    kind: type[Backward] = Backward
    if by_collectives(device, transport):
        from ..collectives import backward, transports

        kind = backward.PipelineBackward
        if transports.choose(transport, model.process_group, device) == NCCL:
            transports.check_model(model)
    return open_for(model.process_group, device, mesh, timeout, heartbeat, transport), kind


def open_for(
    group: dist.ProcessGroup,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    timeout: timedelta | None = None,
    heartbeat: timedelta | None = None,
    transport: str | None = None,
) -> Channel:
    """The channel of these ranks; call it on all of them at the same point."""
    about = group, device, mesh, timeout, heartbeat
    if not by_collectives(device, transport):
        return open_channel(*about)
    from ..collectives import channel

    return channel.open_channel(*about, transport)


def choose(
    ways: Mapping[str, Way],
    types: Mapping[str, torch.dtype],
    device: torch.device,
    group: dist.ProcessGroup,
    learns: bool,
    patient: bool = False,
) -> str:
    """The stream runner where every gradient can go by it; Unsupported where one could go by nothing else.

    `types` are those of the parameters. `learns`: the policy looks at means. `patient`: what is lost of parameters that
    no rank has used has to wait, which the host finds out. Plain averaging stays with torch.
    """
    reason = on_stream.reason_against(group, device)
    other = next((way for name, way in ways.items() if not _streams(way, types[name], patient)), None)
    factors = None if reason or other else next((way for way in ways.values() if way.route == FACTORS), None)
    if factors is not None:
        # Means of other types are left to the host: factors and what travels with them are float32.
        wide = all(types[name] == torch.float32 for name, way in ways.items() if way.late)
        other = factors if patient or not wide else None
    unseen = learns and LEARNS not in RUN_ON_GPUS
    if reason is None and other is None and not unseen and any(way.kind != PLAIN for way in ways.values()):
        return STREAM
    whole = next((way.codec for way in ways.values() if way.codec.shaped), None)
    if device.type == "cpu" or whole is None:
        return HOST
    if reason is None and other is not None:
        reason = (
            f"other gradients of the model have {other.kind}, and on a GPU the two cannot be mixed: use noise, "
            "int8, int4, fp8, cast and identity for all of them"
        )
    elif reason is None:
        reason = "the policy looks at averaged gradients, which stay on the GPU: use one that does not, such as Fixed"
    raise Unsupported(f"{whole} on {device}: {reason}")


def _streams(way: Way, dtype: torch.dtype, patient: bool) -> bool:
    if way.codec.name not in RUN_ON_GPUS:
        return False
    if way.route == FACTORS:
        return factors_on_device.serves(way.codec)
    codec = stream_codec(way.codec, way.route)
    if codec is None or dtype.itemsize > codec.widest:
        return False
    return not codec.feeds_back or (FEEDS_BACK in RUN_ON_GPUS and not patient)

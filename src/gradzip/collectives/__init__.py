"""Compressed collectives of GPU models: how messages of gradients become their mean over all ranks.

layout      stretches of tensors: how they are dealt out and cut into chunks
terms       what the parts below say to each other
executor    runs any route of routes.py on a chunk; says what is to be exchanged, sends nothing itself
mean        the mean of one flat tensor, without the executor
coder       codes stretches: frames, floors, error feedback
together    codes many of them in one call of an engine
message     gradients that travel together, and the jobs they become
backward    one backward pass
checks      the grids and results that ranks compare
pipeline    threads that code one chunk while others are on the wire
carrier     large exchanges from GPU to GPU, in one order on all ranks
nccl        the communicator that carries them
transports  whether it does, or Gloo
channel     a channel of exchange/ with pipeline and carrier
"""

from .channel import PipelineChannel, open_channel
from .message import Message, average_plainly, single, submit
from .pipeline import Job
from .terms import AllReduce, Exchange, Parts, Steps

__all__ = [
    "AllReduce",
    "Exchange",
    "Job",
    "Message",
    "Parts",
    "PipelineChannel",
    "Steps",
    "average_plainly",
    "open_channel",
    "single",
    "submit",
]

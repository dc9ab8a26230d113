"""Compressed collectives: how messages of gradients become their mean over all ranks.

layout      stretches of tensors: how they are dealt out and cut into chunks
terms       what the parts below say to each other
executor    runs any route of routes.py on a chunk; says what is to be exchanged, sends nothing itself
mean        the mean of one flat tensor, without the executor
coder       codes stretches: frames, floors, error feedback
together    codes many of them in one call of an engine
message     gradients that travel together, and the jobs they become
elsewhere   plain averaging on the model's own process group
pipeline    threads that code one chunk while others are on the wire
gloo        bytes from rank to rank, from the host's memory
carrier     large exchanges from GPU to GPU, in one order on all ranks
nccl        the communicator that carries them
transports  which of the two is used
health      heartbeats and last words
channel     all of that for one group of ranks
topology    which ranks share a host
watch       when data is under way, and what happens meanwhile
"""

from .channel import Channel, open_channel
from .elsewhere import Elsewhere
from .flat import flatten, unflatten
from .message import Message, Outcome, average_plainly, route_of, single, submit
from .pipeline import Job
from .terms import AllReduce, Exchange, Parts, Steps
from .topology import Topology

__all__ = [
    "AllReduce",
    "Channel",
    "Elsewhere",
    "Exchange",
    "Job",
    "Message",
    "Outcome",
    "Parts",
    "Steps",
    "Topology",
    "average_plainly",
    "flatten",
    "open_channel",
    "route_of",
    "single",
    "submit",
    "unflatten",
]

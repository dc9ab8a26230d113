"""A few steps of three ranks by the interpreter: what two ways of coding the same message must have alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradzip.exchange.coding import Message, MessageCodec
from gradzip.exchange.compiler import compile_route
from gradzip.exchange.interpreter import Interpreter
from gradzip.exchange.topology import Topology
from gradzip.feedback import Memory
from gradzip.routes import NAMED

RANKS, STEPS = 3, 3


def means_and_residuals(
    codec: MessageCodec, route: str, sizes: Sequence[int], gradients_of: Callable[[int, int], list[torch.Tensor]]
) -> list[torch.Tensor]:
    """`gradients_of` a step and a rank, of these sizes."""
    names, topology = [f"layer.{number}" for number in range(len(sizes))], Topology.of_ranks(0, list(range(RANKS)))
    program = compile_route(codec.text, NAMED[route], names, sizes, torch.float32, topology, codec.codes_sums)
    memories, found = [Memory(rank) for rank in range(RANKS)], list[torch.Tensor]()
    for step in range(STEPS):
        gradients = [gradients_of(step, rank) for rank in range(RANKS)]
        about = [Message(names, torch.float32, rank, RANKS, step, memory=memories[rank]) for rank in range(RANKS)]
        found += [mean for rank in Interpreter(program, codec, about).run(gradients) for mean in rank]
        for memory in memories:
            memory.commit()
            state = memory.state_dict()
            found += [value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]
    return found

"""attach: gradient exchange for DistributedDataParallel.

entry         attach itself: what it accepts, environment variables, the hook that DDP calls
default       the policy that attach takes where none is named
handle        what attach returns: steps, statistics, checkpoints
runners       which runner carries the gradients of a step
ways          finds what each gradient goes through under a policy
buckets       the gradients in DDP's buckets, by name
settings      environment variables, and whether ranks set them alike
checkpoint    states from torch.distributed.checkpoint, and on another number of ranks
assumptions   what near mode takes for granted about the optimizer, watched
noise         the share of noise in steps, for stats() and one warning
early_fetch   brings numbers that live on a GPU to the host before backward asks for them
metrics       what Handle.log writes
progress      what a plan promised beside what happens
trace         what Handle.trace writes
report        the lines that rank 0 logs
disabled      the handle under GRADZIP=off
"""

from .entry import attach
from .handle import Handle

__all__ = ["Handle", "attach"]

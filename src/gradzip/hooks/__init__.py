"""attach: gradient exchange for DistributedDataParallel.

entry       attach itself: what it accepts, the environment's word, the hook that DDP calls
handle      what attach returns: steps, statistics, checkpoints
checkpoint  states from torch.distributed.checkpoint, and on another number of ranks
off         the handle under GRADZIP=off
ways        what each gradient goes through under a policy
buckets     the gradients in DDP's buckets, by name
ahead       numbers on a GPU that backward will ask for
premises    what near mode takes for granted about the optimizer, watched
metrics     what Handle.log writes
progress    what a plan promised beside what happens
trace       what Handle.trace writes
report      the lines that rank 0 says
"""

from .entry import attach
from .handle import Handle

__all__ = ["Handle", "attach"]

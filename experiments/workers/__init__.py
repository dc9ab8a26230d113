"""W workers on one device: each worker's gradient is computed in turn, then the library's codecs reduce them.

    exact      the library's own exchange, rank by rank, with the bytes handed over in memory: what a cluster does
    stacked    the same values for all workers at once, for the codecs that the tables need: fast on a GPU
    rounding   what gcomp makes of a value, as arithmetic
    training   gradients, batch norm, learning rates, the loop
    data       readers for the data sets; models: resnet, text models and so on

tests/test_workers.py holds `exact` against real processes under DDP, and `stacked` against `exact`, bit for bit.
"""

"""The exchange: how gradients become their mean over all ranks.

parts         how tensors are dealt out to the ranks that add them up; the table that engines take
"""

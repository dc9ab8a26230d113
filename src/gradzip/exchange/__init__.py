"""The exchange: how gradients become their mean over all ranks.

parts         how tensors are dealt out to the ranks that add them up; the table that engines take
program       an exchange as a list of steps
compiler      makes the program of a route and a message's layout
coding        what a codec offers that codes whole messages; the values as they are, or cast to 16 bits
noise         the codec noise for whole messages
codecs        which codecs code whole messages
slots         sizes of the slots that frames of unknown size travel in
interpreter   runs a program for all ranks in one process, in plain torch: the oracle
on_host       runs a program over Gloo, from and to the memory of the CPU
on_stream     runs messages of known size on CUDA streams over NCCL, without waiting for the host
on_device     such a message: its buffers on the GPU, and what codes it there
checks        the row of numbers by which the host learns what became of a step on streams
"""

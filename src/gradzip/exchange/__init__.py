"""The exchange: how gradients become their mean over all ranks.

parts           how tensors are dealt out to the ranks that add them up; the table that engines take
program         an exchange as a list of steps
compiler        makes the program of a route and a message's layout
coding          what a codec offers that codes whole messages; the values as they are, or cast to 16 bits
message_codecs  which codecs code whole messages on each runner, and which route each takes
rounds          codecs of several rounds, and sums of frames: generators that yield what is to be averaged
interpreter     runs a program for all ranks in one process, in plain torch: the oracle
way             what a gradient goes through in a step: codec, route and grid
gradients       the messages that the gradients of a bucket form
on_host/        the host runner: backward passes whose programs run over Gloo, from the memory of the CPU or of a GPU
on_stream/      the stream runner: backward passes on CUDA streams over NCCL, without waiting for the host
peers/          a process's way to the others: connections, heartbeat, threads that send
plain           uncompressed averaging through DDP's own process group
comparisons     what ranks compare besides their messages
shared_book     the code book that all ranks make together (gcomp:book=shared)
calls           exchanges without DDP: means of any tensors, and reduce-scatters; not public yet
topology        which ranks share a host, and the groups that routes speak of
recording       for how long data was under way, and what happened when
flattening      tensors as flat ones, in the order in which their values lie in memory
finiteness      whether gradients are finite
outcome         what came of a message
"""

"""The exchange: how gradients become their mean over all ranks.

parts         how tensors are dealt out to the ranks that add them up; the table that engines take
program       an exchange as a list of steps
compiler      makes the program of a route and a message's layout
coding        what a codec offers that codes whole messages; the values as they are, or cast to 16 bits
noise         the codec noise for whole messages
codecs        which codecs code whole messages
rounds        codecs of several rounds, and sums of frames: generators that yield what is to be averaged
rounds_on_host  runs these on the host
interpreter   runs a program for all ranks in one process, in plain torch: the oracle
on_host       runs a program over Gloo, from and to the memory of the CPU
on_stream     runs messages of known size on CUDA streams over NCCL, without waiting for the host
on_device     such a message: its buffers on the GPU, and what codes it there
plain         uncompressed averaging through DDP's own process group
rows          rows of numbers that ranks compare beside their gradients, in a thread of its own
calls         exchanges without DDP: means of any tensors, and reduce-scatters; not public yet
slots         sizes of the slots that frames travel in on streams
topology      which ranks share a host, and the groups that routes speak of
transports    what users may ask for to carry large messages
channel       a process's way to the others: connections, heartbeat, threads that use them
gloo          bytes from rank to rank, from the host's memory; sockets and senders serve it
heartbeat     who is alive, and what went wrong
recording     for how long data was under way, and what happened when
buffers       memory that is used again
flattening    tensors as flat ones, in the order in which their values lie in memory
finiteness    whether gradients are finite
outcome       what came of a message
checks        the row of numbers by which the host learns what became of a step on streams
"""

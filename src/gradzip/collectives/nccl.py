"""A communicator of NCCL's own library: bytes from GPU to GPU.

Called directly and not through torch's process group: that one ends the process when a peer dies, where here every rank
is to say what happened. The library is the one that torch has loaded.

An exchange holds its stream until all peers have begun theirs, and messages are matched by the order in which they are
issued: whoever calls must issue the same exchanges in the same order on all ranks, one at a time (carrier.py does).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from queue import SimpleQueue

import torch
from torch.distributed.distributed_c10d import Store

from ..errors import Unsupported
from ..exchange.peers.gloo import Broken

_LIBRARY = "libnccl.so.2"
_ID_BYTES = 128
_TYPES = {torch.uint8: 1, torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}
_SUM = 0
_SUCCESS, _IN_PROGRESS = 0, 7
_ABORT = 5.0  # seconds that the end may take; then its thread is left to itself

Landed = Callable[[], bool]  # whether the data of an exchange is there


class _Id(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * _ID_BYTES),)


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as cause:
        raise Unsupported(
            f"exchanges over NCCL need its library, and {_LIBRARY} cannot be loaded ({cause}): install a torch that "
            "brings it, or set GRADZIP_TRANSPORT=gloo"
        ) from cause
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), number, _Id, number]
    library.ncclSend.argtypes = library.ncclRecv.argtypes = [pointer, size, number, number, pointer, pointer]
    library.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    library.ncclCommGetAsyncError.argtypes = [pointer, ctypes.POINTER(number)]
    for name in ("ncclCommAbort", "ncclCommFinalize", "ncclCommDestroy"):
        getattr(library, name).argtypes = [pointer]
    library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = [number], ctypes.c_char_p
    return library


def version() -> str:
    """Of the library; Unsupported where there is none."""
    found = ctypes.c_int()
    _check(_library().ncclGetVersion(ctypes.byref(found)), "ncclGetVersion")
    return f"{found.value // 10000}.{found.value // 100 % 100}.{found.value % 100}"


def _check(code: int, what: str) -> None:
    if code not in (_SUCCESS, _IN_PROGRESS):
        said = _library().ncclGetErrorString(code).decode(errors="replace")
        raise Broken(None, RuntimeError(f"{what}: {said}; NCCL_DEBUG=WARN says more"))


class Communicator:
    """One GPU of each rank. Made on all ranks at the same point, which waits for all of them."""

    def __init__(self, store: Store, rank: int, world: int, device: torch.device) -> None:
        self.rank, self.world, self.device = rank, world, device
        self._lock = threading.Lock()
        self._comm: ctypes.c_void_p | None = None
        library, number = _library(), _Id()
        if rank == 0:
            _check(library.ncclGetUniqueId(ctypes.byref(number)), "ncclGetUniqueId")
            store.set("nccl", bytes(number).hex())
        number = _Id.from_buffer_copy(bytes.fromhex(store.get("nccl").decode()))
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            comm = ctypes.c_void_p()
            _check(library.ncclCommInitRank(ctypes.byref(comm), world, number, rank), "ncclCommInitRank")
            self._comm = comm
            self._last_task: SimpleQueue[Callable[[], object]] = SimpleQueue()
            self._ended = threading.Event()
            threading.Thread(target=self._await_the_end, name="gradzip-nccl-end", daemon=True).start()
            try:
                self._warm_up()
            except BaseException:
                self.abort()
                raise

    def _warm_up(self) -> None:
        """Connections are made when they are first used, which waits for the peer: better now than in training."""
        there = {i: torch.zeros(8, dtype=torch.uint8, device=self.device) for i in range(self.world) if i != self.rank}
        back = {i: torch.empty_like(part) for i, part in there.items()}
        total = torch.zeros(1 << 20, device=self.device)
        torch.cuda.synchronize(self.device)
        for landed in (self.exchange(back, there), self.sum(total)):
            while not landed():
                self.check()
                time.sleep(1e-3)
        self._stream.synchronize()

    def exchange(self, into: Mapping[int, torch.Tensor], out: Mapping[int, torch.Tensor]) -> Landed:
        """Starts to send bytes to ranks and to receive from others exactly as many as they send. None is empty."""
        library = _library()

        def issue(comm: ctypes.c_void_p, stream: int) -> None:
            byte = _TYPES[torch.uint8]
            _check(library.ncclGroupStart(), "ncclGroupStart")
            try:
                for rank, part in out.items():
                    _check(library.ncclSend(part.data_ptr(), part.numel(), byte, rank, comm, stream), "ncclSend")
                for rank, part in into.items():
                    _check(library.ncclRecv(part.data_ptr(), part.numel(), byte, rank, comm, stream), "ncclRecv")
            finally:
                code = library.ncclGroupEnd()
            _check(code, "ncclGroupEnd")

        return self._issue(issue)

    def sum(self, tensor: torch.Tensor) -> Landed:
        """Starts NCCL's own sum over all ranks, in place."""
        library, kind = _library(), _TYPES[tensor.dtype]

        def issue(comm: ctypes.c_void_p, stream: int) -> None:
            place = tensor.data_ptr()
            _check(library.ncclAllReduce(place, place, tensor.numel(), kind, _SUM, comm, stream), "ncclAllReduce")

        return self._issue(issue)

    def sums(self, dtype: torch.dtype) -> bool:
        return dtype in _TYPES

    def _issue(self, issue: Callable[[ctypes.c_void_p, int], None]) -> Landed:
        with self._lock, torch.cuda.device(self.device):
            if self._comm is None:
                raise Broken(None, RuntimeError("the communicator is closed"))
            issue(self._comm, self._stream.cuda_stream)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._stream)
        return arrived.query

    def check(self) -> None:
        """Broken if NCCL has lost a peer; what is under way then never arrives."""
        if not self._lock.acquire(blocking=False):
            return  # something is being issued, or it is being closed
        try:
            if self._comm is None:
                raise Broken(None, RuntimeError("the communicator is closed"))
            state = ctypes.c_int()
            _check(_library().ncclCommGetAsyncError(self._comm, ctypes.byref(state)), "ncclCommGetAsyncError")
            _check(state.value, "NCCL")
        finally:
            self._lock.release()

    def abort(self) -> None:
        """Ends what is under way, which frees the stream and soon ends it on the peers."""
        self._give_up(_library().ncclCommAbort)

    def close(self) -> None:
        """Sends what the library still holds, and leaves."""

        def leave(comm: ctypes.c_void_p) -> None:
            _library().ncclCommFinalize(comm)
            _library().ncclCommDestroy(comm)

        self._give_up(leave)

    def _give_up(self, how: Callable[[ctypes.c_void_p], object]) -> None:
        held = self._lock.acquire(timeout=1.0)  # a call that is stuck is what an abort is to end
        try:
            comm, self._comm = self._comm, None
        finally:
            if held:
                self._lock.release()
        if comm is not None:
            self._last_task.put(lambda: how(comm))
            self._ended.wait(_ABORT)

    def _await_the_end(self) -> None:
        """A thread, as the end may take for ever; there from the first, as a process that ends starts none."""
        task = self._last_task.get()
        with suppress(Exception), torch.cuda.device(self.device):
            task()
        self._ended.set()

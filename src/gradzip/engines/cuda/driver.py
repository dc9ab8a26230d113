"""Compiles kernels with NVRTC and launches them through the CUDA driver: both come with torch and its driver.

CUDA C++ rather than Triton because one warp per block needs what Triton hides: tables and stream windows in shared
memory, votes, and several independent warps per group. There is still no build step: a kernel is compiled when it is
first used (about a second) and kept in the user's cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch

from ...errors import EngineError
from . import kernel_cache

KERNELS = Path(__file__).parent / "kernels"
# One source, in this order: later files use what earlier ones define.
FILES = (
    *(
        "common",
        "values",
        "tables",
        "lanes",
        "encode_fixed",
        "encode_lanes",
        "decode_rows",
        "decode",
        "small",
        "small_decode",
    ),
    *("packing", "select"),  # for other codecs
)
# Kernels whose names begin so are made of these files alone.
_UNITS = {
    "noise_row": ("common", "noise", "noise_row"),
    "lowrank_": ("common", "lowrank"),
    "restore": ("common", "restore"),
    "noise_": ("common", "noise", "noise_encode", "noise_decode"),
    "scaled_": ("common", "noise", "scaled"),
    "pieces_": ("common", "values", "pieces"),
}
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_RESERVED_SHARED = 1024  # what the system takes of every group's shared memory
_OPTIONS = ("--std=c++17", "--fmad=false", "--restrict")


def source(kernel: str = "") -> str:
    """A kernel and what it is compiled with, as one text; line numbers in messages are those of the files."""
    names = next((files for prefix, files in _UNITS.items() if kernel.startswith(prefix)), FILES)
    return "\n".join(f'#line 1 "{name}.cuh"\n{(KERNELS / f"{name}.cuh").read_text("utf-8")}' for name in names)


def _entry(kernel: str) -> str:
    """The name, in profilers too, under which a function of the source with its template arguments is launched."""
    return f"gradzip_{kernel.partition('<')[0]}"


def _text(kernel: str, threads: int, least: int) -> str:
    bounds = f'extern "C" __global__ void __launch_bounds__({threads}, {least})'
    return f"{source(kernel)}\n{bounds} {_entry(kernel)}(const __grid_constant__ Args a) {{ {kernel}(a); }}\n"


# --- NVRTC -------------------------------------------------------------------------------------------------------


@cache
def _nvrtc() -> ctypes.CDLL:
    """The compiler library that torch ships with, or that of a CUDA toolkit."""
    if torch.version.cuda is None:
        raise EngineError("this torch is built without CUDA, and the cuda engine needs its compiler library (NVRTC)")
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    site = Path(torch.__file__).parent.parent
    places = [
        *sorted(site.glob(f"nvidia/*/lib/{name}")),
        *sorted((site / "torch" / "lib").glob("libnvrtc*.so*")),
        Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "lib64" / name,
    ]
    for place in [name, *map(str, places)]:
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise EngineError(f"{name} is not found: install nvidia-cuda-nvrtc for CUDA {torch.version.cuda}, or set CUDA_HOME")


def require_compiler() -> None:
    """Raises EngineError where kernels cannot be compiled."""
    _nvrtc()


def _compile(text: str, architecture: str) -> bytes:
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"gradzip.cu", 0, None, None)
    options = [option.encode() for option in (*_OPTIONS, f"--gpu-architecture={architecture}")]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise EngineError(f"NVRTC cannot compile for {architecture}: {log.value.decode(errors='replace')[:4000]}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    binary = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, binary)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw


def _binary(kernel: str, threads: int, least: int, architecture: str) -> bytes:
    """A compiled kernel, from the cache folder where it is there."""
    text = _text(kernel, threads, least)
    key = hashlib.sha256(f"{text}{_OPTIONS}{architecture}{torch.version.cuda}".encode()).hexdigest()[:32]
    known = kernel_cache.read(f"{key}.cubin")
    if known is not None:
        return known
    binary = _compile(text, architecture)
    kernel_cache.write(f"{key}.cubin", binary)
    return binary


# --- The driver --------------------------------------------------------------------------------------------------


@cache
def _cuda() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as cause:
        raise EngineError(f"the CUDA driver is not found: {cause}") from cause
    library.cuStreamSynchronize.argtypes = [ctypes.c_void_p]
    return library


@cache
def _quick() -> ctypes.PyDLL:
    """The same for calls that return at once: they keep Python's lock, which would take longer to get back.

    No types of arguments are set: those given are ready to be passed, and converting them would take most of the call.
    """
    return ctypes.PyDLL("libcuda.so.1")


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


def _check(code: int, what: str) -> None:
    if code:
        name = ctypes.c_char_p()
        _cuda().cuGetErrorName(code, ctypes.byref(name))
        raise EngineError(f"{what} failed: {(name.value or b'unknown error').decode()}")


class Device:
    """Launches kernels on one GPU, on the current stream of the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        properties = torch.cuda.get_device_properties(self._index)
        self._processors: int = properties.multi_processor_count
        self._architecture = f"sm_{properties.major}{properties.minor}"
        self._context = ctypes.c_void_p()
        _check(_cuda().cuDevicePrimaryCtxRetain(ctypes.byref(self._context), self._index), "using the GPU's context")
        self._shared_per_group: int = getattr(properties, "shared_memory_per_block_optin", 48 << 10)
        self._shared_in_all: int = properties.shared_memory_per_multiprocessor
        self._functions: dict[str, tuple[ctypes.c_void_p, int]] = {}

    def _enter(self) -> None:
        """A thread that has not used this GPU yet has no context, or that of another GPU."""
        _check(_cuda().cuCtxSetCurrent(self._context), "using the GPU's context")

    def load(self, kernel: str, threads: int, shared: int, least: int = 1) -> int:
        """Makes a kernel ready that takes `shared` bytes of dynamic shared memory; how many groups run at once.

        The compiler sees to it that registers suffice for `least` groups per multiprocessor.
        """
        self._enter()
        binary = _binary(kernel, threads, least, self._architecture)
        module, function, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        _check(_cuda().cuModuleLoadData(ctypes.byref(module), binary), f"loading {kernel}")
        _check(
            _cuda().cuModuleGetFunction(ctypes.byref(function), module, _entry(kernel).encode()), f"finding {kernel}"
        )
        if shared:
            _check(_cuda().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared), f"shared memory for {kernel}")
        code = _cuda().cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(count), function, threads, ctypes.c_size_t(shared)
        )
        _check(code, f"asking how often {kernel} fits")
        self._functions[kernel] = function, shared
        return max(1, count.value) * self._processors

    def fits(self, shared: int) -> bool:
        """Whether a group can have so many bytes of shared memory."""
        return shared <= self._shared_per_group

    def warps(self, shared: int) -> int:
        """The number of warps per group that makes the most of the GPU, if each needs `shared` bytes."""

        def running(warps: int) -> int:
            return warps * (self._shared_in_all // (warps * shared + _RESERVED_SHARED))

        return max((w for w in range(1, 9) if w == 1 or w * shared <= self._shared_per_group), key=running)

    def stream(self) -> int:
        raw: int = torch._C._cuda_getCurrentRawStream(self._index)  # a tenth of what torch.cuda.current_stream takes
        return raw

    def bind(
        self,
        kernel: str,
        arguments: ctypes.Array[ctypes.c_char],
        groups: int,
        threads: int,
        stream: int,
        follows: bool = False,
    ) -> Callable[[], None]:
        """What launches a loaded kernel, from one thread; `arguments` are copied whenever it is called."""
        function, shared = self._functions[kernel]
        config = ctypes.byref(_LaunchConfig(groups, 1, 1, threads, 1, 1, shared, stream, None, 0))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        start = partial(_quick().cuLaunchKernelEx, config, function, pointers, None)
        current, context = ctypes.c_void_p(), self._context.value
        look = partial(_quick().cuCtxGetCurrent, ctypes.byref(current))

        def launch(_arguments: object = arguments) -> None:  # which must live as long as this
            if not follows:
                look()
                if current.value != context:
                    self._enter()
            code = start()
            if code:
                _check(code, f"launching {kernel}")

        return launch

    def wait(self, stream: int) -> None:
        _check(_cuda().cuStreamSynchronize(stream), "a kernel of the cuda engine")

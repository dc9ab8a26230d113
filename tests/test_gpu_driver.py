"""How kernels are launched through the CUDA driver: on one that only takes notes, since most machines have no GPU."""

from __future__ import annotations

import ctypes
import locale
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradzip.engines.cuda import driver, launch
from gradzip.errors import EngineError

# The declarations are those of cuda.h; `notes` has what the latest launch was given.
NOTING_DRIVER = """
struct Config { unsigned grid[3], block[3], shared; void* stream; void* attributes; unsigned count; };
struct { Config config; void* function; unsigned long long argument; void* context; unsigned launches; } notes;
static void* current = nullptr;
extern "C" {
int answer = 0, looks = 0;
int cuCtxGetCurrent(void** context) { *context = current; looks++; return 0; }
int cuCtxSetCurrent(void* context) { current = context; return 0; }
int cuGetErrorName(int, const char** name) { *name = "CUDA_ERROR_OF_A_TEST"; return 0; }
int cuLaunchKernelEx(const Config* config, void* function, void** parameters, void** extra) {
    notes = {*config, function, *(unsigned long long*)parameters[0], current, notes.launches + 1};
    return extra ? 1 : answer;
}
void* all_notes() { return &notes; }
}
"""


class Notes(ctypes.Structure):
    _fields_ = [
        ("config", driver._LaunchConfig),
        ("function", ctypes.c_void_p),
        ("argument", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("launches", ctypes.c_uint),
    ]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the driver that takes notes needs g++")
    source, made = tmp_path / "driver.cpp", tmp_path / "driver.so"
    source.write_text(NOTING_DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
    monkeypatch.setattr(driver, "_cuda", lambda: ctypes.CDLL(str(made)))
    monkeypatch.setattr(driver, "_quick", lambda: ctypes.PyDLL(str(made)))
    loaded = ctypes.CDLL(str(made))
    loaded.all_notes.restype = ctypes.POINTER(Notes)
    return loaded


def device(context: int) -> driver.Device:
    made = object.__new__(driver.Device)  # without a GPU to ask
    made._context = ctypes.c_void_p(context)
    made._functions = {"kernel": (ctypes.c_void_p(0x7F0000000100), 48 << 10)}
    return made


def test_a_launch_is_what_was_asked_for(library: ctypes.CDLL) -> None:
    arguments = ctypes.create_string_buffer(64)
    stream = 0x7F00_1234_5678
    first = device(0x1111).bind("kernel", arguments, 131, 256, stream)
    other = device(0x2222).bind("kernel", arguments, 7, 64, 0)
    notes = library.all_notes().contents
    for number in range(3):  # contexts change whenever another GPU comes next; arguments are those of the moment
        ctypes.c_uint64.from_buffer(arguments).value = number
        first()
        config = notes.config
        assert (config.grid_x, config.grid_y, config.grid_z) == (131, 1, 1)
        assert (config.block_x, config.block_y, config.block_z) == (256, 1, 1)
        assert (config.shared, config.stream, config.attributes, config.attribute_count) == (48 << 10, stream, None, 0)
        assert (notes.function, notes.argument, notes.context) == (0x7F0000000100, number, 0x1111)
        other()
        assert (notes.config.grid_x, notes.config.block_x, notes.config.stream, notes.context) == (7, 64, None, 0x2222)
    assert notes.launches == 6


def test_a_stage_enters_the_context_of_its_gpu_and_looks_for_it_once(library: ctypes.CDLL) -> None:
    on, other = device(0x1111), device(0x2222).bind("kernel", ctypes.create_string_buffer(8), 1, 32, 0)
    on.stream = lambda: 0  # type: ignore[method-assign]
    arguments = [ctypes.create_string_buffer(16) for _ in range(3)]
    calls = [
        SimpleNamespace(_groups=2, _on=on, _kernel="kernel", _arguments=each, _threads=32, _step_at=8)
        for each in arguments
    ]
    stage, notes = launch.Stage(calls), library.all_notes().contents  # type: ignore[arg-type]
    for step in (7, 8):
        other()
        before, looks = notes.launches, ctypes.c_int.in_dll(library, "looks").value
        stage(step)
        assert (notes.launches - before, notes.context) == (3, 0x1111)
        assert ctypes.c_int.in_dll(library, "looks").value == looks + 1
        assert [ctypes.c_uint32.from_buffer(each, 8).value for each in arguments] == [step] * 3


def test_a_launch_that_fails_is_named(library: ctypes.CDLL) -> None:
    start = device(0x1111).bind("kernel", ctypes.create_string_buffer(8), 1, 32, 0)
    ctypes.c_int.in_dll(library, "answer").value = 700
    with pytest.raises(EngineError, match="launching kernel failed: CUDA_ERROR_OF_A_TEST"):
        start()


def test_kernels_are_read_in_any_locale() -> None:
    """NVRTC of CUDA 12 leaves a thread in the locale "C" once it has compiled one."""
    expected, before = driver.source("encode_lanes"), locale.setlocale(locale.LC_CTYPE)
    assert not expected.isascii()
    try:
        locale.setlocale(locale.LC_CTYPE, "C")
        assert driver.source("encode_lanes") == expected
    finally:
        locale.setlocale(locale.LC_CTYPE, before)

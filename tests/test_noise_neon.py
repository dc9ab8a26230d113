"""The codec noise for NEON gives the bytes of the scalar version: the fuzzer compares them in an emulator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parent.parent / "native"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ["-O2", "-std=c++17", "-ffp-contract=off", "-static", "-pthread"]
FRAMES = 3000


@pytest.mark.timeout(600)  # the emulator is slow, and so is a busy machine's compiler
def test_neon_gives_the_bytes_of_the_scalar_version(tmp_path: Path) -> None:
    for program, package in ((COMPILER, "g++-aarch64-linux-gnu"), (EMULATOR, "qemu-user")):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}, Debian's package {package}")
    sources = [path for path in sorted(NATIVE.glob("*.cpp")) if "_avx" not in path.name]
    assert NATIVE / "noise_neon.cpp" in sources
    fuzzer = tmp_path / "fuzz"
    subprocess.run([COMPILER, *FLAGS, *map(str, sources), "-o", str(fuzzer)], check=True)
    result = subprocess.run([EMULATOR, str(fuzzer), str(FRAMES), "1"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "each decoded by scalar,neon" in result.stdout
    assert f"{FRAMES} damaged frames of 30 cases of noise" in result.stdout

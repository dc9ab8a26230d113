"""The library for AArch64 in an emulator: native/fuzz.cpp compares its NEON coders with the scalar ones."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "neon"  # that of `make fuzz-neon`, so that only changes are compiled again
COMPILER = "aarch64-linux-gnu-g++"
PAYLOADS = 20000


@pytest.fixture(scope="module")
def fuzzer() -> list[str]:
    """The program, and the emulator to run it in."""
    found = {name: shutil.which(name) for name in ("cmake", COMPILER, "qemu-aarch64")}
    missing = ", ".join(name for name, path in found.items() if path is None)
    if missing:
        pytest.skip(f"needs {missing} (Debian: cmake, g++-aarch64-linux-gnu, qemu-user)")
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-DCMAKE_SYSTEM_NAME=Linux", "-DGRADZIP_FUZZ=ON"]
    configure += ["-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={COMPILER}"]
    for command in (configure, ["cmake", "--build", str(BUILD), "--parallel", "2"]):
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
    sysroot = subprocess.run([COMPILER, "-print-sysroot"], capture_output=True, text=True).stdout.strip()
    return [
        "qemu-aarch64",
        "-L",
        sysroot if sysroot not in ("", "/") else "/usr/aarch64-linux-gnu",
        str(BUILD / "fuzz"),
    ]


@pytest.mark.timeout(600)  # the first time it is compiled
def test_neon_writes_and_reads_what_scalar_code_does(fuzzer: list[str]) -> None:
    result = subprocess.run([*fuzzer, str(PAYLOADS), "1"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert f"{PAYLOADS} damaged payloads" in result.stdout
    assert "each decoded by scalar,neon:" in result.stdout

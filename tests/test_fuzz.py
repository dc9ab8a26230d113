"""A short run of native/fuzz.cpp under the sanitizers; `make fuzz` is the long one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "sanitized"  # that of `make fuzz`, so that only changes are compiled again
PAYLOADS = 20000


@pytest.fixture(scope="module")
def fuzzer() -> Path:
    cmake = shutil.which("cmake")
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if cmake is None or compiler is None:
        pytest.skip("needs CMake and a C++ compiler")
    configure = [cmake, "-S", str(ROOT), "-B", str(BUILD), "-DGRADZIP_SANITIZE=ON", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"]
    configure += ["-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g"]
    for command in (configure, [cmake, "--build", str(BUILD), "--parallel", "2"]):
        result = subprocess.run(command, capture_output=True, text=True)
        if "cannot find -lasan" in result.stderr or "cannot find -lubsan" in result.stderr:
            pytest.skip("the compiler comes without the sanitizers' libraries")
        assert result.returncode == 0, result.stderr
    return BUILD / "fuzz"


@pytest.mark.timeout(600)  # the first time it is compiled
def test_damaged_payloads_do_no_harm(fuzzer: Path) -> None:
    result = subprocess.run([fuzzer, str(PAYLOADS), "1"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    of = [line.partition(":")[0] for line in result.stdout.splitlines()]
    assert [line.split()[:3] for line in of] == [
        [str(PAYLOADS), "damaged", kind] for kind in ("payloads", "frames", "frames")
    ]
    assert of[1].endswith("cases of noise")
    assert of[2].endswith("cases of int8, int4 and fp8")

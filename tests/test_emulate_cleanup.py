"""Nothing of an emulated cluster stays behind, however it ends; and none of it needs root."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import gradzip
from gradzip import emulate
from gradzip.emulate import Line, launch

# `gradzip.emulate` without torch, as the supervisor loads it: starts at once, and in any Python.
BARE = f"""
import sys, types
sys.modules["gradzip"] = types.ModuleType("gradzip")
sys.modules["gradzip"].__path__ = [{str(Path(gradzip.__file__).parent)!r}]
from gradzip import emulate
rate = sys.argv[1] if sys.argv[1] != "none" else None
result = emulate.run(sys.argv[2:], hosts=2, rate=rate, measure=False)
assert "torch" not in sys.modules
sys.exit(result.exit_code)
"""
# A process of its own session escapes from a process group, but not from a pid namespace.
ENDLESS = "sleep 1000 & echo up; wait"
ESCAPING = "setsid sleep 1000 & " + ENDLESS
MARK = "GRADZIP_TEST_MARK"
NOBODY = 65534


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Marks all processes of a test; those that it left are ended afterwards."""
    marked = os.environ | {MARK: uuid.uuid4().hex, "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    yield marked
    for pid in _marked(marked[MARK]):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it ended meanwhile, or belongs to somebody else
            continue
    return found


def _traces() -> set[str]:
    """The network interfaces that this test sees, and the namespaces that are kept by a mount."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return {name for _, name in socket.if_nameindex()} | {line for line in mounts if " nsfs " in line}


@contextmanager
def _started(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process whose two ranks are up; it ends with the test, whatever becomes of that."""
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            up = sorted(process.stdout.readline() for _ in range(2))
            if up != ["[0.0] up\n", "[1.1] up\n"]:
                process.kill()
                pytest.fail(f"{up}\n{process.communicate()[1]}")
            yield process
        finally:
            process.kill()


def _wait_for(number: range, mark: str) -> int:
    """How many processes have the mark, as soon as they are as many as wanted."""
    deadline = time.monotonic() + 30
    while (count := len(_marked(mark))) not in number and time.monotonic() < deadline:
        time.sleep(0.02)
    return count


def _assert_gone(mark: str) -> None:
    """The kernel needs a moment to take a namespace apart after its first process."""
    if _wait_for(range(1), mark):
        left = []
        for pid in _marked(mark):
            with suppress(OSError):
                left.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
        pytest.fail(f"still there: {left}")


@pytest.mark.usefixtures("namespaces")
def test_ctrl_c_on_the_command_line_leaves_nothing(environment: dict[str, str]) -> None:
    before = _traces()
    command = [sys.executable, "-m", "gradzip", "emulate", "--hosts", "2", "--no-measure"]
    with _started([*command, "--", "sh", "-c", ESCAPING], environment) as process:
        # A process shows no environment while it becomes another program, as a rank's do when it says that it is up.
        assert _wait_for(range(9, 100), environment[MARK]) >= 9, "parent, unshare, supervisor, and three of each rank"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in said
    assert _marked(environment[MARK]) == [], "when it returns, all is gone"
    assert _traces() == before


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_sudden_death_leaves_nothing(number: signal.Signals, environment: dict[str, str]) -> None:
    before = _traces()
    with _started([sys.executable, "-c", BARE, "1gbit", "sh", "-c", ESCAPING], environment) as process:
        process.send_signal(number)
        process.communicate()
    _assert_gone(environment[MARK])
    assert _traces() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_no_process_stays_on_the_loopback(number: signal.Signals, environment: dict[str, str]) -> None:
    with _started([sys.executable, "-c", BARE, "none", "sh", "-c", ENDLESS], environment) as process:
        process.send_signal(number)
        process.communicate()
    if number == signal.SIGINT:
        assert _marked(environment[MARK]) == [], "when it returns, all is gone"
    _assert_gone(environment[MARK])


def test_a_supervisor_that_dies_takes_the_ranks_with_it(environment: dict[str, str]) -> None:
    script = "[ $RANK = 0 ] && kill -9 $PPID; exec sleep 1000"
    with pytest.raises(gradzip.GradzipError, match="supervisor"):
        emulate.run(["sh", "-c", script], hosts=2, rate=None, env=environment, measure=False)
    _assert_gone(environment[MARK])


@pytest.mark.usefixtures("namespaces")
def test_an_error_in_a_callback_ends_the_run(environment: dict[str, str]) -> None:
    before = _traces()

    def fail(line: Line) -> None:
        raise ValueError(line.text)

    with pytest.raises(ValueError, match="up"):
        emulate.run(["sh", "-c", ESCAPING], hosts=2, env=environment, measure=False, on_line=fail)
    assert _marked(environment[MARK]) == []
    assert _traces() == before


@pytest.mark.usefixtures("namespaces")
def test_root_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an ordinary user does, done by whoever runs this."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    tools = launch._tools()
    try:
        assert "--map-root-user" in launch._namespaces(tools)
    except gradzip.GradzipError as reason:
        pytest.skip(str(reason))
    assert emulate.obstacle() is None


@pytest.mark.parametrize("rate", ["1gbit", "none"])
def test_nobody_can_do_it(rate: str, environment: dict[str, str]) -> None:
    """As another user than root, with whatever Python that one may use."""
    become = shutil.which("setpriv")
    if os.geteuid() != 0 or become is None:
        pytest.skip("needs root and setpriv, to become nobody")
    nobody = [become, "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    python = _python_of(nobody)

    def attempt(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*nobody, python, "-c", BARE, rate, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")

    done = attempt("sh", "-c", "echo $RANK; exit $RANK")
    if rate != "none" and "gives no namespaces" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert sorted(done.stdout.splitlines()) == ["[0.0] 0", "[1.1] 1"], done.stderr
    assert done.returncode == 1
    assert _marked(environment[MARK]) == []


def _python_of(nobody: list[str]) -> str:
    # Started by setpriv, a Python may run that nobody cannot start again.
    usable = f"import subprocess, sys; open({launch.__file__!r}); assert sys.version_info >= (3, 10);"
    usable += "subprocess.run([sys.executable, '-c', ''], check=True)"
    for python in (sys.executable, "/usr/bin/python3"):
        if subprocess.run([*nobody, python, "-c", usable], capture_output=True, cwd="/").returncode == 0:
            return python
    pytest.skip("nobody may not read this checkout, or has no Python 3.10")

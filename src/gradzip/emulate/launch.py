"""From outside: checks that hosts can be emulated here, starts the supervisor, and passes on what it reports."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..errors import EmulationError, GradzipWarning
from . import mps
from .cluster import Cluster, parse_rate
from .report import Job, Rates

NO_LIMIT = "--no-limit (rate=None in Python) runs the ranks on the loopback, without namespaces and without a limit"

# The supervisor needs this package but not torch, which `import gradzip` would load: seconds, and much memory.
_SUPERVISOR = """
import sys, types
package = sys.modules["gradzip"] = types.ModuleType("gradzip")
package.__path__ = [sys.argv[1]]
from gradzip.emulate.supervisor import main
sys.exit(main(int(sys.argv[2])))
"""
_FRESH = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_AS_ROOT_OF_ITS_OWN = ("--user", "--map-root-user")
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}
_SWITCHES = (  # what forbids user namespaces, its forbidding value, and one that allows them
    ("kernel.unprivileged_userns_clone", "0", "1"),
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
    ("user.max_user_namespaces", "0", "15000"),
    ("user.max_net_namespaces", "0", "15000"),
)
_SYSCTL = Path("/proc/sys")
_GLANCE = 0.5  # seconds; how late a signal may be noticed
_PATIENCE = 20.0  # seconds, for a supervisor that is left alone; CUDA's service may take most of it


@dataclass(frozen=True)
class Line:
    """One line that a rank printed."""

    host: int
    rank: int
    stream: str  # "out" or "err"
    text: str

    def __str__(self) -> str:
        return f"[{self.host}.{self.rank}] {self.text}"

    def print(self) -> None:
        print(self, file=sys.stderr if self.stream == "err" else sys.stdout, flush=True)


@dataclass(frozen=True)
class Result:
    cluster: Cluster
    codes: tuple[int, ...]  # of each rank, as subprocess gives them: -9 is death by signal 9
    first_failure: int | None  # the rank that failed before any other; the rest may have been ended because of it
    rates: Rates | None  # measured before the run
    seconds: float  # from the start of the ranks to the end of the last

    @property
    def exit_code(self) -> int:
        """0, or that of the first failure as a shell would give it."""
        if self.first_failure is None:
            return 0
        code = self.codes[self.first_failure]
        return code if code > 0 else 128 - code


def run(
    command: Sequence[str],
    *,
    hosts: int,
    rate: str | int | None = "1gbit",
    ranks_per_host: int = 1,
    gpu_share: bool = False,
    measure: bool = True,
    grace: float = 5.0,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[Line], None] = Line.print,
    on_ready: Callable[[Rates | None], None] = lambda rates: None,
) -> Result:
    """Runs a command on every rank of an emulated cluster, until all have ended or one has failed.

    `rate` is that of each host, each way; None runs plain processes on the loopback. After the first failure the
    others have `grace` seconds to report, and as many to end when asked to. `env` is added to the environment.
    `on_ready` gets the measured rates before the ranks start, `on_line` what they print.
    """
    if not command:
        raise EmulationError("there is no command to run")
    rate = parse_rate(rate) if isinstance(rate, str) else rate
    cluster = Cluster(hosts, ranks_per_host, rate, gpu_share, _gpus())
    tools: dict[str, str] = {}
    wrapper: list[str] = []
    if rate is not None:
        tools = _tools()
        wrapper = _namespaces(tools)
    if gpu_share:
        tools |= _mps_control()
    job = Job(list(command), cluster, measure, grace, tools)
    return _Run(job).to_the_end(wrapper, os.environ | (env or {}), on_line, on_ready)


def obstacle() -> str | None:
    """What keeps hosts with a rate limit from being emulated here, with the cure; None if nothing does."""
    try:
        run(["true"], hosts=1, measure=False)
    except EmulationError as reason:
        return str(reason)
    return None


class _Run:
    """One run, seen from outside: starts the supervisor and collects what it reports."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._codes: dict[int, int] = {}
        self._first_failure: int | None = None
        self._rates: Rates | None = None
        self._started = time.monotonic()
        self._seconds: float | None = None

    def to_the_end(
        self,
        wrapper: Sequence[str],
        environment: Mapping[str, str],
        on_line: Callable[[Line], None],
        on_ready: Callable[[Rates | None], None],
    ) -> Result:
        readable, writable = os.pipe()
        package = str(Path(__file__).parents[1])
        with open(readable, "rb", buffering=0) as pipe:
            try:
                supervisor = subprocess.Popen(
                    [*wrapper, sys.executable, "-I", "-c", _SUPERVISOR, package, str(writable)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[writable],
                    start_new_session=True,  # Ctrl-C comes here alone, and is passed on as a request to stop
                )
            finally:
                os.close(writable)
            assert supervisor.stdin is not None
            reports = _Reports(readable)
            try:
                self._send(supervisor.stdin, self._job.dump())
                self._follow(reports, on_line, on_ready)
            except BaseException:
                self._send(supervisor.stdin, "stop\n")
                self._follow(reports, on_line, lambda rates: None)
                raise
            finally:
                # One that still runs, after a second Ctrl-C say, kills its ranks when it finds itself alone.
                pipe.close()
                with suppress(BrokenPipeError):
                    supervisor.stdin.close()
                try:
                    supervisor.wait(_PATIENCE)
                except subprocess.TimeoutExpired:
                    supervisor.kill()
                    supervisor.wait()
        if self._seconds is None:
            raise EmulationError(f"the supervisor of the emulated hosts died with exit code {supervisor.returncode}")
        codes = tuple(self._codes[rank] for rank in range(self._job.cluster.world))
        return Result(self._job.cluster, codes, self._first_failure, self._rates, self._seconds)

    @staticmethod
    def _send(pipe: IO[bytes], text: str) -> None:
        with suppress(BrokenPipeError):  # it has died: the end of its reports will tell
            pipe.write(text.encode())
            pipe.flush()

    def _follow(
        self, reports: Iterator[str], on_line: Callable[[Line], None], on_ready: Callable[[Rates | None], None]
    ) -> None:
        for text in reports:
            fields: dict[str, Any] = json.loads(text)
            kind = fields.pop("kind")
            if kind == "line":
                on_line(Line(self._job.cluster.host_of(fields["rank"]), **fields))
            elif kind == "ready":
                self._started = time.monotonic()
                if fields["rates"]:
                    one_flow, ring = fields["rates"]
                    self._rates = Rates(one_flow, tuple(ring))
                on_ready(self._rates)
            elif kind == "exit":
                self._codes[fields["rank"]] = fields["code"]
                if fields["first_failure"]:
                    self._first_failure = fields["rank"]
            elif kind == "end":
                self._seconds = time.monotonic() - self._started
            else:
                raise EmulationError(fields["message"])


class _Reports:
    """What the supervisor says, line by line. Ctrl-C ends the wait for a line, and takes nothing from the next one."""

    def __init__(self, readable: int) -> None:
        self._readable, self._data = readable, b""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while b"\n" not in self._data:
            # Python would not see a signal that came just before a wait began until that has ended.
            if select.select([self._readable], [], [], _GLANCE)[0] and not self._read():
                raise StopIteration
        line, _, self._data = self._data.partition(b"\n")
        return line.decode()

    def _read(self) -> bool:
        """False at the end. What was read is kept, or not read: there is no Ctrl-C in between."""
        usual = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            data = os.read(self._readable, 1 << 16)
            self._data += data
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, usual)
        return bool(data)


def _tools() -> dict[str, str]:
    found = {name: _find(name) for name in _PACKAGES}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        programs = " and ".join(f"`{name}`" for name in missing)
        packages = " ".join(dict.fromkeys(_PACKAGES[name] for name in missing))
        raise EmulationError(f"cannot emulate hosts: no {programs} here (apt install {packages}). {NO_LIMIT}")
    return {name: path for name, path in found.items() if path is not None}


def _find(name: str) -> str | None:
    """Of an ordinary user's PATH, the folders for administrators are often missing."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))


def _namespaces(tools: Mapping[str, str]) -> list[str]:
    """The start of a command line that runs the rest in fresh namespaces; as root, or else as one of its own."""
    plain = [tools["unshare"], *_FRESH]
    own = [tools["unshare"], *_AS_ROOT_OF_ITS_OWN, *_FRESH]
    said = ""
    for wrapper in [plain, own] if os.geteuid() == 0 else [own]:
        tried = subprocess.run([*wrapper, "true"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if tried.returncode == 0:
            return wrapper
        said = " ".join(tried.stderr.split())
    raise EmulationError(f"cannot emulate hosts: the kernel gives no namespaces ({said}). {_cure()}. {NO_LIMIT}")


def _cure() -> str:
    for switch, forbidding, allowing in _SWITCHES:
        path = _SYSCTL / switch.replace(".", "/")
        with suppress(OSError):
            if path.read_text().strip() == forbidding:
                return f"Run as root, or allow it: sudo sysctl {switch}={allowing}"
    return "Run as root; a container needs --privileged"


def _gpus() -> tuple[str, ...]:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(name for name in chosen.split(",") if name)
    import torch  # not at the top: the supervisor has no use for it

    return tuple(map(str, range(torch.cuda.device_count())))


def _mps_control() -> dict[str, str]:
    path = _find(mps.CONTROL)
    if path is None:
        text = f"no {mps.CONTROL} here: the ranks take turns on the GPU, which makes exchanges several times slower"
        warnings.warn(text, GradzipWarning, stacklevel=3)
        return {}
    return {mps.CONTROL: path}

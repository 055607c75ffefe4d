"""What `tenuto doctor` looks at beside packages: clocks, timers, cores, the interpreter, ZeroMQ, memory, streams, descriptors, GPUs.

Each check yields findings; whatever is not `ok` has a remedy. Checks read; none changes anything.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import select
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fabric.clock import MonotonicClock
from fabric.curve import key_pair_ms, library_version
from fabric.shared_memory import SWITCH, memory_address
from fabric.sockets.local_streams import SWITCH as STREAMS_SWITCH
from fabric.sockets.local_streams import are_allowed
from roles.cli import importing
from roles.runtime.process import wake_exactly

OK, WARN, FAIL = "ok", "warn", "fail"
QUICK_CLOCKS: Final = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")
CLOCK_US_MAX: Final = 2.0
TIMER_MS_MAX: Final = 1.0
"""At the 99th percentile: a tight SLO has no more to spare."""
KEY_PAIR_MS_MAX: Final = 0.5
"""libsodium takes 0.05 ms, the plain code that libzmq has otherwise ten times that."""
DESCRIPTORS_MIN: Final = 65_536
SLEEPS, SLEEP_S = 100, 0.002


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: `state` is ok, warn (it works, less well) or fail; `remedy`: what to do about it, unless it is ok."""

    name: str
    state: str
    detail: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.state == OK or self.remedy, f"{self.name} is {self.state}, and nobody is told what to do"


def judged(name: str, detail: str, trouble: bool | str, remedy: str, worst: str = WARN) -> Finding:  # noqa: FBT001
    """`trouble`: whether there is any, or which."""
    if not trouble:
        return Finding(name, OK, detail)
    return Finding(name, worst, trouble if isinstance(trouble, str) else detail, remedy)


def clocks() -> Iterator[Finding]:
    """Each request reads the clock some dozen times."""
    source = _text("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    clock = MonotonicClock()
    each_us = min(_look_us(clock) for _ in range(20))  # the best of some: this process is not alone
    yield judged(
        "clock",
        f"{source or 'unknown source'}, {each_us:.2f} us a look",
        (bool(source) and source not in QUICK_CLOCKS) or each_us > CLOCK_US_MAX,
        "use the processor's counter: boot with clocksource=tsc tsc=reliable, or ask who runs the virtual machine for it",
    )


def _look_us(clock: MonotonicClock) -> float:
    began_ms = clock.now_ms()
    for _ in range(500):
        clock.now_ms()
    return (clock.now_ms() - began_ms) * 2


def timers() -> Iterator[Finding]:
    """How late a sleep of 2 ms ends, on this machine as busy as it is now."""
    wake_exactly()
    clock = MonotonicClock()
    late_ms = []
    for _ in range(SLEEPS):
        began_ms = clock.now_ms()
        select.select([], [], [], SLEEP_S)
        late_ms.append(clock.now_ms() - began_ms - 1e3 * SLEEP_S)
    late_ms.sort()
    p99_ms = late_ms[int(0.99 * SLEEPS) - 1]
    yield judged(
        "timers",
        f"a sleep of 2 ms ends {late_ms[SLEEPS // 2]:.2f} ms late, {p99_ms:.2f} ms at the 99th percentile",
        p99_ms > TIMER_MS_MAX,
        "leave Tenuto's cores to it (pin_cores in the file, or isolcpus), and keep idle cores awake:"
        " tuned-adm profile latency-performance (docs/results/performance.md)",
    )


def cores() -> Iterator[Finding]:
    """How many, and whether they halt or sleep."""
    count = len(os.sched_getaffinity(0))
    yield judged(
        "cores",
        str(count),
        count < 2,
        "give this process at least two: one for the scheduler, one for a worker (taskset, or the container's CPU limit)",
    )
    is_virtual = " hypervisor" in _text("/proc/cpuinfo")
    driver = _text("/sys/devices/system/cpu/cpuidle/current_driver")
    polls = "idle=poll" in _text("/proc/cmdline") or driver == "haltpoll"
    yield judged(
        "idle cores",
        f"{'virtual' if is_virtual else 'real'}, cpuidle driver {driver or 'none'}",
        is_virtual
        and not polls
        and "the cores are virtual and halt when idle: the host may give them back late",
        "modprobe cpuidle_haltpoll force=1, or boot with idle=poll, or hold /dev/cpu_dma_latency at 0:"
        " tuned-adm profile latency-performance (docs/results/performance.md)",
    )
    governor = _text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor:
        yield judged(
            "governor", governor, governor == "powersave", "cpupower frequency-set --governor performance"
        )


def interpreter() -> Iterator[Finding]:
    """Whether it was built with optimisation: most of what Tenuto costs is its time."""
    flags = str(sysconfig.get_config_var("PY_CFLAGS") or "")
    arguments = str(sysconfig.get_config_var("CONFIG_ARGS") or "")
    is_profiled = "--enable-optimizations" in arguments or "-fprofile" in flags
    trouble = ""
    if hasattr(sys, "gettotalrefcount"):
        trouble = "a debug build of Python: several times slower"
    elif "-O2" not in flags and "-O3" not in flags and flags:
        trouble = "Python was built without optimisation"
    elif not is_profiled:
        trouble = "Python was built without profile-guided optimisation: up to 1.5 times slower"
    yield judged(
        "interpreter",
        "built with profile-guided optimisation",
        trouble,
        "use your distribution's python3, or build with --enable-optimizations --with-lto"
        " (pyenv: PYTHON_CONFIGURE_OPTS='--enable-optimizations --with-lto')",
    )


def zeromq() -> Iterator[Finding]:
    """The library below all sockets, and how fast its cryptography is."""
    version, has_curve = library_version()
    yield judged(
        "libzmq",
        f"{version}, with CURVE",
        not has_curve and f"{version}, without CURVE: no keys, so no cluster over several hosts",
        "pip install --force-reinstall pyzmq: its wheels have it",
    )
    if has_curve:
        took_ms = min(key_pair_ms() for _ in range(5))
        yield judged(
            "crypto",
            f"a key pair in {took_ms:.2f} ms",
            took_ms > KEY_PAIR_MS_MAX
            and f"a key pair takes {took_ms:.2f} ms: libzmq was built without libsodium, or the machine is busy",
            "pip install --force-reinstall pyzmq: its wheels have libsodium",
        )


def memory() -> Iterator[Finding]:
    """Whether tensors of one host can lie in shared memory."""
    trouble = ""
    if os.environ.get(SWITCH) == "0":
        trouble = f"{SWITCH}=0 forbids it: tensors are copied through sockets"
    elif not memory_address():
        trouble = "processes here cannot look into each other's memory: tensors are copied through sockets"
    yield judged(
        "shared memory",
        "tensors of one host are not copied",
        trouble,
        f"unset {SWITCH}; run all roles as one user, in one PID namespace, with /proc mounted, and dumpable",
    )


def streams() -> Iterator[Finding]:
    """Whether roles of one host can speak without ZeroMQ's threads in between."""
    yield judged(
        "local streams",
        "roles of one host speak by Unix sockets",
        bool(not are_allowed())
        and f"{STREAMS_SWITCH}=0 forbids them: each message between roles of one host costs three times the CPU",
        f"unset {STREAMS_SWITCH}",
    )


def descriptors() -> Iterator[Finding]:
    """A frontend has one for each connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = "no limit" if hard == resource.RLIM_INFINITY else f"{hard:,} may be open"
    yield judged(
        "open files",
        limit,
        0 <= hard < DESCRIPTORS_MIN,
        f"raise the hard limit to {DESCRIPTORS_MIN:,}: LimitNOFILE= in a unit, nofile in /etc/security/limits.conf,"
        " --ulimit nofile= of a container",
    )


def gpus() -> Iterator[Finding]:
    """What the driver says of each, and whether they can be shared."""
    if importlib.util.find_spec("pynvml") is None:
        yield Finding(
            "gpu",
            WARN,
            "nvidia-ml-py is not installed: CPU and emulated slices only",
            "pip install 'tenuto[worker]' where there are GPUs; nothing to do where there are none",
        )
        return
    with importing():
        import pynvml  # noqa: PLC0415  an optional package

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield Finding(
            "gpu",
            WARN,
            f"no NVIDIA driver ({error}): CPU and emulated slices only",
            "install NVIDIA's driver where there are GPUs (in a container: --gpus all); nothing to do where there are none",
        )
        return
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                yield _gpu(pynvml, index)
            except pynvml.NVMLError as error:
                yield Finding(
                    f"gpu {index}",
                    FAIL,
                    f"the driver tells nothing of it: {error}",
                    f"look for Xid errors in the kernel's log (dmesg); nvidia-smi -i {index} --gpu-reset when nobody uses it, or restart the host",
                )
    finally:
        pynvml.nvmlShutdown()
    yield from mps()


def _gpu(pynvml: Any, index: int) -> Finding:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)

    def told(ask: Callable[..., Any]) -> Any:
        try:
            return ask(handle)
        except pynvml.NVMLError:
            return None  # not all devices say all

    troubles: list[tuple[str, str]] = []
    mode = told(pynvml.nvmlDeviceGetComputeMode)
    if mode == pynvml.NVML_COMPUTEMODE_PROHIBITED:
        troubles.append(("nobody may compute on it", f"nvidia-smi -i {index} -c DEFAULT"))
    if mode == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS and shutil.which("nvidia-cuda-mps-control") is None:
        troubles.append(
            ("one process at a time, without MPS", f"nvidia-smi -i {index} -c DEFAULT, or install MPS")
        )
    if told(pynvml.nvmlDeviceGetPersistenceMode) == 0:
        troubles.append(("the driver is unloaded when nobody uses it", f"nvidia-smi -i {index} -pm 1"))
    lost = told(pynvml.nvmlDeviceGetRetiredPagesPendingStatus)
    if lost:
        troubles.append(
            ("memory pages wait to be retired", f"nvidia-smi -i {index} --gpu-reset when nobody uses it")
        )
    name = str(pynvml.nvmlDeviceGetName(handle))
    if not troubles:
        return Finding(f"gpu {index}", OK, name)
    details, remedies = zip(*troubles, strict=True)
    return Finding(f"gpu {index}", WARN, f"{name}: {'; '.join(details)}", "; ".join(remedies))


def mps(processes: Path = Path("/proc")) -> Iterator[Finding]:
    """Its daemon, and other users' daemons: the server of one serves a single user at a time."""
    daemon = shutil.which("nvidia-cuda-mps-control")
    yield judged(
        "mps",
        daemon
        or "nvidia-cuda-mps-control is not on the PATH: slices of a GPU share its time, and have no shares",
        daemon is None,
        "install the driver's compute tools (Debian: nvidia-cuda-mps), or mount them into the container",
    )
    others = sorted(
        {
            entry.stat().st_uid
            for entry in processes.iterdir()
            if entry.name.isdigit()
            and _text(entry / "comm").startswith("nvidia-cuda-mps")
            and entry.stat().st_uid != os.getuid()
        }
    )
    yield judged(
        "mps users",
        "nobody else's daemon runs",
        bool(others) and f"users {', '.join(map(str, others))} run an MPS daemon too",
        "let one user run everything on a GPU, or end the other daemon: echo quit | nvidia-cuda-mps-control",
    )


def _text(path: str | Path) -> str:
    """What is in it; empty where it is not, or may not be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


HOST_CHECKS: Final[tuple[Callable[[], Iterator[Finding]], ...]] = (
    clocks,
    timers,
    cores,
    interpreter,
    zeromq,
    memory,
    streams,
    descriptors,
    gpus,
)

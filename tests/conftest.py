"""Fixtures for all tests: engines, handles, loops, files; and what every test must give back."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import disk_room
import extensions
import programs
import pytest
import torch
import torch.utils._device as torch_device
from hypothesis import HealthCheck, settings
from support import (
    LOOPS,
    HeldEngine,
    left_open,
    needs_loop,
    nvmeio_threads,
    open_descriptors,
)

import nvmeio
from nvmeio import _bindings, buffers, files
from nvmeio._memory import copy_on_write
from nvmeio._threads import shutdown
from nvmeio.engines import libaio
from nvmeio.engines.base import Engine
from nvmeio.engines.libaio import LibaioEngine
from nvmeio.testing import FakeEngine

# A busy machine is not a failure, and our fixtures may well live longer than one example.
settings.register_profile(
    "nvmeio",
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("nvmeio")


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """What a shell starts in its background ignores SIGINT, and hands that on to its children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def warm_process() -> Iterator[None]:
    """What is there for good before the first test, so that it is nobody's leak."""
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.new_event_loop().close()  # it keeps a pipe of its own from its first use on
    # Descriptors for the process: userfaultfd, and page tables for each library.
    copy_on_write.support()
    _bindings.lib.nv_is_on_huge_pages(0, 1)
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # the driver keeps pipes and more
    with extensions.kept_with_environment(), programs.forking():
        yield


def collect_and_set_aside() -> None:
    """Torch's objects are many, and libraries come later: without them `gc.collect` takes 1 ms."""
    gc.collect()
    if len(gc.get_objects()) > 50_000:
        gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """For the tests of a module, whose imports have made more of them."""
    if len(gc.get_objects()) > 50_000:
        collect_and_set_aside()


@pytest.fixture(scope="session", autouse=True)
def lost_on_purpose() -> Iterator[None]:
    """What tests lose on purpose is not what the status of the run is about."""
    yield
    gc.collect()
    shutdown._untold.clear()


# Modules that take longest, most of them with few tests: whoever began with one of them last would
# keep the others waiting.
LONGEST = (
    "documented/test_code.py",
    "compat/test_deepspeed_training.py",
    "project/test_examples.py",
    "device/test_gpu_check.py",
    "interrupts/test_interrupts.py",
    "checkpoint/test_checkpointer_ranks.py",
    "checkpoint/test_own_drives.py",
    "checkpoint/test_loading_ranks.py",
    "documented/test_notebook.py",
    "ends/test_ends.py",
    "contract/test_interrupted_operations.py",
    "compat/test_deepspeed_installed.py",
    "native/test_native.py",
    "offload/test_optimizer.py",
    "contract/test_transfers.py",
    "cli/test_tune_search.py",
    "inference/test_beyond_memory.py",
    "gds/test_fake.py",
    "faults/test_faulty_kernel.py",
    "faults/test_fork_exit.py",
    "checkpoint/test_checkpointer_crash.py",
    "cli/test_tune.py",
    "cli/test_bench.py",
    "cli/test_interrupted_commands.py",
    "compat/test_deepspeed_installing.py",
    "faults/test_strace.py",
    "offload/test_offload_crash.py",
)


class TimeLeft:
    """Says at each tenth of the tests how long the rest takes, if it takes as long a test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._total = self._done = self._told = 0
        self._began = time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._collected(len(ids))

    def _collected(self, total: int) -> None:
        self._total, self._began = max(self._total, total), time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._done += report.when == "teardown"
        tenth = 10 * self._done // self._total if self._total else 0
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if terminal is None or not self._told < tenth < 10 or self._total < 200:
            return
        self._told = tenth
        left_s = (time.monotonic() - self._began) * (self._total - self._done) / self._done
        text = f"{self._done} of {self._total} tests, about {left_s / 60:.0f} min left"
        terminal.write(f"\n== {text}\n")


def pytest_configure(config: pytest.Config) -> None:
    """Devices that there are are hidden, but for what needs one (``-m gpu``).

    Most tests have devices of their own, and those of the machine would mix with them. And each
    process of several begins to read the modules at another place: in a fresh clone it is pytest
    that compiles them, so each compiles some for the others.
    """
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if sys.version_info >= (3, 12):  # of a fork beside threads, on stderr
        given = os.environ.get("PYTHONWARNINGS")
        ours = "ignore:This process (pid=:DeprecationWarning"
        os.environ["PYTHONWARNINGS"] = f"{given},{ours}" if given else ours
    here = Path(__file__).parent
    worker = getattr(config, "workerinput", None)
    if worker is None:
        config.pluginmanager.register(TimeLeft(config), "nvmeio-time-left")
    if worker is None or [Path(each).resolve() for each in config.args] != [here]:
        return
    files = sorted(here.rglob("test_*.py"))
    first = int(worker["workerid"][2:]) * len(files) // worker["workercount"]
    config.args = list(map(str, files[first:] + files[:first]))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before the first test: is there room, and has a run that was killed left something?"""
    config: Any = session.config
    if hasattr(config, "workerinput"):
        return
    disk_room.check(config)
    if config.option.basetemp is None:
        claimed = disk_room.claim(config._tmp_path_factory.getbasetemp())
        config.add_cleanup(lambda: os.close(claimed))


def pytest_collection(session: pytest.Session) -> None:
    """Reading the modules makes a million objects, and none of them is garbage."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Nor will they be: a collection that a test asks for leaves them alone."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest modules first; in one order, wherever the reading began."""
    here = Path(__file__).parent
    places = {here / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (places.get(item.path, len(places)), item.path))
    for item in items:
        is_on_stand_in = hasattr(getattr(item, "module", None), "Accelerator")
        if is_on_stand_in and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(STAND_IN_LIMIT_S))


# A lock that nobody opens, say; longer than any test of the stand-in takes on a busy machine.
STAND_IN_LIMIT_S = 240

_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Tell fixtures how their test ended."""
    if call.excinfo is not None:
        item.stash[_failed] = True
    return (yield)


def made_on_devices() -> set[Any]:
    """Functions that `with torch.device(...)` is for; torch remembers those of the first use.

    Had somebody replaced one by then (the stand-in does), models on the meta device would be made
    on the CPU in part, in every later test of the process.
    """
    return set(torch_device._device_constructors())


made_on_devices()


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test gives back its descriptors and ends the threads that nvmeio started for it."""
    if request.node.get_closest_marker("gpu") and torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # the first one opens eventfds and a pipe for good
    descriptors, threads = open_descriptors(), nvmeio_threads()
    yield
    if request.node.stash.get(_failed, False):
        return  # its traceback holds on to everything
    request.node.funcargs.clear()  # what only pytest still names is garbage by now
    assert {torch.tensor, torch.arange, torch.empty} <= made_on_devices(), "torch was left changed"
    began = looked = time.monotonic()
    while True:
        left = left_open(descriptors, open_descriptors())
        running = nvmeio_threads() - threads
        if "one_handle" in request.fixturenames:  # a handle keeps its finisher until it closes
            running = {thread for thread in running if thread.name != "nvmeio-finish"}
        if not left and not running:
            return
        now = time.monotonic()
        if now - began > 60.0:
            raise AssertionError(f"left open: {left}; still running: {running}")
        if now >= looked:  # not all the time: an idle handle that ends by itself takes 50 ms
            if now - began > 1.0:
                gc.unfreeze()  # a thread that has ended since may have named what was set aside
            collect_and_set_aside()
            looked = now + 0.1
        time.sleep(0.002)


# Engines and handles


def _needs_kernel_aio() -> None:
    error, reason = libaio.probe()
    if error:
        pytest.skip(f"no Linux AIO here: {reason}")


def _new_libaio() -> str:
    _needs_kernel_aio()
    if _bindings.kernel_aio().source != "libaio":
        pytest.skip(f"libaio is not installed: {_bindings.kernel_aio().reason}")
    return "libaio"


def _new_syscalls() -> Engine:
    _needs_kernel_aio()
    return LibaioEngine(table=_bindings.lib.nv_kaio_open(_bindings.ffi.NULL))


ENGINES: dict[str, Callable[[], str | Engine]] = {
    "libaio": _new_libaio,
    "syscalls": _new_syscalls,
    "threads": lambda: "threads",
    "fake": lambda: FakeEngine(reorder=True, short=0.5, seed=1),
}


@pytest.fixture(params=list(ENGINES))
def new_engine(request: pytest.FixtureRequest) -> Callable[[], str | Engine]:
    """Makes what `AioHandle(engine=…)` takes; each test runs once for every engine."""
    return ENGINES[request.param]


@pytest.fixture
def new_handle() -> Iterator[Callable[..., nvmeio.AioHandle]]:
    """Makes handles (small blocks, short queues) that are closed after the test."""
    made: list[nvmeio.AioHandle] = []

    def make(engine: str | Engine, **options: Any) -> nvmeio.AioHandle:
        chosen = {"block_size": 16384, "queue_depth": 8, **options}
        made.append(nvmeio.AioHandle(**chosen, engine=engine))
        return made[-1]

    yield make
    for handle in made:
        handle.close()


@pytest.fixture
def make_handle(
    new_engine: Callable[[], str | Engine], new_handle: Callable[..., nvmeio.AioHandle]
) -> Callable[..., nvmeio.AioHandle]:
    """`new_handle` on each engine in turn; takes the other parameters of `AioHandle`."""
    return lambda **options: new_handle(new_engine(), **options)


@pytest.fixture
def handle(make_handle: Callable[..., nvmeio.AioHandle]) -> nvmeio.AioHandle:
    """An open handle, on each engine in turn."""
    return make_handle()


@pytest.fixture
def engine_held(new_handle: Callable[..., nvmeio.AioHandle]) -> Iterator[HeldEngine]:
    """An engine that moves nothing before its gate is opened, as it is after the test."""
    engine = HeldEngine()
    yield engine
    engine.gate.set()


@pytest.fixture
def handle_held(
    engine_held: HeldEngine, new_handle: Callable[..., nvmeio.AioHandle]
) -> nvmeio.AioHandle:
    """An open handle on `engine_held`: whatever is started stays in flight until the gate opens."""
    return new_handle(engine_held)


@pytest.fixture(params=LOOPS)
def loop_kind(request: pytest.FixtureRequest) -> str:
    """Which event loop a test runs on; see `support.on_every_loop`."""
    needs_loop(request.param)  # here: pytest keeps the files of a test that is skipped once it runs
    return str(request.param)


# Files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The name of a file that does not exist yet."""
    return tmp_path / "tensors.bin"


@pytest.fixture
def direct_path(tmp_path: Path) -> Path:
    """A file name where direct I/O works."""
    support = files.probe_direct(tmp_path)
    if not support.supported:
        pytest.skip(f"{tmp_path}: {support.reason} (choose another place with --basetemp)")
    return tmp_path / "direct.bin"


@pytest.fixture(autouse=True)
def grad_mode_stays() -> Iterator[None]:
    """No test leaves autograd switched off for the others."""
    before = torch.is_grad_enabled()
    yield
    assert torch.is_grad_enabled() == before


@pytest.fixture
def lockable() -> None:
    """For tests that page-lock memory, which not every process may."""
    try:
        buffers.empty_pinned(4096, dtype=torch.uint8)
    except OSError as error:
        pytest.skip(f"this process may not lock memory: {error}")

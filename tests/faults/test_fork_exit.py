"""Fork, interpreter exit and Ctrl-C with operations in flight.

Each test is a process of its own. In flight for certain means: on the faulty kernel behind a closed
gate (libaio), or on the public fake engine held by an event (threads).
"""

import asyncio
import os
import signal
import textwrap
import time

import pytest
import torch
from faults._support import (
    KIB,
    MIB,
    aligned,
    bytes_of,
    eventually,
    finish,
    make_file,
    misaligned,
    noise,
    run_python,
    start_python,
    wait_until_asleep,
)
from support import (
    collect,
    new_descriptors,
    nvmeio_threads,
    open_descriptors,
    spin_until_collected,
)

import nvmeio

# What the scripts have in common. `hold` keeps what is started in flight until `let_go`.
PRELUDE = """
import asyncio, gc, os, signal, sys, threading, time, warnings
from pathlib import Path
import torch
import nvmeio
from nvmeio.engines.libaio import LibaioEngine
from nvmeio.testing import FakeEngine
from faults._support import FaultyKernel, aligned, bytes_of, eventually, misaligned, noise

torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
KIB, MIB = 1 << 10, 1 << 20
kind, library, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
if kind == "libaio":
    kernel = FaultyKernel(library)
    engine = LibaioEngine(kernel._table)
    hold, let_go = kernel.close_gate, kernel.open_gate
else:
    gate = threading.Event()
    gate.set()
    engine = FakeEngine(hold=gate)
    hold, let_go = gate.clear, gate.set
handle = nvmeio.AioHandle(block_size=64 * KIB, queue_depth=8, engine=engine)

def later(seconds, function):
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()

def let_go_when_it_is_told():  # by a warning; a little later, so that it is waited for
    told, warn = threading.Event(), warnings.warn

    def warning(*args, **named):
        told.set()
        warn(*args, **named)

    def then():
        told.wait()
        time.sleep(0.3)
        let_go()

    warnings.warn = warning
    threading.Thread(target=then, daemon=True).start()
"""
SHOW_RESOURCE_WARNINGS = ("-W", "always::ResourceWarning")


@pytest.fixture
def start_script(faulty_library, tmp_path):
    """Starts a script behind the prelude."""
    started = []

    def start(code, engine="libaio", **options):
        code = PRELUDE + textwrap.dedent(code)
        started.append(start_python(code, engine, faulty_library, tmp_path, **options))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def script(start_script):
    """Runs a script behind the prelude, to its end."""
    return lambda code, **options: finish(start_script(code, **options), 300)


def succeeded(ran):
    """Ended as it should, and silently."""
    assert (ran.returncode, ran.stderr) == (0, ""), ran
    return ran.stdout


# --- fork -------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["libaio", "fake"])
def test_fork_in_flight_child_is_refused_and_parent_goes_on(script, tmp_path, engine):
    make_file(tmp_path / "file", noise(4 * MIB, seed=1))
    ran = script(
        """
        wanted = (folder / "file").read_bytes()
        handle.sync_pread(aligned(4096), folder / "file")
        hold()
        tensors = [(aligned if i % 2 else misaligned)(500 * KIB) for i in range(6)]
        operations = [
            handle.async_pread(t, folder / "file", i * 12345) for i, t in enumerate(tensors)
        ]
        written = misaligned(MIB).copy_(noise(MIB, seed=2))
        operations.append(handle.async_pwrite(written, folder / "new", 777))
        file = nvmeio.open(folder / "file")

        child = os.fork()
        if not child:
            signal.alarm(100)
            one = operations[0]
            tensor = aligned(4096)
            uses = {
                "async_pread": lambda: handle.async_pread(tensor, folder / "file"),
                "sync_pread": lambda: handle.sync_pread(tensor, file),
                "async_pwrite": lambda: handle.async_pwrite(tensor, folder / "child"),
                "pread": lambda: handle.pread(tensor, folder / "file"),
                "sync_fsync": lambda: handle.sync_fsync(folder / "file"),
                "fsync": lambda: asyncio.run(handle.fsync(folder / "file")),
                "wait": lambda: handle.wait(),
                "drain": lambda: asyncio.run(handle.drain()),
                "result": lambda: one.result(100),
                "exception": lambda: one.exception(100),
                "done": lambda: one.done(),
                "cancel": lambda: one.cancel(),
                "add_done_callback": lambda: one.add_done_callback(print),
                "await": lambda: asyncio.run(wait_for(one)),
                "enter": lambda: handle.__enter__().sync_pread(tensor, folder / "file"),
            }

            async def wait_for(operation):
                return await operation

            for name, use in uses.items():
                try:
                    use()
                except nvmeio.ClosedError as refused:
                    assert "fork" in str(refused), refused
                else:
                    raise AssertionError(f"{name} was not refused in the child")
            assert handle.closed
            handle.close()
            asyncio.run(handle.aclose())
            repr(handle), repr(one)
            handle.stats
            # Its own handle works, beside the remains of the parent's.
            with nvmeio.AioHandle() as own:
                assert own.sync_pread(tensor, folder / "file") == 4096
                assert bytes_of(tensor) == wanted[:4096]
                assert own.sync_pread(tensor, file, 4096) == 4096
            del handle, operations, one, uses
            gc.collect()
            sys.exit(0)

        assert os.waitpid(child, 0)[1] == 0
        let_go()
        assert handle.wait(100) == 8
        for i, (operation, tensor) in enumerate(zip(operations, tensors)):
            assert operation.result() == tensor.nbytes
            assert bytes_of(tensor) == wanted[i * 12345 :][: tensor.nbytes]
        assert (folder / "new").read_bytes()[777:] == bytes_of(written)
        assert handle.sync_pread(tensors[0], folder / "file") == tensors[0].nbytes
        file.close()
        handle.close()
        print("good")
        """,
        engine=engine,
        options=SHOW_RESOURCE_WARNINGS,
    )
    assert succeeded(ran) == "good\n"


def test_child_that_ignores_the_handle_exits_silently(script, tmp_path):
    """What is in flight is the parent's: nothing for the child to wait for, or to warn of."""
    make_file(tmp_path / "file", noise(MIB))
    ran = script(
        """
        hold()
        operation = handle.async_pread(aligned(MIB), folder / "file")
        child = os.fork()
        if not child:
            signal.alarm(100)
            sys.exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        let_go()
        assert operation.result(100) == MIB
        handle.close()
        """,
        options=SHOW_RESOURCE_WARNINGS,
    )
    assert succeeded(ran) == ""


def test_memory_of_reads_in_flight_stays_the_parents(tmp_path):
    """Pages that a drive writes into must not become copy-on-write under its feet by a fork."""
    make_file(tmp_path / "file", noise(24 * MIB, seed=3))
    ran = run_python(
        """
        import os, signal, sys
        from pathlib import Path
        import nvmeio
        import torch
        from faults._support import aligned, bytes_of, misaligned

        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        folder = Path(sys.argv[1])
        wanted = (folder / "file").read_bytes()
        mib = 1 << 20
        handle = nvmeio.AioHandle(block_size=256 << 10, queue_depth=32)
        for turn in range(8):
            allocate = (aligned, misaligned)[turn % 2]
            tensors = [allocate(3 * mib) for _ in range(8)]
            operations = [
                handle.async_pread(t, folder / "file", i * 3 * mib) for i, t in enumerate(tensors)
            ]
            children = []
            for _ in range(3):
                child = os.fork()
                if not child:
                    signal.alarm(100)
                    for tensor in tensors:
                        tensor.fill_(0)
                    os._exit(0)
                for tensor in tensors:
                    tensor.view(-1)[:: 4096].sum()
                children.append(child)
            assert handle.wait(100) == 8
            for i, tensor in enumerate(tensors):
                assert bytes_of(tensor) == wanted[i * 3 * mib :][: 3 * mib], (turn, i)
            for child in children:
                assert os.waitpid(child, 0)[1] == 0, "the child"
        handle.close()
        """,
        tmp_path,
        timeout_s=300,
    )
    assert succeeded(ran) == ""


def test_multiprocessing_by_fork(script, tmp_path):
    """What a DataLoader with workers does: children with the parent's handle in their memory."""
    make_file(tmp_path / "file", noise(MIB, seed=4))
    ran = script(
        """
        import multiprocessing

        wanted = (folder / "file").read_bytes()

        def work(index, results):
            try:
                handle.sync_pread(aligned(4096), folder / "file")
            except nvmeio.ClosedError:
                with nvmeio.AioHandle() as own:
                    tensor = misaligned(100_000)
                    own.sync_pread(tensor, folder / "file", index * 1000)
                right = bytes_of(tensor) == wanted[index * 1000 :][:100_000]
                results.put((index, right))

        fork = multiprocessing.get_context("fork")
        results = fork.SimpleQueue()
        operation = handle.async_pread(aligned(MIB), folder / "file")
        hold()
        held = handle.async_pread(aligned(MIB), folder / "file")
        workers = [fork.Process(target=work, args=(i, results)) for i in range(3)]
        for worker in workers:
            worker.start()
        assert sorted(results.get() for _ in workers) == [(i, True) for i in range(3)]
        for worker in workers:
            worker.join(100)
            assert worker.exitcode == 0
        let_go()
        assert held.result(100) == operation.result(100) == MIB
        handle.close()
        """,
        options=SHOW_RESOURCE_WARNINGS,
    )
    assert succeeded(ran) == ""


def test_fork_within_a_running_loop(script, tmp_path):
    """subprocess and os.fork beside awaited operations: the loop goes on in the parent."""
    make_file(tmp_path / "file", noise(2 * MIB, seed=5))
    ran = script(
        """
        wanted = (folder / "file").read_bytes()

        async def main():
            tensor = misaligned(2 * MIB)
            hold()
            task = asyncio.create_task(handle.async_pread(tensor, folder / "file"))
            await asyncio.sleep(0.01)
            child = os.fork()
            if not child:
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(7)")
            assert await process.wait() == 0
            let_go()
            assert await asyncio.wait_for(task, 100) == 2 * MIB
            assert bytes_of(tensor) == wanted
            await handle.aclose()

        asyncio.run(main())
        """
    )
    assert succeeded(ran) == "7\n"


# --- exit -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "started"),
    [
        ("libaio", "with no loop"),
        ("libaio", "on a loop that ended"),
        ("libaio", "in a thread"),
        ("fake", "with no loop"),
    ],
)
def test_exit_in_flight_warns_and_finishes(script, tmp_path, engine, started):
    ran = script(
        f"""
        tensor = misaligned(5 * MIB + 333).copy_(noise(5 * MIB + 333, seed=6))

        def begin():
            hold()
            handle.async_pwrite(tensor, folder / "file", 99)

        async def main():
            begin()

        started = {started!r}
        if started == "with no loop":
            begin()
        elif started == "in a thread":
            thread = threading.Thread(target=begin)
            thread.start()
            thread.join()
        else:
            asyncio.run(main())
        del tensor
        let_go_when_it_is_told()
        """,
        engine=engine,
        options=SHOW_RESOURCE_WARNINGS,
    )
    assert ran.returncode == 0, ran
    assert "ResourceWarning: the interpreter exits with 1 operations in flight" in ran.stderr
    assert "Traceback" not in ran.stderr
    written = (tmp_path / "file").read_bytes()
    assert written[99:] == bytes_of(noise(5 * MIB + 333, seed=6))
    assert written[:99] == bytes(99)


@pytest.mark.parametrize("dropped", [False, True])
def test_exit_in_flight_finishes_where_warnings_are_errors(script, tmp_path, dropped):
    """The warning must not take the place of the waiting, nor a collected handle be forgotten."""
    ran = script(
        f"""
        hold()
        handle.async_pwrite(misaligned(5 * MIB).copy_(noise(5 * MIB, seed=6)), folder / "file")
        let_go_when_it_is_told()
        if {dropped}:
            ring = [handle]
            ring.append(ring)
            del ring, handle
            gc.collect()
        """,
        options=("-W", "error"),
    )
    assert "ResourceWarning" in ran.stderr
    assert (tmp_path / "file").read_bytes() == bytes_of(noise(5 * MIB, seed=6))


@pytest.mark.parametrize(
    ("engine", "turns", "options"), [("libaio", 1, ("-X", "dev")), ("threads", 6, ())]
)
def test_exit_without_close_is_silent_and_quick(tmp_path, engine, turns, options):
    """Nothing is in flight, so nothing can be lost: no reason to complain, or to wait.

    The portable engine hung in one exit of four: a worker had been frozen with a lock in its hand.
    """
    make_file(tmp_path / "file", noise(MIB))
    for _ in range(turns):
        ran = run_python(
            """
            import asyncio, sys, time
            import nvmeio
            from faults._support import misaligned

            engine, path = sys.argv[1:]
            tensor = misaligned(1 << 20)
            unused = nvmeio.AioHandle(engine=engine)
            in_a_loop = nvmeio.AioHandle(engine=engine)

            async def main():
                await in_a_loop.async_pread(tensor, path)

            asyncio.run(main())
            with_callback = nvmeio.AioHandle(engine=engine)
            nvmeio.as_future(with_callback.async_pread(tensor, path)).result(100)
            used = nvmeio.AioHandle(engine=engine, intra_op_parallelism=2)
            used.sync_pread(tensor, path)
            print(time.monotonic())
            """,
            engine,
            tmp_path / "file",
            timeout_s=300,
            options=(*options, "-W", "error"),
        )
        ended = time.monotonic()
        assert ended - float(succeeded(ran)) < 19  # no wait of ours takes less than 20


def test_os_exit_in_flight(script, tmp_path):
    make_file(tmp_path / "file", noise(MIB))
    ran = script(
        """
        hold()
        handle.async_pread(aligned(MIB), folder / "file")
        handle.async_pwrite(aligned(MIB), folder / "new")
        os._exit(7)
        """
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, "", "")


def test_sys_exit_in_a_coroutine(script, tmp_path):
    """asyncio.run cancels what is left, which waits for the kernel, and the status is kept."""
    make_file(tmp_path / "file", noise(MIB))
    ran = script(
        """
        async def main():
            hold()
            tasks = [
                asyncio.create_task(handle.async_pread(misaligned(MIB), folder / "file"))
                for _ in range(3)
            ]
            await asyncio.sleep(0.05)
            later(0.3, let_go)
            sys.exit(9)

        asyncio.run(main())
        """,
        options=SHOW_RESOURCE_WARNINGS,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (9, "", "")


def test_unhandled_error_in_flight_is_what_is_shown(script, tmp_path):
    make_file(tmp_path / "file", noise(MIB))
    ran = script(
        """
        hold()
        handle.async_pread(aligned(MIB), folder / "file")
        later(0.3, let_go)
        raise RuntimeError("the user's own")
        """
    )
    assert ran.returncode == 1
    assert "RuntimeError: the user's own" in ran.stderr.splitlines()[-1]


@pytest.mark.parametrize("turn", range(2))
def test_exit_with_daemon_threads_at_work(tmp_path, turn):
    """Threads that the interpreter freezes in the middle of an operation bring nothing down."""
    make_file(tmp_path / "file", noise(4 * MIB))
    ran = run_python(
        """
        import asyncio, sys, threading, time
        import nvmeio
        from faults._support import misaligned

        path = sys.argv[1]
        handle = nvmeio.AioHandle(block_size=64 << 10)
        other = nvmeio.AioHandle(engine="threads")
        begun = threading.Barrier(5)
        # Made and kept here: freeing a tensor gives up the GIL inside of torch, and a thread that
        # is frozen there aborts the process.
        tensors = [misaligned(1 << 20) for _ in range(4)]

        def work(handle, number):
            tensor = tensors[number]
            begun.wait()
            try:
                while True:
                    handle.async_pread(tensor, path, 4096).result()
            except (nvmeio.ClosedError, RuntimeError):
                pass  # it came upon a handle that is being closed

        def loop():
            async def main():
                tensor = tensors[0]
                begun.wait()
                while True:
                    await handle.async_pread(tensor, path)
            try:
                asyncio.run(main())
            except (nvmeio.ClosedError, RuntimeError):
                pass

        for target, *arguments in (
            (work, handle, 1), (work, handle, 2), (work, other, 3), (loop,)
        ):
            threading.Thread(target=target, args=arguments, daemon=True).start()
        begun.wait()
        time.sleep(0.2)
        """,
        tmp_path / "file",
    )
    assert ran.returncode == 0, ran
    assert "Traceback" not in ran.stderr and "Fatal" not in ran.stderr


# --- a loop or a handle that goes -------------------------------------------------------------


def test_loop_closed_in_flight(faulty, tmp_path):
    content = noise(2 * MIB, seed=7)
    path = make_file(tmp_path / "file", content)
    tensor = misaligned(2 * MIB)
    with faulty.handle(block_size=64 * KIB, queue_depth=4) as handle:

        async def begin():
            faulty.close_gate()
            return handle.async_pread(tensor, path)

        async def another():
            return await handle.async_pread(misaligned(4096), path)

        operation = asyncio.run(begin())
        assert not operation.done()
        with pytest.warns(ResourceWarning, match="loop was closed with 1 operations in flight"):
            loop = asyncio.new_event_loop()
            task = loop.create_task(another())
            loop.run_until_complete(asyncio.sleep(0))
        faulty.open_gate()
        assert loop.run_until_complete(task) == 4096
        loop.close()
        assert operation.result(100) == 2 * MIB
        assert handle.wait(100) == 2
    assert bytes_of(tensor) == bytes_of(content)


class _CountsFrees:
    """The shim, telling of every request that is freed whether the kernel was done with it."""

    def __init__(self, lib):
        self._lib = lib
        self.freed = []

    def __getattr__(self, name):
        return getattr(self._lib, name)

    def nv_request_free(self, request):
        self.freed.append(bool(self._lib.nv_is_done(request)))
        self._lib.nv_request_free(request)


@pytest.mark.parametrize("cycle", [False, True])
def test_handle_and_tensor_dropped_in_flight(faulty, tmp_path, monkeypatch, caplog, cycle):
    """In flight they are the operation's, and it is the core's; the file is complete in the end.

    The collector finalises all of a cycle, the shim's requests too, before it hears that the
    handle's `__del__` has handed them to a thread: that thread then waited on freed memory.
    """
    collect()
    threads = nvmeio_threads()
    shim = _CountsFrees(nvmeio.engines.libaio.lib)
    monkeypatch.setattr(nvmeio.engines.libaio, "lib", shim)
    path = tmp_path / "file"
    wanted = bytes_of(noise(2 * MIB, seed=8))
    faulty.close_gate()
    handle = nvmeio.AioHandle(64 * KIB, 4, engine=nvmeio.engines.libaio.LibaioEngine(faulty._table))
    handle.async_pwrite(misaligned(2 * MIB).copy_(noise(2 * MIB, seed=8)), path)
    assert eventually(lambda: faulty["events_held"] == 4)
    with pytest.warns(ResourceWarning, match="dropped with operations in flight"):
        if cycle:
            ring = [handle]
            ring.append(ring)
            del ring
        del handle
        collect()
    # The memory that was the tensor's, were it free, is given to others and changed.
    others = [aligned(2 * MIB) for _ in range(8)]
    faulty.open_gate()
    assert eventually(lambda: path.exists() and path.read_bytes() == wanted)
    assert eventually(lambda: not nvmeio_threads() - threads)
    spin_until_collected(lambda: bool(shim.freed))
    assert shim.freed == [True], "a request was freed in the hands of the kernel"
    assert not caplog.records, caplog.text
    assert all(bytes_of(other) == b"\xa5" * 2 * MIB for other in others)


def test_idle_handles_dropped_in_cycles(tmp_path):
    """The collector finalises the shim's objects with the handle that still has to close them."""
    path = make_file(tmp_path / "file", noise(4096, seed=8))

    async def on_a_loop():
        handle = nvmeio.AioHandle(queue_depth=1)
        assert await handle.async_pread(torch.empty(4096, dtype=torch.uint8), path) == 4096
        handle.itself = handle  # type: ignore[attr-defined]

    before, threads = open_descriptors(), nvmeio_threads()
    for _ in range(20):
        asyncio.run(on_a_loop())
        collect()
    spin_until_collected(lambda: not nvmeio_threads() - threads)
    spin_until_collected(lambda: not new_descriptors(before))


def test_operation_outlives_its_handle(faulty, tmp_path):
    content = noise(2 * MIB, seed=9)
    path = make_file(tmp_path / "file", content)
    tensor = aligned(2 * MIB)
    faulty.close_gate()
    handle = nvmeio.AioHandle(64 * KIB, 4, engine=nvmeio.engines.libaio.LibaioEngine(faulty._table))
    operation = handle.async_pread(tensor, path)
    with pytest.warns(ResourceWarning, match="dropped with operations in flight"):
        del handle
        collect()
    faulty.open_gate()
    assert operation.result(100) == 2 * MIB
    assert bytes_of(tensor) == bytes_of(content)


# --- Ctrl-C -----------------------------------------------------------------------------------


BLOCKING = (
    "operation.result()",
    "operation.exception()",
    "handle.wait()",
    "handle.sync_pread(misaligned(MIB), folder / 'file')",
    "nvmeio.as_future(operation).result()",
    "asyncio.run(handle.drain())",
    "handle.close()",
)


def test_ctrl_c_is_served_while_blocked(start_script, tmp_path):
    """Promptly; and what was in flight finishes afterwards as if nothing had happened."""
    make_file(tmp_path / "file", noise(MIB, seed=10))
    process = start_script(
        f"""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for block in {BLOCKING!r}:
            tensor = misaligned(MIB)
            hold()
            operation = handle.async_pread(tensor, folder / "file")
            print("blocked", flush=True)
            try:
                eval(compile(block, block, "eval"))
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            else:
                print("not interrupted", flush=True)
            let_go()
            assert operation.result(100) == MIB
            assert bytes_of(tensor) == (folder / "file").read_bytes()
        handle.close()
        print("finished", flush=True)
        """
    )
    for block in BLOCKING:
        assert process.stdout.readline() == "blocked\n", block
        wait_until_asleep(process.pid)
        process.send_signal(signal.SIGINT)
        # While it is held: nothing but the signal ends it.
        assert process.stdout.readline() == "interrupted\n", block
    ran = finish(process, 200)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "finished\n", "")


def test_ctrl_c_cancels_what_asyncio_run_awaits(start_script, tmp_path):
    """Blocks that the kernel does not take are dropped, so that the loop ends at once."""
    make_file(tmp_path / "file", noise(MIB))
    process = start_script(
        """
        import errno

        signal.signal(signal.SIGINT, signal.default_int_handler)
        tensor = misaligned(MIB)

        async def main():
            async with handle:
                kernel.set(submit_error=errno.EAGAIN, submit_error_always=1)
                operation = handle.async_pread(tensor, folder / "file")
                print("awaiting", flush=True)
                await operation

        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        assert bytes_of(tensor) == b"\\xa5" * MIB
        assert handle.closed and handle.stats.in_flight == 0
        """
    )
    assert process.stdout.readline() == "awaiting\n"
    wait_until_asleep(process.pid)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "interrupted\n"
    assert time.monotonic() - began < 8  # the blocks themselves give up after ten
    ran = finish(process, 200)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@pytest.mark.parametrize("block", ["operation.result()", "asyncio.run(handle.drain())"])
def test_uncaught_ctrl_c_ends_the_process(start_script, tmp_path, block):
    make_file(tmp_path / "file", noise(MIB))
    process = start_script(
        f"""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        hold()
        operation = handle.async_pread(misaligned(MIB), folder / "file")
        print("blocked", flush=True)

        def wait():
            while not (folder / "go").exists():
                time.sleep(0.01)
            let_go()

        threading.Thread(target=wait, daemon=True).start()
        {block}
        """
    )
    assert process.stdout.readline() == "blocked\n"
    wait_until_asleep(process.pid)
    process.send_signal(signal.SIGINT)
    while not (told := process.stderr.readline()).startswith("KeyboardInterrupt"):
        assert told, "it ended before it was interrupted"
    # It comes to its end, which waits for what is in flight.
    (tmp_path / "go").touch()
    ran = finish(process, 200)
    assert ran.returncode == -signal.SIGINT
    assert ran.stderr == ""


@pytest.mark.untraced
def test_ctrl_c_at_any_moment_strands_no_operation(tmp_path):
    """An interrupt between noticing and concluding left operations in flight for ever.

    `wait`, `close` and the interpreter's exit then hung.
    """
    make_file(tmp_path / "file", noise(300 * KIB, seed=11))
    ran = run_python(
        """
        import random, signal, sys, time
        import nvmeio
        from faults._support import bytes_of, misaligned

        path = sys.argv[1]
        handle = nvmeio.AioHandle(block_size=64 << 10)

        class Interrupt(KeyboardInterrupt):
            pass

        def interrupt(number, frame):
            raise Interrupt

        signal.signal(signal.SIGALRM, interrupt)
        chance = random.Random(0)
        interrupts = 0
        tensor = misaligned(300 << 10)
        while interrupts < 500:
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0002, 0.003))
                while True:
                    handle.async_pread(tensor, path).result()
            except Interrupt:
                interrupts += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        handle.wait(100)
        assert handle.stats.in_flight == 0
        tensor.fill_(0)
        handle.sync_pread(tensor, path)
        with open(path, "rb") as file:
            assert bytes_of(tensor) == file.read()
        handle.close()
        """,
        tmp_path / "file",
        timeout_s=300,
    )
    assert succeeded(ran) == ""


def test_signals_with_handlers_do_not_disturb(tmp_path):
    """EINTR everywhere: in the lanes, in the waiting thread, in the dispatcher."""
    content = noise(8 * MIB, seed=12)
    path = make_file(tmp_path / "file", content)
    hits = []
    before = signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        with nvmeio.AioHandle(block_size=64 * KIB) as handle:
            for turn in range(12):
                tensor = (aligned, misaligned)[turn % 2](8 * MIB)
                assert handle.async_pread(tensor, path).result(100) == 8 * MIB
                assert handle.async_pwrite(tensor, tmp_path / "copy", turn).result(100) == 8 * MIB
                assert bytes_of(tensor) == bytes_of(content)
            handle.sync_fsync(tmp_path / "copy")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(hits) > 10
    assert (tmp_path / "copy").read_bytes()[11:] == bytes_of(content)
    assert torch.equal(tensor, content)
    assert os.path.getsize(path) == 8 * MIB

"""Loops, handles and programs that end while operations are in flight; Ctrl-C at any moment."""

import asyncio
import os
import signal
import time

import pytest
import torch
from faults._exit_scripts import SHOW_RESOURCE_WARNINGS, succeeded
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
    assert "ResourceWarning: the interpreter exits with 1 operation in flight" in ran.stderr
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
        with pytest.warns(ResourceWarning, match="loop was closed with 1 operation in flight"):
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
    handle = nvmeio.AioHandle(64 * KIB, 4, engine=nvmeio.engines.libaio.LibaioEngine(faulty.table))
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
    handle = nvmeio.AioHandle(64 * KIB, 4, engine=nvmeio.engines.libaio.LibaioEngine(faulty.table))
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
    # By a line too: what came together with the line before is not left for `finish`.
    assert process.stdout.readline() == "finished\n"
    ran = finish(process, 200)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


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

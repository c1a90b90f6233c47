"""Fork, interpreter exit and Ctrl-C with operations in flight.

Each test is a process of its own. In flight for certain means: on the faulty kernel behind a closed
gate (libaio), or on the public fake engine held by an event (threads).
"""

import pytest
from faults._exit_scripts import SHOW_RESOURCE_WARNINGS, succeeded
from faults._support import (
    MIB,
    make_file,
    noise,
    run_python,
)

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

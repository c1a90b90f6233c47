"""Streams: opened, interrupted, closed and dropped; layers that stay; awaited."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import gc
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inference._models import llama, loaded, logits, prompt, saved, tokens
from inference._stream_parts import NAME, Make, changed_checkpoint
from inference.test_models import empty_net, saved_net
from inside import uses_of
from support import (
    PATIENCE_S,
    HeldEngine,
    assert_levels_off,
    nvmeio_threads,
    open_descriptors,
    resident_bytes,
    spin_until,
    spin_until_collected,
    thread,
    tracked_objects,
    until,
)
from torch.distributed.checkpoint import CheckpointException

import nvmeio
from nvmeio._files import system
from nvmeio._pages import PAGE_BYTES
from nvmeio._threads.owner import OwnerThread
from nvmeio.errors import ClosedError, IntegrityError
from nvmeio.inference import run_in_blocks
from nvmeio.inference._stream.turns import Waiting
from nvmeio.testing import FakeEngine

# Life


@pytest.mark.parametrize("kind", ["transformers", "module"])
def test_a_model_closes_at_the_end_of_with(kind: str, tmp_path: Path, stream: Make) -> None:
    """`with nvmeio.stream_model(...) as model` was a TypeError."""
    if kind == "transformers":
        saved(llama, tmp_path)
        made = stream(tmp_path)
    else:
        saved_net(tmp_path / NAME)
        made = stream(empty_net(), tmp_path / NAME)
    assert pickle_name(made) == pickle_name(loaded(tmp_path) if kind != "module" else empty_net())
    with pytest.raises(ZeroDivisionError), made as model:
        assert model is made
        assert not model.weight_stream.closed
        1 / 0  # noqa: B018
    assert made.weight_stream.closed
    made.weight_stream.reopen()
    with made:
        assert not made.weight_stream.closed
    assert made.weight_stream.closed


def pickle_name(model: object) -> tuple[str, str, str]:
    """What messages and files say of a class."""
    kind = type(model)
    return kind.__module__, kind.__qualname__, kind.__name__


def test_a_stream_is_closed_and_opened_again(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    whole = logits(loaded(tmp_path), prompt())
    before = open_descriptors()
    model = stream(tmp_path, resident_bytes=300_000)
    for _ in range(3):
        assert logits(model, prompt()).equal(whole)
        model.weight_stream.close()
        model.weight_stream.close()
        assert model.weight_stream.closed
        spin_until(lambda: open_descriptors().items() <= before.items())
        with pytest.raises(ClosedError, match="reopen"):
            logits(model, prompt())
        model.weight_stream.reopen()
    with model.weight_stream:
        assert logits(model, prompt()).equal(whole)
    assert model.weight_stream.closed


def test_another_checkpoint_is_noticed_when_it_is_opened_again(
    tmp_path: Path, stream: Make
) -> None:
    saved(llama, tmp_path)
    model = stream(tmp_path, resident_bytes=300_000)
    model.weight_stream.close()
    changed_checkpoint(tmp_path, lambda s: s.update({NAME: torch.ones(3, 4)}))
    with pytest.raises(IntegrityError, match="differs from the checkpoint"):
        model.weight_stream.reopen()
    assert model.weight_stream.closed


def test_a_model_that_is_dropped_gives_everything_back(tmp_path: Path) -> None:
    saved(llama, tmp_path)
    before, threads = open_descriptors(), nvmeio_threads()
    model = nvmeio.stream_model(tmp_path, resident_bytes=300_000)
    logits(model, prompt())
    assert not open_descriptors().items() <= before.items()
    assert nvmeio_threads() - threads
    del model
    spin_until_collected(
        lambda: open_descriptors().items() <= before.items() and nvmeio_threads() <= threads
    )


@torch.no_grad()
def test_a_model_with_a_parameter_of_its_own_goes_when_it_is_dropped(tmp_path: Path) -> None:
    """What was to close it kept it: through the parts outside of the layers, and after failures."""
    saved_net(tmp_path / "net.safetensors")
    failing: dict[str, int] = {}
    engine = FakeEngine(fail=lambda kind, *_: failing.get(kind, 0))
    with nvmeio.AioHandle(engine=engine) as handle:
        before = open_descriptors()
        net = nvmeio.stream_model(
            empty_net(), tmp_path / "net.safetensors", resident_bytes=200_000, handle=handle
        )
        net(torch.randn(5, 16))
        with pytest.raises(RuntimeError):
            net(torch.randn(5, 17))
        for _ in range(2):
            failing["pread"] = errno.EIO
            with pytest.raises(nvmeio.TransferError, match="EIO"):
                for _ in range(3):  # what was read ahead is there
                    net(torch.randn(5, 16))
            failing.clear()
            net(torch.randn(5, 16))
        failing["pread"] = errno.EIO
        with contextlib.suppress(nvmeio.TransferError):
            net(torch.randn(5, 16))
        gone = weakref.ref(net)
        del net
        spin_until_collected(lambda: gone() is None)
        spin_until(lambda: open_descriptors().items() <= before.items())


@torch.no_grad()
@pytest.mark.parametrize("engine", ["threads", "auto"])
def test_hundreds_of_passes_leak_nothing(engine: str, tmp_path: Path, stream: Make) -> None:
    saved_net(tmp_path / "net.safetensors")
    with nvmeio.AioHandle(engine=engine) as handle:
        net = stream(
            empty_net(), tmp_path / "net.safetensors", handle=handle, resident_bytes=150_000
        )
        x = torch.randn(5, 16)

        def passes(count: int = 250) -> None:
            for _ in range(count):
                net(x)

        passes(100)
        descriptors = open_descriptors()
        assert_levels_off(tracked_objects, passes, 125)
        assert_levels_off(resident_bytes, passes, 2 << 20)
        spin_until(lambda: open_descriptors().items() <= descriptors.items())
        net.weight_stream.close()


def test_a_thousand_tokens_leak_nothing(tmp_path: Path, stream: Make) -> None:
    """Caches on disk come and go, each with a file."""
    saved(lambda: llama(layers=2), tmp_path)
    model = stream(tmp_path, resident_bytes=200_000, kv_offload=tmp_path)
    ids = prompt(batch=1, length=70)  # one block is put away

    def generations(count: int = 50) -> None:
        for _ in range(count):
            assert tokens(model, ids, 10).shape == (1, 80)

    generations(10)
    gc.collect()
    descriptors, used = open_descriptors(), model.weight_stream.stats.units_used
    assert_levels_off(tracked_objects, generations, 250)
    assert_levels_off(resident_bytes, generations, 4 << 20)
    assert model.weight_stream.stats.units_used >= used + 1000 * 2
    spin_until_collected(lambda: open_descriptors().items() <= descriptors.items())


def test_several_threads_may_use_a_model(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    whole = loaded(tmp_path)
    model = stream(tmp_path, resident_bytes=250_000)
    prompts = [prompt(seed=n) for n in range(3)]
    expected = [tokens(whole, ids) for ids in prompts]
    with thread(tokens, model, prompts[0]) as first, thread(tokens, model, prompts[1]) as second:
        third = tokens(model, prompts[2])
    assert [first[0].equal(expected[0]), second[0].equal(expected[1])] == [True, True]
    assert third.equal(expected[2])


@torch.no_grad()
def test_an_interrupted_pass_leaves_a_model_that_works(tmp_path: Path, stream: Make) -> None:
    """Ctrl-C runs no hooks: nobody takes the weights away."""
    whole = saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=150_000, window=2)
    x = torch.randn(5, 16)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = net.blocks[1].second.register_forward_hook(interrupt)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            net(x)
    hook.remove()
    for _ in range(2):
        assert net(x).equal(whole(x))


@torch.no_grad()
@pytest.mark.parametrize("then", ["thread", "blocks", "close"])
def test_an_interrupted_pass_keeps_nobody_waiting(then: str, tmp_path: Path, stream: Make) -> None:
    """Whoever came next, in another thread or in a schedule, waited for ever."""
    whole = saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=150_000, window=2)
    x = torch.randn(5, 16)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = net.blocks[1].second.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        net(x)
    hook.remove()

    def compute() -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = net(x)
        return found

    if then == "close":
        net.weight_stream.close()
        net.weight_stream.reopen()
    if then == "blocks":  # with as many threads of torch's as here
        found = run_in_blocks(net, [compute, compute])
        expected = [whole(x)]
    else:
        with thread(compute) as found:
            pass
        with thread(whole, x) as expected:  # other threads compute in other portions
            pass
    assert all(value.equal(expected[0]) for value in found)
    assert net(x).equal(whole(x))


@torch.no_grad()
def test_whoever_computes_is_waited_for(tmp_path: Path, stream: Make) -> None:
    """However long it takes: its frame is executing, though it waits itself."""
    whole = saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=150_000, window=2)
    x = torch.randn(5, 16)
    inside, go = threading.Event(), threading.Event()
    order: list[str] = []

    def wait(*_: Any) -> None:
        if not inside.is_set():
            inside.set()
            go.wait(PATIENCE_S)
            order.append("first")

    net.blocks[1].second.register_forward_hook(wait)

    def compute() -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = net(x)
        order.append("done")
        return found

    with thread(compute) as first:
        assert inside.wait(PATIENCE_S)
        with thread(compute) as second:
            time.sleep(0.5)  # several looks at whether the turn was left behind
            assert order == []
            go.set()
    assert order[0] == "first"
    with thread(whole, x) as expected:
        pass
    assert first[0].equal(expected[0]) and second[0].equal(expected[0])


# Layers that stay


@torch.no_grad()
def test_layers_that_stay_are_used_without_asking_their_owner(
    tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=64 << 20)
    x = torch.randn(5, 16)
    net(x)
    used = net.weight_stream.stats.units_used

    def call(*_: Any) -> None:
        raise AssertionError("asked")

    with monkeypatch.context() as patched:
        patched.setattr(OwnerThread, "call", call)
        assert net(x).equal(whole(x))
    assert net.weight_stream.stats.units_used == 2 * used
    net.weight_stream.close()
    with pytest.raises(ClosedError):
        net(x)
    net.weight_stream.reopen()
    assert net(x).equal(whole(x))


@torch.no_grad()
def test_a_layer_that_stays_and_is_replaced_is_refused(tmp_path: Path, stream: Make) -> None:
    saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=64 << 20)
    x = torch.randn(5, 16)
    net(x)
    unit = next(each for each in net.weight_stream.units if each.is_layer)
    target = unit.targets[0]
    before = target.module._parameters[target.attribute]
    target.module._parameters[target.attribute] = torch.nn.Parameter(torch.zeros_like(before))
    with pytest.raises(RuntimeError, match="was replaced"):
        net(x)


CHANGES: dict[str, Callable[[torch.nn.Parameter], Any]] = {
    "zeros": lambda weight: weight.zero_(),
    "other values": lambda weight: weight.copy_(torch.ones(weight.shape)),
    "an initialisation": torch.nn.init.zeros_,
    "another tensor": lambda weight: torch.utils.swap_tensors(
        weight, torch.nn.Parameter(torch.ones(weight.shape))
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_on_disk_that_is_changed_in_place_is_refused(
    change: str, tmp_path: Path, stream: Make
) -> None:
    """The change was lost, without a word."""
    saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors")
    unit = next(each for each in net.weight_stream.units if each.is_layer)
    CHANGES[change](unit.targets[0].module._parameters[unit.targets[0].attribute])
    with pytest.raises(RuntimeError, match="was changed in place after its model was streamed"):
        net(torch.randn(5, 16))


@torch.no_grad()
def test_other_weights_are_refused(tmp_path: Path, stream: Make) -> None:
    """They reached what was in memory, and were lost for what was on disk."""
    whole = saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors")
    x = torch.randn(5, 16)
    other = {name: torch.zeros_like(weight) for name, weight in whole.state_dict().items()}
    with pytest.raises(RuntimeError, match="reads its weights from its checkpoint"):
        net.load_state_dict(other)
    net.enter.load_state_dict(
        {}, strict=False
    )  # what is not the stream's is nobody's business here
    assert net(x).equal(whole(x))


def to_dcp(state: Any, path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    from nvmeio.integrations.dcp import NvmeStorageWriter

    dcp.save(state, storage_writer=NvmeStorageWriter(path), no_dist=True)


SAVERS: dict[str, Callable[[Any, Path], Any]] = {
    "torch.save": torch.save,
    "nvmeio.save": nvmeio.save,
    "nvmeio.save_safetensors": nvmeio.save_safetensors,
    "dcp": to_dcp,
}


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of dcp, that there is no process group
def test_a_state_dict_of_weights_on_disk_is_not_saved(
    saver: str, tmp_path: Path, stream: Make
) -> None:
    """`torch.save` and `nvmeio.save` wrote it without a word, and what was loaded was no weight."""
    whole = saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors")
    state = net.state_dict()
    assert state.keys() == whole.state_dict().keys()
    absent = {name: value for name, value in state.items() if value.is_meta}
    assert absent
    for name, value in absent.items():
        wanted = whole.state_dict()[name]
        assert (value.shape, value.dtype) == (wanted.shape, wanted.dtype)
    with pytest.raises((TypeError, CheckpointException)) as refused:
        SAVERS[saver](copy.deepcopy(state), tmp_path / "saved")
    assert "on disk" in str(refused.value) or "meta tensor" in str(refused.value)
    present = {name: value for name, value in state.items() if not value.is_meta}
    nvmeio.save(present, tmp_path / "present.pt")
    for name, value in nvmeio.load(tmp_path / "present.pt").items():
        assert value.equal(whole.state_dict()[name])


MOVES: dict[str, Callable[[torch.nn.Module], Any]] = {
    "another dtype": lambda net: net.half(),
    "another device": lambda net: net.to("meta"),
    "empty elsewhere": lambda net: net.to_empty(device="meta"),
    "a layer": lambda net: next(net.children()).double(),
}
if not torch.cuda.is_available():
    MOVES["a device that is not there"] = lambda net: net.cuda()


@torch.no_grad()
@pytest.mark.parametrize("move", MOVES)
def test_a_model_is_not_moved(move: str, tmp_path: Path, stream: Make) -> None:
    whole = saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors")
    x = torch.randn(5, 16)
    with pytest.raises(RuntimeError, match="a streamed model cannot be moved or converted"):
        MOVES[move](net)
    assert net.float().to("cpu").to_empty(device="cpu") is net  # nothing changes
    assert net(x).equal(whole(x))


def test_a_part_of_a_model_is_not_pickled(tmp_path: Path, stream: Make) -> None:
    """It was refused with "cannot pickle 'weakref.ReferenceType' object"."""
    saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=150_000)
    for part in (net.blocks[1], net.blocks[1].second.weight):
        for saver in (torch.save, nvmeio.save):
            with pytest.raises(TypeError, match="weights are on disk"):
                saver(part, tmp_path / "part.pt")


def test_a_model_is_not_pickled(tmp_path: Path, stream: Make) -> None:
    """The message was of a function within one of nvmeio's own."""
    saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors")
    with pytest.raises(TypeError, match="call stream_model in each process"):
        pickle.dumps(net)


@pytest.mark.parametrize("late", [False, True])
def test_closing_waits_for_a_layer_that_stays(
    late: bool, tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for no layer of the thread that closes, which may be woken when the pass is over."""
    whole = saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=64 << 20)
    x = torch.randn(5, 16)
    inside, go, through = threading.Event(), threading.Event(), threading.Event()
    turns = uses_of(net).turns
    await_shared, waits = turns.await_shared, threading.Event()

    class Late(Waiting):
        def wait(self) -> None:
            super().wait()
            through.wait(PATIENCE_S)

    def await_late(caller: int) -> Any:
        waiting = await_shared(caller)
        if waiting is not None:
            waits.set()
        return Late(*waiting) if late and waiting is not None else waiting

    monkeypatch.setattr(turns, "await_shared", await_late)

    def wait(*_: Any) -> None:
        inside.set()
        go.wait(PATIENCE_S)

    def compute() -> Any:
        with torch.no_grad():
            net(x)
            hook = net.blocks[1].register_forward_pre_hook(wait)
            try:
                return net(x)
            except ClosedError as error:
                return error
            finally:
                hook.remove()
                through.set()

    with thread(compute) as first:
        assert inside.wait(PATIENCE_S)
        with thread(net.weight_stream.close) as closing:
            assert waits.wait(PATIENCE_S)
            assert not net.weight_stream.closed and not closing
            go.set()
    assert net.weight_stream.closed
    # At one of its next layers, or it was through the last one before the other thread came.
    right = not isinstance(first[0], ClosedError) and first[0].equal(whole(x))
    assert right or (isinstance(first[0], ClosedError) and not late), first
    net.weight_stream.reopen()
    with torch.no_grad():
        assert net(x).equal(whole(x))
        hook = net.blocks[1].register_forward_pre_hook(lambda *_: net.weight_stream.close())
        with pytest.raises((ClosedError, RuntimeError)):
            net(x)
        hook.remove()
        net.weight_stream.reopen()
        assert net(x).equal(whole(x))


@torch.no_grad()
def test_a_model_may_be_collected_by_a_thread_that_reads_for_it(tmp_path: Path) -> None:
    """Closing waits for that thread: it must not be done in it."""
    saved_net(tmp_path / "net.safetensors")
    before = open_descriptors()
    models: list[Any] = []
    dropped = threading.Event()
    collected: list[str] = []

    def collect(kind: str, offset: int, nbytes: int) -> int:
        if dropped.is_set() and not collected:
            collected.append(threading.current_thread().name)
            gc.collect()
        return 0

    engine = HeldEngine(fail=collect)
    engine.gate.set()
    with nvmeio.AioHandle(engine=engine) as handle:
        threads = nvmeio_threads()
        models.append(
            nvmeio.stream_model(
                empty_net(), tmp_path / "net.safetensors", handle=handle, resident_bytes=150_000
            )
        )
        assert nvmeio_threads() - threads
        # What is read behind the last layer is for the next pass, and still to come.
        models[0].exit.register_forward_pre_hook(lambda *_: engine.gate.clear())
        models[0](torch.randn(5, 16))
        gc.disable()
        try:
            models.clear()
            dropped.set()
            engine.gate.set()
            spin_until(lambda: bool(collected))
            spin_until(lambda: nvmeio_threads() <= threads)  # those that read and own for it
        finally:
            gc.enable()
    assert collected[0].startswith("nvmeio")
    spin_until(lambda: open_descriptors().items() <= before.items())


# Awaited


async def test_it_is_awaited_beside_other_work(tmp_path: Path, stream: Make) -> None:
    saved(lambda: llama(layers=12, width=256), tmp_path)
    model = stream(tmp_path, resident_bytes=6 << 20, handle=None)
    turns, went_on = 0, []

    async def beside() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            await asyncio.sleep(0.001)

    def wait(*_: Any) -> None:
        """Each layer computes only once the loop has run again."""
        before = turns
        spin_until(lambda: turns > before)
        went_on.append(turns)

    for layer in model.model.layers:
        layer.register_forward_hook(wait)
    done = asyncio.Event()
    watching = asyncio.create_task(beside())
    ids = prompt()
    found = await model.weight_stream.run(model.generate, ids, max_new_tokens=4, min_new_tokens=4)
    done.set()
    await watching
    assert found.shape == (2, 11)
    assert len(went_on) == 12 * 4


async def test_a_cancelled_pass_has_stopped_when_that_is_told(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    model = stream(tmp_path, resident_bytes=200_000, handle=None)
    begun, cancelled, told = threading.Event(), threading.Event(), threading.Event()
    late: list[str] = []

    def wait(*_: Any) -> None:
        begun.set()
        cancelled.wait(PATIENCE_S)
        if told.is_set():
            late.append("it went on")

    hook = model.model.layers[0].register_forward_hook(wait)
    work = asyncio.create_task(
        model.weight_stream.run(model.generate, prompt(), max_new_tokens=100, min_new_tokens=100)
    )
    await until(begun.is_set)
    work.cancel()
    asyncio.get_running_loop().call_later(0.01, cancelled.set)  # while that is waited for
    with pytest.raises(asyncio.CancelledError):
        await work
    told.set()
    used = model.weight_stream.stats.units_used
    await asyncio.sleep(0.05)
    assert (model.weight_stream.stats.units_used, late) == (used, [])
    hook.remove()
    assert logits(model, prompt()).equal(logits(loaded(tmp_path), prompt()))


def test_a_forked_child_is_told(tmp_path: Path, stream: Make) -> None:
    saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=150_000)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            net(torch.randn(5, 16))
            answer = b"computed"
        except ClosedError:
            answer = b"ClosedError"
        except BaseException as failed:
            answer = repr(failed).encode()
        os.write(writing, answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b"ClosedError"
    os.waitpid(child, 0)


@torch.no_grad()
def test_streaming_puts_nothing_into_the_page_cache(tmp_path: Path, stream: Make) -> None:
    path = tmp_path / "net.safetensors"
    whole = saved_net(path)
    with path.open("rb") as file:
        fd, pages = file.fileno(), os.path.getsize(path) // PAGE_BYTES

        def cached() -> list[int]:
            return [n for n in range(pages) if system.is_cached(fd, n * PAGE_BYTES, PAGE_BYTES)]

        file.read()
        if len(cached()) < pages:
            pytest.skip("this kernel does not tell what is in its page cache")
        net = stream(empty_net(), path, resident_bytes=150_000)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if before := cached():
            pytest.skip(f"this file system keeps {len(before)} pages in memory")
        x = torch.randn(5, 16)
        assert torch.equal(net(x), whole(x))
        assert cached() == []

"""What a stream does: reads ahead, stays in its budget, says what went wrong, comes back."""

from __future__ import annotations

import asyncio
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
from inference._models import llama, loaded, logits, prompt, saved, t5, tokens
from inference.test_models import Net, empty_net, saved_net
from support import (
    PATIENCE_S,
    HeldEngine,
    Turns,
    aged,
    assert_levels_off,
    nvmeio_threads,
    open_descriptors,
    resident_bytes,
    run_python,
    spin_until,
    spin_until_collected,
    thread,
    tracked_objects,
    until,
)
from torch.distributed.checkpoint import CheckpointException

import nvmeio
from nvmeio._files import system
from nvmeio._formats.safetensors_set import header_of
from nvmeio._pages import PAGE_BYTES
from nvmeio._threads.owner import OwnerThread
from nvmeio.checkpoint.safetensors import load_safetensors, read_header, save_safetensors
from nvmeio.errors import ClosedError, IntegrityError, ShortTransferError, TransferError
from nvmeio.inference import run_in_blocks
from nvmeio.inference._stream.turns import Waiting
from nvmeio.testing import FakeEngine

Make = Callable[..., Any]


# Reading ahead


@torch.no_grad()
def test_the_first_pass_is_prefetched(tmp_path: Path, stream: Make) -> None:
    """The order of the module tree is the guess."""
    saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=150_000)
    x = torch.randn(5, 16)
    net(x)
    stats = net.weight_stream.stats
    assert (stats.mispredicted, stats.dropped) == (0, 0)
    # All six, and those that the window holds of the next pass, while nobody asked for them yet.
    assert stats.units_read > 6
    for _ in range(3):
        net(x)
    assert net.weight_stream.stats.mispredicted == 0


@torch.no_grad()
def test_another_order_is_learned(tmp_path: Path, stream: Make) -> None:
    whole = saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=150_000, window=2)
    x = torch.randn(5, 16)
    assert net(x, backwards=True).equal(whole(x, backwards=True))
    learning = net.weight_stream.stats.mispredicted
    assert learning > 0
    assert net(x, backwards=True).equal(whole(x, backwards=True))
    before = net.weight_stream.stats.mispredicted
    assert net(x, backwards=True).equal(whole(x, backwards=True))
    assert net.weight_stream.stats.mispredicted == before
    assert net(x).equal(whole(x))


def test_a_decoder_that_follows_itself_is_learned(tmp_path: Path, stream: Make) -> None:
    """After the last layer comes the decoder's first one, not the encoder's."""
    saved(t5, tmp_path)
    model = stream(tmp_path, resident_bytes=300_000)
    tokens(model, prompt(), 8)
    assert model.weight_stream.stats.mispredicted == 1


@torch.no_grad()
def test_the_next_layer_is_on_its_way_while_one_computes(tmp_path: Path, stream: Make) -> None:
    path = tmp_path / "net.safetensors"
    saved_net(path)
    with nvmeio.AioHandle(engine="threads") as handle, nvmeio.open(path) as file:
        entry = header_of(file, handle).tensors["blocks.1.second.weight"]
    begun = threading.Event()

    def note(kind: str, offset: int, nbytes: int) -> int:
        if offset < entry.end and entry.start < offset + nbytes:
            begun.set()
        return 0

    with nvmeio.AioHandle(engine=FakeEngine(fail=note)) as handle:
        net = stream(empty_net(), path, handle=handle, resident_bytes=150_000, window=2)
        begun.clear()  # of what was read as it was opened
        seen: list[bool] = []
        # The first block goes on only once the one behind it is being read.
        net.blocks[0].first.register_forward_hook(lambda *_: seen.append(begun.wait(PATIENCE_S)))
        net(torch.randn(5, 16))
        assert seen == [True]
        net.weight_stream.close()


def test_slots_are_used_again(tmp_path: Path, stream: Make) -> None:
    """No memory is mapped by a pass."""
    saved(llama, tmp_path)
    model = stream(tmp_path, resident_bytes=200_000)
    logits(model, prompt())
    before = set(nvmeio._memory.mappings.mapped._table[0])
    for _ in range(3):
        logits(model, prompt())
    assert set(nvmeio._memory.mappings.mapped._table[0]) <= before  # others' mappings may go


# The budget


def test_too_small_a_budget_says_what_would_do(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    with pytest.raises(ValueError, match="is too small") as refused:
        stream(tmp_path, resident_bytes=1000)
    needed = int(str(refused.value).split()[-2])
    with pytest.raises(ValueError, match=f"need {needed} bytes"):
        stream(tmp_path, resident_bytes=needed - 1)
    assert logits(stream(tmp_path, resident_bytes=needed), prompt()).shape == (2, 7, 128)


def test_more_memory_keeps_more_layers_and_reads_less(tmp_path: Path, stream: Make) -> None:
    saved(lambda: llama(layers=8), tmp_path)
    read = []
    for budget in (300_000, 800_000, 1_110_000, 1 << 30):
        model = stream(tmp_path, resident_bytes=budget)
        for _ in range(2):
            logits(model, prompt())
        before = model.weight_stream.stats.bytes_read
        for _ in range(4):
            logits(model, prompt())
        read.append(model.weight_stream.stats.bytes_read - before)
    assert read == sorted(read, reverse=True)
    assert len(set(read)) == 4
    assert read[-1] == 0


def test_residents_are_spread_over_the_layers(tmp_path: Path, stream: Make) -> None:
    saved(lambda: llama(layers=8), tmp_path)
    model = stream(tmp_path, resident_bytes=990_000, window=2)
    kept = [u.resident for u in model.weight_stream.units if u.is_layer]
    assert sum(kept) == 4
    assert kept in ([False, True] * 4, [True, False] * 4)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"window": 0}, ValueError),
        ({"window": 1.5}, TypeError),
        ({"resident_bytes": 0}, ValueError),
        ({"resident_bytes": True}, TypeError),
        ({"layers": ["nothing"]}, ValueError),
        ({"layers": ["model.layers.0", "model.layers.0.mlp"]}, ValueError),
        ({"layers": [torch.nn.Linear(1, 1)]}, ValueError),
    ],
)
def test_what_makes_no_sense_is_refused(
    options: dict[str, Any], error: type[Exception], tmp_path: Path, stream: Make
) -> None:
    saved(llama, tmp_path)
    with pytest.raises(error):
        stream(tmp_path, **options)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    before = open_descriptors()
    with pytest.raises(TypeError, match="expected a directory"):
        nvmeio.stream_model(3)
    with pytest.raises(ValueError, match="checkpoint= is needed"):
        nvmeio.stream_model(Net())
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        nvmeio.stream_model(tmp_path)
    saved_net(tmp_path / "net.safetensors")
    with pytest.raises(ValueError, match=r"'bias' is on cpu"):
        nvmeio.stream_model(Net(), tmp_path / "net.safetensors")
    # A call's own handle is closed beside.
    spin_until(lambda: open_descriptors().items() <= before.items())


MEMORY = """
    import json, resource, sys, threading, time
    sys.path.insert(0, {tests!r})
    import torch
    torch.set_num_threads(1)
    from inference._models import prompt, tokens, transformers
    import nvmeio
    from nvmeio._memory.system import proc_bytes
    directory, budget = {directory!r}, {budget}

    # What any model costs: the libraries' own memory, and one set of activations.
    small = nvmeio.stream_model({small!r}, resident_bytes=64 << 20)
    tokens(small, prompt(), 3)
    small.weight_stream.close()
    del small
    threading.stack_size(1 << 20)  # stacks are addresses too
    while threading.active_count() > 1:  # its handle is closed beside
        time.sleep(0.01)

    status = "/proc/self/status"
    before = proc_bytes(status, "VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # VmHWM counts from here
    spare = {spare}  # of addresses: stacks, rings that are not touched
    size = proc_bytes(status, "VmSize") + budget + spare
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    model = nvmeio.stream_model(directory, resident_bytes=budget)
    found = tokens(model, prompt(), 3)
    peak = proc_bytes(status, "VmHWM") - before
    stats = model.weight_stream.stats
    model.weight_stream.close()
    print(json.dumps([found.tolist(), peak, stats._asdict()]))
"""


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """360 MiB of weights in 48, under a limit of addresses that is far below the model's size."""
    import json

    large, small = tmp_path / "large", tmp_path / "small"
    saved(lambda: llama(layers=40, width=512), large)
    saved(llama, small)
    total = (large / "model.safetensors").stat().st_size
    budget, spare = 48 << 20, 192 << 20
    assert total > 5 * budget
    assert total > budget + spare  # nor could the file be mapped
    tests = str(Path(__file__).parent.parent)
    script = MEMORY.format(
        tests=tests, directory=str(large), small=str(small), budget=budget, spare=spare
    )
    # Each further arena of glibc reserves 64 MiB of addresses.
    done = run_python(script, MALLOC_ARENA_MAX="1")
    assert done.returncode == 0, done.stderr
    found, peak, stats = json.loads(done.stdout.splitlines()[-1])
    assert stats["resident_bytes"] + stats["window_bytes"] + stats["work_bytes"] <= budget
    assert peak < budget + (24 << 20), f"{peak >> 20} MiB for a budget of {budget >> 20}"
    assert found == tokens(loaded(large), prompt(), 3).tolist()


# Bad checkpoints


def changed_checkpoint(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    state = {name: t.clone() for name, t in load_safetensors(path / "model.safetensors").items()}
    change(state)
    save_safetensors(state, path / "model.safetensors")


NAME = "model.layers.2.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop(NAME), f"lacks tensor '{NAME}'"),
        (lambda s: s.update(more=torch.ones(3)), "holds tensor 'more', for which the model has no"),
        (lambda s: s.update({NAME: torch.ones(3, 4)}), rf"'{NAME}' in .*model.safetensors has sha"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    change: Any, message: str, tmp_path: Path, stream: Make
) -> None:
    saved(llama, tmp_path)
    changed_checkpoint(tmp_path, change)
    with pytest.raises(IntegrityError, match=message):
        stream(tmp_path)


def test_what_is_too_much_may_be_left_out(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    whole = loaded(tmp_path)
    changed_checkpoint(tmp_path, lambda s: s.update(more=torch.ones(3)))
    model = stream(tmp_path, strict=False, resident_bytes=300_000)
    assert logits(model, prompt()).equal(logits(whole, prompt()))


def test_a_truncated_file_is_refused_with_the_tensor_that_it_lacks(
    tmp_path: Path, stream: Make
) -> None:
    saved(llama, tmp_path)
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(IntegrityError, match=r"model\.safetensors is truncated: tensor 'model\."):
        stream(tmp_path)


def test_an_index_that_names_a_missing_file_is_refused(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path, max_shard_size="200KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match="names it for tensor 'model"):
        stream(tmp_path)


def test_a_buffer_that_nobody_knows_is_refused(tmp_path: Path, stream: Make) -> None:
    saved_net(tmp_path / "net.safetensors")
    empty = empty_net()
    empty.register_buffer("mask", torch.ones(3, device="meta"), persistent=False)
    with pytest.raises(ValueError, match="buffer 'mask' is on the meta device"):
        stream(empty, tmp_path / "net.safetensors")


# Failures in mid-stream


def fails_once(tensor: str, directory: Path) -> tuple[FakeEngine, Turns]:
    """An engine that meets EIO in one tensor's bytes as often as there are turns."""
    path = directory / "model.safetensors"
    with nvmeio.AioHandle(engine="threads") as handle, nvmeio.open(path) as file:
        entry = header_of(file, handle).tensors[tensor]
    left = Turns()

    def fail(kind: str, offset: int, nbytes: int) -> int:
        of_it = offset < entry.end and entry.start < offset + nbytes and nbytes > 8192
        return errno.EIO if of_it and left.take() else 0

    return FakeEngine(fail=fail), left


def test_a_disk_error_names_tensor_file_and_layer_and_passes(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    whole = loaded(tmp_path)
    engine, left = fails_once(NAME, tmp_path)
    with nvmeio.AioHandle(engine=engine) as handle:
        model = stream(tmp_path, handle=handle, resident_bytes=200_000)
        ids = prompt()
        assert logits(model, ids).equal(logits(whole, ids))
        for _ in range(3):
            left.left = 1
            with pytest.raises(TransferError, match=NAME) as failed:
                tokens(model, ids)
            assert failed.value.errno == errno.EIO
            assert "of model.layers.2" in str(failed.value)
            assert str(tmp_path / "model.safetensors") in str(failed.value)
            assert handle.wait(PATIENCE_S) >= 0  # nothing is in flight
            assert tokens(model, ids).equal(tokens(whole, ids))
        model.weight_stream.close()


def test_a_disk_error_names_the_row_of_an_embedding(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    name = "model.embed_tokens.weight"
    entry = read_header(tmp_path / "model.safetensors").tensors[name]
    row_bytes = entry.nbytes // entry.shape[0]
    broken, ids = [False], torch.tensor([[40, 9, 40, 77]])

    def fail(kind: str, offset: int, nbytes: int) -> int:
        last = entry.start + 78 * row_bytes - 1
        return errno.EIO if broken[0] and offset <= last < offset + nbytes else 0

    with nvmeio.AioHandle(engine=FakeEngine(fail=fail)) as handle:
        model = stream(tmp_path, handle=handle, resident_bytes=200_000)
        expected = logits(loaded(tmp_path), ids)
        assert logits(model, ids).equal(expected)
        assert model.weight_stream.stats.rows_read == 3
        broken[0] = True
        with pytest.raises(TransferError, match=f"row (9|40|77) of weight '{name}'") as failed:
            logits(model, ids)
        assert failed.value.errno == errno.EIO
        assert str(tmp_path / "model.safetensors") in str(failed.value)
        broken[0] = False
        assert logits(model, ids).equal(expected)
        model.weight_stream.close()


def test_a_cache_that_a_failed_pass_left_is_refused(tmp_path: Path, stream: Make) -> None:
    """Two layers of four have the new keys and values: going on would give wrong tokens."""
    saved(llama, tmp_path)
    engine, left = fails_once(NAME, tmp_path)
    with nvmeio.AioHandle(engine=engine) as handle, torch.no_grad():
        model = stream(tmp_path, handle=handle, resident_bytes=200_000)
        ids = prompt()
        cache = model(ids, use_cache=True).past_key_values
        left.left = 1
        with pytest.raises(TransferError):
            model(ids[:, :1], past_key_values=cache)
        with pytest.raises(RuntimeError, match="left by a pass that failed"):
            model(ids[:, :1], past_key_values=cache)
        model(ids, use_cache=True)
        model.weight_stream.close()


@pytest.mark.parametrize("budget", [200_000, 1 << 30])
def test_a_file_that_is_cut_while_it_is_streamed(budget: int, tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    whole = logits(loaded(tmp_path), prompt())
    model = stream(tmp_path, resident_bytes=budget)
    assert logits(model, prompt()).equal(whole)
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    if budget == 1 << 30:  # all of it is there
        assert logits(model, prompt()).equal(whole)
        return
    for _ in range(2):
        with pytest.raises((ShortTransferError, IntegrityError), match=r"'model\."):
            logits(model, prompt())


def test_a_file_that_is_written_to_while_it_is_streamed(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    aged(tmp_path / "model.safetensors")
    model = stream(tmp_path, resident_bytes=200_000)
    logits(model, prompt())
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(bytes(4096))
    with pytest.raises(IntegrityError, match=r"changed while weights were streamed.* for .*'mo"):
        for _ in range(2):  # what was read ahead before is good for one pass at most
            logits(model, prompt())


def test_a_file_that_is_removed_or_replaced_goes_on_being_read(
    tmp_path: Path, stream: Make
) -> None:
    saved(llama, tmp_path)
    whole = logits(loaded(tmp_path), prompt())
    model = stream(tmp_path, resident_bytes=200_000)
    changed_checkpoint(tmp_path, lambda s: s.update({NAME: torch.zeros_like(s[NAME])}))
    assert logits(model, prompt()).equal(whole)
    (tmp_path / "model.safetensors").unlink()
    assert logits(model, prompt()).equal(whole)
    model.weight_stream.close()
    with pytest.raises(FileNotFoundError):
        model.weight_stream.reopen()


# Life


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
    with pytest.raises(IntegrityError, match="another checkpoint than when"):
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
    before = open_descriptors()
    net = nvmeio.stream_model(empty_net(), tmp_path / "net.safetensors", resident_bytes=200_000)
    net(torch.randn(5, 16))
    with pytest.raises(RuntimeError):
        net(torch.randn(5, 17))
    give_up = net.weight_stream._uses._give_up
    net.weight_stream._owner.call(give_up)  # as after a disk error
    net(torch.randn(5, 16))
    net.weight_stream._owner.call(give_up)
    del give_up
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
    with pytest.raises(RuntimeError, match="takes no other weights"):
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
    turns = net.weight_stream._uses.turns
    threads_that_use, await_shared = turns._shared, turns.await_shared

    class Late(Waiting):
        def wait(self) -> None:
            super().wait()
            through.wait(PATIENCE_S)

    def await_late(caller: int) -> Any:
        waiting = await_shared(caller)
        return None if waiting is None else Late(*waiting)

    if late:
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
            spin_until(lambda: bool(threads_that_use.gates))
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

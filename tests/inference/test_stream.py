"""What a stream does: reads ahead, stays in its budget, says what went wrong, comes back."""

from __future__ import annotations

import copy
import errno
import os
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from inference._models import CACHE_NAMES, llama, loaded, logits, prompt, saved, t5, tokens
from inference._stream_parts import NAME, Make, changed_checkpoint
from inference.test_models import Net, empty_net, saved_net
from support import (
    PATIENCE_S,
    Turns,
    aged,
    open_descriptors,
    run_python,
    spin_until,
)

import nvmeio
from nvmeio._formats.safetensors.open_set import header_of
from nvmeio._memory import mappings
from nvmeio.checkpoint.safetensors import read_header
from nvmeio.errors import IntegrityError, ShortTransferError, TransferError
from nvmeio.testing import FakeEngine

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

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


def test_a_model_that_is_made_for_inference_is_called_in_any_mode(
    tmp_path: Path, stream: Make
) -> None:
    """Outside it failed in torch's words: "Setting requires_grad=True on inference tensor"."""
    whole = saved_net(tmp_path / "net.safetensors")
    with torch.inference_mode():
        nets = [stream(empty_net(), tmp_path / "net.safetensors", window=1)]
        made = empty_net()
    nets.append(stream(made, tmp_path / "net.safetensors", window=1))
    x = torch.randn(5, 16)
    for net in nets:
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
            with mode():
                assert net(x).equal(whole(x))


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
        entry = header_of(file).tensors["blocks.1.second.weight"]
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


def test_slots_are_used_again(
    tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory is mapped by a pass."""
    saved(llama, tmp_path)
    model = stream(tmp_path, resident_bytes=200_000)
    logits(model, prompt())
    monkeypatch.setattr(mappings.Mapping, "__new__", lambda *_: pytest.fail("mapped once more"))
    for _ in range(3):
        logits(model, prompt())


# The budget


def test_too_small_a_budget_says_what_would_do(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    with pytest.raises(nvmeio.inference.BudgetTooSmall, match="is too small") as refused:
        stream(tmp_path, resident_bytes=1000)
    needed = refused.value.least
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
    with pytest.raises(ValueError, match="needs checkpoint="):
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


def test_tied_weights_with_values_of_their_own_are_refused(tmp_path: Path, stream: Make) -> None:
    """transformers does not tie them then; the head was taken for the embedding."""
    saved(partial(llama, tie_word_embeddings=True), tmp_path)
    changed_checkpoint(tmp_path, lambda s: s.update({HEAD: s[EMBEDDING].clone()}))
    model = stream(tmp_path)
    assert logits(model, prompt()).equal(logits(loaded(tmp_path), prompt()))
    changed_checkpoint(tmp_path, lambda s: s[HEAD][-1, -1:].add_(1))
    with pytest.raises(IntegrityError, match=r"'lm_head.weight', which .* tie_word_embeddings=Fal"):
        stream(tmp_path)
    config = loaded(tmp_path).config
    config.tie_word_embeddings = False
    model = stream(config, tmp_path)
    assert logits(model, prompt()).equal(logits(loaded(tmp_path), prompt()))


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
    with nvmeio.open(path) as file:
        entry = header_of(file).tensors[tensor]
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


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_cache_that_a_failed_pass_left_is_refused(
    name: str, tmp_path: Path, stream: Make
) -> None:
    """Two layers of four have the new keys and values: going on would give wrong tokens."""
    saved(llama, tmp_path)
    engine, left = fails_once(NAME, tmp_path)
    with nvmeio.AioHandle(engine=engine) as handle, torch.no_grad():
        model = stream(tmp_path, handle=handle, resident_bytes=200_000)
        ids = prompt()
        cache = model(ids, use_cache=True).past_key_values
        left.left = 1
        with pytest.raises(TransferError):
            model(ids[:, :1], **{name: cache})
        with pytest.raises(RuntimeError, match="left by a pass that failed"):
            model(ids[:, :1], **{name: cache})
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


# Weights that a layer's own call changes


def in_place(norm: Any) -> None:
    norm.weight.mul_(2)


def through_a_view(norm: Any) -> None:
    norm.bias.detach()[:1] += 1


def anew(norm: Any) -> None:
    norm.weight = torch.nn.Parameter(norm.weight * 2)


def by_batch_norm(norm: Any) -> None:
    norm.train()(torch.randn(4, 48))


WITHIN: dict[str, Callable[[torch.nn.Module], None]] = {
    "in place": in_place,
    "through a view": through_a_view,
    "anew": anew,
    "by batch norm": by_batch_norm,
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", WITHIN)
def test_a_weight_that_its_layers_own_call_changes_is_refused(
    change: str, mode: Any, tmp_path: Path, stream: Make
) -> None:
    """The change was lost with the layer, without a word; torch keeps it."""
    whole = saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=200_000, window=2)
    x = torch.randn(5, 16)
    with mode():
        hook = net.blocks[1].second.register_forward_hook(
            lambda *_: WITHIN[change](net.blocks[1].norm)
        )
        assert not next(u for u in net.weight_stream.units if u.name == "blocks.1").resident
        with pytest.raises(RuntimeError, match=r"was changed by its layer's own call.*call eval"):
            net(x)
        hook.remove()
        net.eval()
        assert net(x).equal(whole(x))


BESIDE: dict[str, Callable[[Any], Any]] = {
    "in place": lambda norm: norm.running_mean.add_(1),
    "an element": lambda norm: norm.running_var.__setitem__(0, 2.0),
    "anew": lambda norm: norm.reset_running_stats(),
}


@torch.no_grad()
@pytest.mark.parametrize("change", BESIDE)
def test_a_buffer_on_disk_that_is_changed_is_refused(
    change: str, tmp_path: Path, stream: Make
) -> None:
    """The change was lost, without a word."""
    whole = saved_net(tmp_path / NAME)
    net = stream(empty_net(), tmp_path / NAME, resident_bytes=200_000, window=2)
    x = torch.randn(5, 16)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a weight of a streamed model cannot be changed"):
            BESIDE[change](net.blocks[1].norm)
        assert net(x).equal(whole(x))


@torch.no_grad()
def test_a_buffer_on_disk_is_read_by_who_looks_at_it(tmp_path: Path, stream: Make) -> None:
    """torch added nothing, and multiplied with what happened to lie in memory."""
    whole = saved_net(tmp_path / NAME)
    net = stream(empty_net(), tmp_path / NAME, resident_bytes=200_000, window=2)
    x = torch.randn(5, 16)
    found, expected = (torch.ones(48).add_(n.blocks[1].norm.running_mean) for n in (net, whole))
    assert found.equal(expected)
    hook = net.blocks[3].register_forward_pre_hook(
        lambda _, given: torch.ones(3, 1) @ net.blocks[1].norm.running_mean[None]
    )
    with pytest.raises(RuntimeError, match="was used outside a call of its module"):
        net(x)
    hook.remove()
    assert net(x).equal(whole(x))


@torch.no_grad()
@pytest.mark.parametrize("place", ["streams", "stays, and is converted", "stays"])
def test_a_layer_that_calls_another_one_is_refused_unless_both_stay(
    place: str, tmp_path: Path, stream: Make
) -> None:
    """Its weights went meanwhile: what it had looked at before were the bytes of others."""
    whole = saved_net(tmp_path / NAME)
    if "converted" in place:
        whole.half().float()
        state = {n: t.half() if t.is_floating_point() else t for n, t in whole.state_dict().items()}
        nvmeio.save_safetensors(state, tmp_path / NAME)
    model = stream(
        empty_net(),
        tmp_path / NAME,
        resident_bytes=64 << 20 if "stays" in place else 200_000,
        window=2,
        dtype=torch.float32,
    )
    units = {unit.name: unit for unit in model.weight_stream.units}
    assert units["blocks.1"].resident == ("stays" in place)

    def calling_another(net: Net) -> None:
        def forward(x: torch.Tensor) -> Any:
            scale = net.blocks[1].scale
            return net.blocks[3](x) * scale

        net.blocks[1].forward = forward  # type: ignore[method-assign]

    x = torch.randn(5, 16)
    calling_another(model)
    if place == "stays":
        calling_another(whole)
        assert model(x).equal(whole(x))
        return
    with pytest.raises(RuntimeError, match=r"'blocks.1' called another streamed layer"):
        model(x)
    del model.blocks[1].forward
    assert model(x).equal(whole(x))


@torch.no_grad()
def test_a_layer_that_stays_keeps_what_its_own_call_changes(tmp_path: Path, stream: Make) -> None:
    whole = saved_net(tmp_path / "net.safetensors").train()
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=64 << 20).train()
    for seed in range(3):
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(seed))
        assert net(x).equal(whole(x))
    assert net.eval()(x).equal(whole.eval()(x))


@torch.no_grad()
def test_an_embedding_that_scales_its_rows_is_streamed(tmp_path: Path, stream: Make) -> None:
    """It changes its weight in each call, and always in the same way."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(64, 32, max_norm=1.0)
            self.exit = torch.nn.Linear(32, 32)

        def forward(self, ids: torch.Tensor) -> Any:
            return self.exit(self.embedding(ids))

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(3))

        def forward(self, ids: torch.Tensor) -> list[Any]:
            return [layer(ids) for layer in self.layers]

    whole = Layers()
    nvmeio.save_safetensors(whole.state_dict(), tmp_path / NAME)
    with torch.device("meta"):
        empty = Layers()
    model = stream(empty, tmp_path / NAME, layers=[*empty.layers], resident_bytes=32_000)
    assert not any(unit.resident for unit in model.weight_stream.units)
    for _ in range(2):
        found, expected = model(torch.arange(40)), copy.deepcopy(whole)(torch.arange(40))
        assert all(map(torch.equal, found, expected))


@torch.no_grad()
def test_tensors_without_a_storage_go_through_a_streamed_layer(
    tmp_path: Path, stream: Make
) -> None:
    """They were asked for the address of theirs."""
    whole = saved_net(tmp_path / NAME)
    net = stream(empty_net(), tmp_path / NAME, resident_bytes=200_000, window=2)
    x = torch.randn(3, 5, 16)
    assert torch.func.vmap(net)(x).equal(torch.func.vmap(whole)(x))
    found, expected = (torch.func.jvp(each, (x[0],), (x[1],)) for each in (net, whole))
    assert all(map(torch.equal, found, expected))
    for each in (net, whole):
        each.blocks[1].register_forward_hook(lambda _, __, out: out.to_sparse())
        each.blocks[2].register_forward_pre_hook(lambda _, given: given[0].to_dense())
    assert net(x[0]).equal(whole(x[0]))


@pytest.mark.parametrize("text", ["null", "3", "[]", "{", '{"a":' * 100_000])
def test_a_configuration_that_is_not_one_is_named(text: str, tmp_path: Path) -> None:
    """A TypeError out of transformers: argument of type 'NoneType' is not iterable."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(IntegrityError, match=re.escape(str(tmp_path / "config.json"))):
        nvmeio.stream_model(tmp_path)

"""Micro-batches share what is read; past keys and values come back as they went."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inference._models import (
    CACHE_NAMES,
    MODELS,
    llama,
    loaded,
    logits,
    prompt,
    saved,
    tokens,
    transformers,
)
from support import open_descriptors, spin_until_collected

import nvmeio
from nvmeio._io import drives
from nvmeio.engines.base import Opcode
from nvmeio.engines.threads import Block, ThreadsEngine
from nvmeio.errors import ClosedError, TransferError
from nvmeio.inference import generate_in_blocks, kv_cache, pack, run_in_blocks
from nvmeio.inference import kv_cache as kv_cache_module
from nvmeio.testing import FakeEngine

Make = Callable[..., Any]

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


# Micro-batches


@pytest.mark.parametrize("name", MODELS)
def test_each_micro_batch_has_the_tokens_it_has_alone(
    name: str, tmp_path: Path, stream: Make
) -> None:
    saved(MODELS[name], tmp_path)
    whole = loaded(tmp_path)
    model = stream(tmp_path, resident_bytes=700_000)
    ids = prompt(batch=5)
    found = generate_in_blocks(model, ids, micro_batches=3, **GREEDY)
    assert found.equal(torch.cat([tokens(whole, part) for part in ids.tensor_split(3)]))
    assert tokens(model, ids[:1]).equal(tokens(whole, ids[:1]))


def test_a_layer_is_read_once_for_all_micro_batches(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    model = stream(tmp_path, resident_bytes=250_000)
    ids = prompt(batch=6)
    read = []
    for count in (1, 2, 6):
        generate_in_blocks(model, ids, micro_batches=count, **GREEDY)  # the order is learned
        before = model.weight_stream.stats.units_read
        generate_in_blocks(model, ids, micro_batches=count, **GREEDY)
        read.append(model.weight_stream.stats.units_read - before)
    assert max(read) <= min(read) + 2, read


def test_quantised_layers_are_converted_once_for_all(
    tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(llama, tmp_path / "m")
    pack(tmp_path / "m", tmp_path / "p", quant_bits=8, quant_group_size=32)
    model = stream(tmp_path / "p", resident_bytes=700_000, compute="widened")
    ids = prompt(batch=4)
    alone = torch.cat([tokens(model, part) for part in ids.tensor_split(4)])
    from nvmeio.inference._stream import slots

    calls: list[int] = []  # no tensors: who keeps one keeps its memory
    widen = slots.dequantise
    monkeypatch.setattr(slots, "dequantise", lambda *a: (calls.append(len(a)), widen(*a)))
    counts = []
    for count in (1, 4):
        calls.clear()
        generate_in_blocks(model, ids, micro_batches=count, **GREEDY)
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0
    assert generate_in_blocks(model, ids, micro_batches=4, **GREEDY).equal(alone)


def test_micro_batches_that_end_early_leave_the_round(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    whole = loaded(tmp_path)
    model = stream(tmp_path, resident_bytes=250_000)
    lengths = [2, 9, 1, 5]

    def work(length: int) -> Callable[[], torch.Tensor]:
        return lambda: tokens(model, prompt(seed=length), length)

    found = run_in_blocks(model, [work(length) for length in lengths])
    for length, one in zip(lengths, found, strict=True):
        assert one.equal(tokens(whole, prompt(seed=length), length))


def test_a_failure_in_one_ends_all(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    model = stream(tmp_path, resident_bytes=250_000)

    def fails() -> torch.Tensor:
        tokens(model, prompt(), 2)
        raise ArithmeticError("of the third")

    works = [lambda: tokens(model, prompt(), 20)] * 2 + [fails]
    with pytest.raises(ArithmeticError, match="of the third"):
        run_in_blocks(model, works)
    assert logits(model, prompt()).equal(logits(loaded(tmp_path), prompt()))


@pytest.mark.parametrize("count", [0, 3])
def test_there_is_no_such_division(count: int, tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    model = stream(tmp_path, resident_bytes=250_000)
    with pytest.raises(ValueError, match="between 1 and 2"):
        generate_in_blocks(model, prompt(), micro_batches=count)


def test_micro_batches_see_where_their_prompts_are_padded(tmp_path: Path, stream: Make) -> None:
    """`generate` finds padding tokens, and was told that there are none."""
    saved(llama, tmp_path)
    whole, model = loaded(tmp_path), stream(tmp_path, resident_bytes=700_000)
    ids = prompt(batch=4)
    ids[1, :3] = ids[3, :2] = whole.config.pad_token_id
    wanted = torch.cat([whole.generate(part, **GREEDY) for part in ids.tensor_split(2)])
    for given in ({}, {"attention_mask": (ids != whole.config.pad_token_id).long()}):
        assert generate_in_blocks(model, ids, micro_batches=2, **given, **GREEDY).equal(wanted)


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_micro_batches_share_no_cache(name: str, tmp_path: Path, stream: Make) -> None:
    """Each went on behind the tokens of the others."""
    saved(llama, tmp_path)
    model = stream(tmp_path)
    own: dict[str, Any] = {name: transformers.DynamicCache(config=model.config)}
    with pytest.raises(ValueError, match=f"{name}: each micro-batch has a cache of its own"):
        generate_in_blocks(model, prompt(batch=4), micro_batches=2, **own, **GREEDY)


def test_micro_batches_and_awaited_work_are_cast_as_their_caller_is(
    tmp_path: Path, stream: Make
) -> None:
    """autocast belongs to a thread: theirs computed in float32."""
    saved(llama, tmp_path)
    model, ids = stream(tmp_path, resident_bytes=700_000), prompt()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = loaded(tmp_path)(ids).logits
        batched = run_in_blocks(model, [lambda: model(ids).logits])
        awaited = asyncio.run(model.weight_stream.run(model, ids)).logits
    assert wanted.dtype is torch.bfloat16
    assert batched[0].equal(wanted)
    assert awaited.equal(wanted)
    assert run_in_blocks(model, [lambda: model(ids).logits])[0].dtype is torch.float32


# Past keys and values


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "BLOCK_TOKENS", 4)


@pytest.mark.parametrize("name", MODELS)
def test_offloaded_caches_give_the_same_tokens(
    name: str, tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    updated = []
    update = kv_cache.OffloadedLayer.update
    monkeypatch.setattr(
        kv_cache.OffloadedLayer, "update", lambda *a, **k: (updated.append(1), update(*a, **k))[1]
    )
    saved(MODELS[name], tmp_path)
    whole = loaded(tmp_path)
    model = stream(tmp_path, resident_bytes=700_000, kv_offload=tmp_path)
    for length, count in ((7, 12), (3, 2)):
        ids = prompt(length=length)
        updated.clear()
        assert tokens(model, ids, count).equal(tokens(whole, ids, count))
        assert (len(updated) >= 2 * count) == (name != "openai_gpt")  # that one has no cache


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_new_cache_is_an_offloaded_one(name: str, tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    model = stream(tmp_path, kv_offload=tmp_path)
    own = transformers.DynamicCache(config=model.config)
    for given in ({}, {name: None}, {name: own}):
        with torch.no_grad():
            found = model(prompt(), use_cache=True, **given).past_key_values
        assert all(isinstance(layer, kv_cache.OffloadedLayer) for layer in found.layers)
    assert found is own


@pytest.mark.parametrize("configured", [True, False])
@pytest.mark.parametrize("name", CACHE_NAMES)
@torch.no_grad()
def test_a_loop_with_a_cache_of_its_own_goes_on_with_it(
    name: str, configured: bool, tmp_path: Path, stream: Make
) -> None:
    """The model filled another cache in its place, and each token was computed as the first."""
    saved(llama, tmp_path)
    outputs = []
    for model in (loaded(tmp_path), stream(tmp_path, kv_offload=tmp_path, resident_bytes=700_000)):
        cache = transformers.DynamicCache(config=model.config if configured else None)
        ids = prompt(length=6)
        for _ in range(4):
            outputs.append(model(ids, use_cache=True, **{name: cache}).logits)
            ids = outputs[-1][:, -1:].argmax(-1)
        outputs += [states for layer in cache for states in layer[:2]]
        copied = transformers.DynamicCache(tuple(cache), config=model.config)
        outputs.append(model(ids, use_cache=True, **{name: copied}).logits)
    half = len(outputs) // 2
    assert all(map(torch.equal, outputs[half:], outputs[:half]))


@pytest.mark.parametrize("drives", [0, 1, 3])
def test_offloaded_cache_follows_every_change_of_generation(
    drives: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every change that generation makes to a cache, beside a stock one."""
    # So that small blocks are on all drives.
    monkeypatch.setattr(kv_cache_module, "_BAND_BYTES", 4096)
    folders = [tmp_path / str(number) for number in range(drives)]
    for folder in folders:
        folder.mkdir()
    config = transformers.LlamaConfig(num_hidden_layers=2)
    with nvmeio.AioHandle(engine="threads") as handle:
        store = kv_cache.KVStore(folders or None, handle)
        ours, stock = kv_cache.new_cache(config, store), transformers.DynamicCache(config=config)
        assert isinstance(ours, transformers.DynamicCache)
        generator = torch.Generator().manual_seed(0)

        def both(count: int) -> None:
            batch = shape[0]
            for layer in range(2):
                states = [torch.randn(batch, 3, count, 5, generator=generator) for _ in range(2)]
                for mine, theirs in zip(
                    ours.update(*states, layer), stock.update(*states, layer), strict=True
                ):
                    assert mine.equal(theirs)
                    assert mine.stride() == theirs.stride()
            assert ours.get_seq_length() == stock.get_seq_length()

        shape = [2]
        for count in (9, 1, 1, 1, 6, 1):
            both(count)
        for cache in (ours, stock):
            cache.reorder_cache(torch.tensor([1, 0]))
        both(1)
        for cache in (ours, stock):
            cache.crop(-3)
        both(2)
        shape[0] = 6
        for cache in (ours, stock):
            cache.batch_repeat_interleave(3)
        both(1)
        shape[0] = 2
        for cache in (ours, stock):
            cache.batch_select_indices(torch.tensor([0, 4]))
        both(5)
        for cache in (ours, stock):
            cache.reset()
        both(4)
        assert store.written_bytes > 0 < store.read_bytes
        assert all(list(folder.iterdir()) == [] for folder in folders)  # files have no names
        if store.file is not None:
            assert all(file.size() for file in store.file.files)
        store.close()


def test_each_drive_has_its_part_of_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every large block, in proportion to how fast it is; counted below the handle."""
    monkeypatch.setattr(drives, "weights_of", lambda *_, **__: [3, 1])
    folders = [tmp_path / "fast", tmp_path / "slow"]
    for folder in folders:
        folder.mkdir()
    moved: Counter[tuple[str, int]] = Counter()

    class Counting(ThreadsEngine):
        def _move(self, block: Block, fd: int, memory: memoryview, offset: int) -> int:
            done = super()._move(block, fd, memory, offset)
            drive = Path(os.readlink(f"/proc/self/fd/{fd}")).parent.name
            with self.condition:
                moved[drive, block.request.transfer.opcode] += done
            return done

    with nvmeio.AioHandle(engine=Counting()) as handle:
        store = kv_cache.KVStore(folders, handle)
        states = [torch.randn(1, 8, 1024, 128) for _ in range(2)]
        block, writing = store.put(*states)
        for operation in writing:
            operation.result()
        memory = torch.empty(2 * states[0].nbytes, dtype=torch.uint8)
        for operation in store.get(block, memory):
            operation.result()
        assert torch.equal(
            memory.view(torch.float32).view(2, *states[0].shape), torch.stack(states)
        )
        store.check(block, memory, "the block")
        store.close()
    for opcode in (Opcode.READ, Opcode.WRITE):
        fast, slow = moved["fast", opcode], moved["slow", opcode]
        assert fast + slow == memory.nbytes
        assert fast / slow == pytest.approx(3, rel=0.02)


def test_keys_and_values_of_other_widths(tmp_path: Path, stream: Make) -> None:
    """DeepSeek keeps a latent of all heads and a rotated key: torch said that sizes differ."""
    config = transformers.DeepseekV3Config(
        **dict.fromkeys(("hidden_size", "intermediate_size"), 64),
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_routed_experts"), 4),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
        **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_experts_per_tok=2,
        kv_lora_rank=48,
        q_lora_rank=16,
        vocab_size=128,
    )
    saved(lambda: transformers.DeepseekV3ForCausalLM(config), tmp_path)
    model = stream(tmp_path, kv_offload=tmp_path)
    ids = prompt(batch=2, length=10)
    assert tokens(model, ids).equal(tokens(loaded(tmp_path), ids))


def test_generation_with_a_cache_on_two_drives(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    model = stream(tmp_path, resident_bytes=400_000, kv_offload=folders)
    assert tokens(model, prompt(), 12).equal(tokens(loaded(tmp_path), prompt(), 12))


def test_directories_of_a_cache_that_are_none(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    with pytest.raises(ValueError, match="kv_offload"):
        stream(tmp_path, resident_bytes=400_000, kv_offload=[])
    with pytest.raises(FileNotFoundError, match="nowhere does not exist either"):
        several = [tmp_path, tmp_path / "nowhere" / "below"]
        stream(tmp_path, resident_bytes=400_000, kv_offload=several)


def test_beams_are_reordered(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    model = stream(tmp_path, resident_bytes=400_000, kv_offload=tmp_path)
    options = {"num_beams": 3, "max_new_tokens": 8, "min_new_tokens": 8}
    ids = prompt()
    expected = loaded(tmp_path).generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert model.generate(ids, attention_mask=torch.ones_like(ids), **options).equal(expected)


def test_a_disk_error_in_the_cache_is_an_error(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    written = []

    def fail(kind: str, offset: int, nbytes: int) -> int:
        written.append(kind)
        return errno.ENOSPC if kind == "pwrite" else 0

    with nvmeio.AioHandle(engine=FakeEngine(fail=fail)) as handle:
        model = stream(tmp_path, resident_bytes=400_000, kv_offload=tmp_path, handle=handle)
        with pytest.raises(TransferError) as failed:
            tokens(model, prompt(), 12)
        assert failed.value.errno == errno.ENOSPC
        model.weight_stream.close()


def test_a_cache_that_could_not_be_put_away_is_refused(tmp_path: Path) -> None:
    """Some layers have the new tokens and others not: going on would give wrong ones."""
    config = transformers.LlamaConfig(num_hidden_layers=2)
    handle = nvmeio.AioHandle(engine="threads")
    store = kv_cache.KVStore(tmp_path, handle)
    cache = kv_cache.new_cache(config, store)
    states = [torch.randn(1, 2, 3, 5) for _ in range(2)]
    for layer in range(2):
        cache.update(*states, layer)
    handle.close()
    with pytest.raises(ClosedError):
        cache.update(*states, 0)
    with pytest.raises(RuntimeError, match="start again with a new one"):
        cache.update(*states, 0)
    store.close()


def test_beams_do_not_let_the_file_grow(tmp_path: Path) -> None:
    """All of a cache is written anew for each token, to where it was before."""
    config = transformers.LlamaConfig(num_hidden_layers=2)
    with nvmeio.AioHandle(engine="threads") as handle:
        store = kv_cache.KVStore(tmp_path, handle)
        ours, stock = kv_cache.new_cache(config, store), transformers.DynamicCache(config=config)
        generator = torch.Generator().manual_seed(0)
        ends = []
        for count in (9, *[1] * 40):
            for layer in range(2):
                states = [torch.randn(3, 2, count, 5, generator=generator) for _ in range(2)]
                for mine, theirs in zip(
                    ours.update(*states, layer), stock.update(*states, layer), strict=True
                ):
                    assert mine.equal(theirs)
            for cache in (ours, stock):
                cache.reorder_cache(torch.tensor([2, 0, 1]))
            assert store.file is not None
            ends.append(store.file.nbytes)
        held = sum(block.room for layer in ours.layers for block in layer.blocks)
        assert ends[-1] <= 3 * held, (ends, held)
        assert held == store.file.used_bytes  # nothing is lost
        ours.reset()
        assert store.file.used_bytes == 0
        store.close()


def test_closing_the_stream_closes_the_handle_of_its_caches(
    tmp_path: Path, one_handle: nvmeio.AioHandle
) -> None:
    saved(llama, tmp_path)
    whole = tokens(loaded(tmp_path), prompt(), 6)
    before = open_descriptors()
    model = nvmeio.stream_model(tmp_path, resident_bytes=400_000, kv_offload=tmp_path)
    for _ in range(2):
        assert tokens(model, prompt(), 6).equal(whole)
        model.weight_stream.close()
        # With the caches that nobody has any more.
        spin_until_collected(lambda: open_descriptors().items() <= before.items())
        model.weight_stream.reopen()
    model.weight_stream.close()


def test_micro_batches_have_caches_of_their_own(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    model = stream(tmp_path, resident_bytes=400_000, kv_offload=tmp_path)
    ids = prompt(batch=4)
    found = generate_in_blocks(model, ids, micro_batches=2, **GREEDY)
    whole = loaded(tmp_path)
    assert found.equal(torch.cat([tokens(whole, part) for part in ids.tensor_split(2)]))


def test_a_directory_of_a_directory_that_is_not_there_is_refused(
    tmp_path: Path, stream: Make
) -> None:
    saved(llama, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist either.*mkdir -p"):
        stream(tmp_path, resident_bytes=400_000, kv_offload=tmp_path / "nowhere" / "cache")
    assert not (tmp_path / "nowhere").exists()
    stream(tmp_path, resident_bytes=400_000, kv_offload=tmp_path / "cache")
    assert (tmp_path / "cache").is_dir()


def test_a_temporary_directory_in_memory_is_refused(
    tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values that were put away stayed in memory, which is what they were to leave."""
    shared_memory = Path("/dev/shm")
    if not os.access(shared_memory, os.W_OK):
        pytest.skip("this machine has no /dev/shm that can be written to")
    saved(llama, tmp_path)
    monkeypatch.setattr(kv_cache_module.tempfile, "tempdir", str(shared_memory))
    with pytest.raises(ValueError, match=r"/dev/shm, which is in memory \(tmpfs\): name a dir"):
        stream(tmp_path, kv_offload=True)
    monkeypatch.setattr(kv_cache_module.tempfile, "tempdir", str(tmp_path))
    model = stream(tmp_path, kv_offload=True)
    assert tokens(model, prompt(), 3).equal(tokens(loaded(tmp_path), prompt(), 3))

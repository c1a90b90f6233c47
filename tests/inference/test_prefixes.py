"""What is kept of a prompt gives the bits of the cache that it was; anything else is told."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from inference._models import (
    CACHE_NAMES,
    gpt2,
    llama,
    loaded,
    prompt,
    saved,
    t5,
    tokens,
    transformers,
)
from interrupting import at_places, at_random_times
from programs import Program

import nvmeio
from nvmeio._kv_blocks import catalog
from nvmeio._kv_blocks.store import BlockStore
from nvmeio.errors import ClosedError, TransferError
from nvmeio.inference import PrefixCache, _prefix_format, kv_cache, prefixes
from nvmeio.testing import FakeEngine

Make = Callable[..., Any]

BLOCK = 4096
SIZE = 64 * BLOCK


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "STEP_BYTES", 16 * BLOCK)
    monkeypatch.setattr(_prefix_format, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(kv_cache, "BLOCK_TOKENS", 4)


@pytest.fixture(scope="module")
def handle() -> Iterator[nvmeio.AioHandle]:
    with nvmeio.AioHandle(engine="threads") as made:
        yield made


def made(make: Any = llama, **options: Any) -> Any:
    torch.manual_seed(0)
    model = make(**options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.ndim > 1 else parameter.add_(0.01)
    return model


def mistral() -> Any:
    """Its layers have a sliding window of 8 tokens."""
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=128,
            sliding_window=8,
        )
    )


@pytest.fixture(scope="module")
def model() -> Any:
    return made()


@torch.no_grad()
def computed(model: Any, ids: torch.Tensor) -> Any:
    cache = transformers.DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    return cache


@torch.no_grad()
def continued(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """The logits of what comes behind the cache."""
    done = cache.get_seq_length()
    found: torch.Tensor = model(ids[:, done:], past_key_values=cache).logits
    return found


def states(cache: Any) -> list[torch.Tensor]:
    return [part for layer in cache.layers for part in (layer.keys, layer.values)]


def same(one: Any, other: Any) -> bool:
    pairs = zip(states(one), states(other), strict=True)
    return all(a.equal(b) and a.dtype == b.dtype for a, b in pairs)


@pytest.mark.parametrize("make", [llama, gpt2, mistral])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prefix_gives_the_bits_of_its_cache(
    make: Any, dtype: torch.dtype, tmp_path: Path, handle: nvmeio.AioHandle
) -> None:
    model, ids = made(make).to(dtype), prompt(length=24)
    cache = computed(model, ids[:, :17])
    PrefixCache(model, tmp_path, SIZE, handle=handle).save("one", ids[:, :17], cache)
    found = PrefixCache(model, tmp_path, SIZE, handle=handle).load("one", ids)
    assert found.get_seq_length() == 17
    assert same(found, cache)
    assert continued(model, ids, found).equal(continued(model, ids, cache))


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_generation_goes_on_behind_a_prefix(
    model: Any, tmp_path: Path, handle: nvmeio.AioHandle, name: str
) -> None:
    """The cache of `generate` holds what it generated too; that is not saved."""
    kept, ids = PrefixCache(model, tmp_path, SIZE, handle=handle), prompt(length=20)
    cache = transformers.DynamicCache(config=model.config)
    expected = tokens(model, ids, **{name: cache})
    assert cache.get_seq_length() > 20
    kept.save("one", ids, cache)
    found = kept.load("one", ids)
    assert found.get_seq_length() == 19  # one token is left to compute
    assert tokens(model, ids, **{name: found}).equal(expected)
    longer = torch.cat([ids, prompt(length=4, seed=1)], dim=1)
    found = kept.load("one", longer)
    assert found.get_seq_length() == 20
    assert tokens(model, longer, **{name: found}).shape == (2, 30)
    assert kept.load("one", ids[:, :6]).get_seq_length() == 5
    assert kept.load("one", ids[:, :1]).get_seq_length() == 0


def test_what_is_not_there_is_none(model: Any, tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    kept, ids = PrefixCache(model, tmp_path / "new", SIZE, handle=handle), prompt()
    assert kept.load("one", ids) is None
    assert not (tmp_path / "new").exists()
    kept.save("one", ids, computed(model, ids))
    assert kept.load("two", ids) is None
    kept.remove("one")
    kept.remove("two")
    assert kept.load("one", ids) is None


def test_a_name_is_saved_again(model: Any, tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    """Often enough that it would have made room for itself, had the blocks before not gone."""
    kept = PrefixCache(model, tmp_path, SIZE, handle=handle)
    other = prompt(length=9, seed=100)
    kept.save("other", other, computed(model, other))
    for seed in range(20):
        ids = prompt(length=30, seed=seed)
        cache = computed(model, ids)
        kept.save("one", ids, cache)
        longer = torch.cat([ids, ids], dim=1)
        assert same(kept.load("one", longer), cache)
    assert kept.load("other", other) is not None


# Wrong ones


def test_other_tokens_are_refused(model: Any, tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    kept, ids = PrefixCache(model, tmp_path, SIZE, handle=handle), prompt(length=9)
    kept.save("one", ids, computed(model, ids))
    other = ids.clone()
    other[1, 4] = 5 if ids[1, 4] != 5 else 6
    said = f"'one' is not what this .* token 4 of sequence 1 was {ids[1, 4]} and is {other[1, 4]}"
    with pytest.raises(ValueError, match=said):
        kept.load("one", other)
    with pytest.raises(ValueError, match="of 2 sequences, and input_ids of 1"):
        kept.load("one", ids[:1])


def test_another_model_is_refused(model: Any, tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    ids = prompt()
    PrefixCache(model, tmp_path, SIZE, handle=handle).save("one", ids, computed(model, ids))
    for other, said in (
        (made(layers=3), "num_hidden_layers was 4 and is 3"),
        (made(rms_norm_eps=1e-3), "rms_norm_eps was 1e-06 and is 0.001"),
        (made().to(torch.bfloat16), "dtype was 'torch.float32' and is 'torch.bfloat16'"),
        (made(gpt2), "another model"),
    ):
        with pytest.raises(ValueError, match=said):
            PrefixCache(other, tmp_path, SIZE, handle=handle).load("one", ids)


def test_other_weights_are_refused(model: Any, tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    ids, other = prompt(), made()
    PrefixCache(model, tmp_path, SIZE, handle=handle).save("one", ids, computed(model, ids))
    kept = PrefixCache(other, tmp_path, SIZE, handle=handle)
    assert kept.load("one", ids) is not None  # the same weights, in another model
    with torch.no_grad():
        other.model.layers[2].mlp.up_proj.weight.mul_(1.01)
    with pytest.raises(ValueError, match="other weights of this model"):
        kept.load("one", ids)


def _one_row(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight[5].mul_(1.01)


def _last_element(model: Any) -> None:
    model.model.layers[3].self_attn.o_proj.weight[-1, -1].add_(1)


@pytest.mark.parametrize("change", [_one_row, _last_element])
@pytest.mark.parametrize("fingerprint", ["samples", "full"])
def test_a_change_anywhere_in_a_small_weight_is_seen(
    change: Any, fingerprint: Any, model: Any, tmp_path: Path, handle: nvmeio.AioHandle
) -> None:
    """Of each weight 64 values of its middle row alone were looked at."""
    ids, other, given = prompt(), made(), {"handle": handle, "fingerprint": fingerprint}
    PrefixCache(model, tmp_path, SIZE, **given).save("one", ids, computed(model, ids))
    kept = PrefixCache(other, tmp_path, SIZE, **given)
    assert kept.load("one", ids) is not None
    with torch.no_grad():
        change(other)
    with pytest.raises(ValueError, match="other weights of this model"):
        kept.load("one", ids)


def test_weights_that_are_not_here_take_a_name(tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    """Of a model with weights on the meta device their names and shapes alone were compared."""
    ids, other = prompt(), made()
    cache = computed(other, ids)
    other.model.layers[0].mlp.up_proj.to("meta")
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.weight .*weights_id="):
        PrefixCache(other, tmp_path, SIZE, handle=handle).save("one", ids, cache)
    kept = PrefixCache(other, tmp_path, SIZE, handle=handle, weights_id="first")
    kept.save("one", ids, cache)
    assert kept.load("one", ids) is not None
    with pytest.raises(ValueError, match="other weights"):
        PrefixCache(other, tmp_path, SIZE, handle=handle, weights_id="second").load("one", ids)


def test_adapters_count_whether_they_are_in_use_or_not(
    tmp_path: Path, handle: nvmeio.AioHandle
) -> None:
    """With one switched off, or made stronger, prefixes of before were taken."""
    peft = pytest.importorskip("peft")
    ids, adapted = prompt(), peft.get_peft_model(made(), adapter(peft))
    kept = PrefixCache(adapted, tmp_path, SIZE, handle=handle)
    cache = computed(adapted, ids)
    kept.save("one", ids, cache)
    assert kept.load("one", ids) is not None
    with adapted.disable_adapter(), pytest.raises(ValueError, match="adapters was"):
        kept.load("one", ids)
    assert kept.load("one", ids) is not None


def adapter(peft: Any) -> Any:
    return peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)


def test_what_cannot_be_saved_is_refused(
    model: Any, tmp_path: Path, handle: nvmeio.AioHandle
) -> None:
    kept, ids = PrefixCache(model, tmp_path, SIZE, handle=handle), prompt(length=9)
    cache = computed(model, ids)
    static = transformers.StaticCache(config=model.config, max_cache_len=16)
    with pytest.raises(TypeError, match="not a StaticCache"):
        kept.save("one", ids, static)
    odd = computed(model, ids)
    odd.layers[1].__class__ = type("Odd", (transformers.cache_utils.DynamicLayer,), {})
    with pytest.raises(TypeError, match="layer 1 of the cache is an Odd"):
        kept.save("one", ids, odd)
    with pytest.raises(ValueError, match="holds 9 of 18 tokens"):
        kept.save("one", torch.cat([ids, ids], dim=1), cache)
    with pytest.raises(ValueError, match="holds 2 sequences, and input_ids 1"):
        kept.save("one", ids[:1], cache)
    for name in ("", "a\0b"):
        with pytest.raises(ValueError, match="not a name for a prefix"):
            kept.save(name, ids, cache)
    with pytest.raises(ValueError, match=r"must be \(sequences, tokens\), not \(9,\)"):
        kept.load("one", ids[0])
    with pytest.raises(ValueError, match="capacity_bytes must be"):
        PrefixCache(model, tmp_path, 10)
    with pytest.raises(TypeError, match="decoders only"):
        PrefixCache(t5(), tmp_path)
    assert kept.load("one", ids) is None


def test_a_sliding_window_is_kept_as_it_is(tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    """What left the window is nowhere: such a prefix is whole, or refused."""
    model, ids = made(mistral), prompt(length=14)
    kept = PrefixCache(model, tmp_path, SIZE, handle=handle)
    cache = computed(model, ids)
    kept.save("long", ids, cache)
    with pytest.raises(ValueError, match=r"14 tokens, of which 13 .* sliding window"):
        kept.load("long", ids)
    with pytest.raises(ValueError, match="only the last 7: save the prefix before"):
        kept.save("part", ids[:, :12], cache)
    short = ids[:, :6]  # all of it in the window
    kept.save("short", short, computed(model, short))
    found = kept.load("short", short)
    assert found.get_seq_length() == 5
    expected = computed(model, short[:, :5])
    assert continued(model, ids, found).equal(continued(model, ids, expected))


# The drive


def blocks_of(directory: Path) -> Path:
    return directory / "nvmeio-blocks" / "transformers-prefixes.blocks"


def test_a_damaged_prefix_is_none_and_said_so(
    model: Any, tmp_path: Path, handle: nvmeio.AioHandle, caplog: pytest.LogCaptureFixture
) -> None:
    kept, ids = PrefixCache(model, tmp_path, SIZE, handle=handle), prompt(length=30)
    cache = computed(model, ids)
    kept.save("one", ids, cache)
    with blocks_of(tmp_path).open("r+b") as file:
        file.seek(3 * BLOCK + 100)
        (was,) = file.read(1)
        file.seek(3 * BLOCK + 100)
        file.write(bytes([was ^ 1]))
    assert kept.load("one", ids) is None
    assert "prefix 'one' is not whole any more" in caplog.text
    kept.save("one", ids, cache)
    assert kept.load("one", ids).get_seq_length() == 29


def test_the_oldest_makes_room(model: Any, tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    ids = prompt(length=30)
    cache = computed(model, ids)
    kept = PrefixCache(model, tmp_path, 50 * BLOCK, handle=handle)
    names = [str(n) for n in range(6)]
    for name in names:
        kept.save(name, ids, cache)
    there = [kept.load(name, ids) is not None for name in names]
    assert there == sorted(there)
    assert there[-2:] == [True, True]
    assert not there[0]
    assert blocks_of(tmp_path).stat().st_size <= 50 * BLOCK


def test_a_prefix_larger_than_the_capacity_is_refused(
    model: Any, tmp_path: Path, handle: nvmeio.AioHandle
) -> None:
    ids = prompt(length=30)
    kept = PrefixCache(model, tmp_path, 4 * BLOCK, handle=handle)
    with pytest.raises(ValueError, match=r"the prefix takes .* give it more"):
        kept.save("one", ids, computed(model, ids))


def test_a_drive_without_room_is_an_error(
    model: Any, tmp_path: Path, handle: nvmeio.AioHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store stays as large as it is, and what it makes room for would push itself out."""

    def reserve(fd: int, nbytes: int, path: str) -> None:
        if nbytes > 16 * BLOCK:
            raise TransferError(errno.ENOSPC, operation="fallocate", path=path)
        os.ftruncate(fd, nbytes)

    monkeypatch.setattr(catalog, "reserve", reserve)
    kept = PrefixCache(model, tmp_path, SIZE, handle=handle)
    small, large = prompt(length=5), prompt(length=60)
    kept.save("small", small, computed(model, small))
    assert kept.load("small", small) is not None
    with pytest.raises(TransferError, match="no room for it") as failed:
        kept.save("large", large, computed(model, large))
    assert failed.value.errno == errno.ENOSPC
    assert kept.load("large", large) is None


def test_a_write_that_fails_leaves_what_was_there(
    model: Any, tmp_path: Path, handle: nvmeio.AioHandle
) -> None:
    """Whichever it is; of the last, the head, nothing is left but no wrong thing either."""
    ids, other = prompt(length=30), prompt(length=30, seed=1)
    before, after = computed(model, ids), computed(model, other)
    written: list[int] = []  # slots, in this order
    bad = 0  # which of them the drive cannot write; 0 for none

    def fail(kind: str, offset: int, nbytes: int) -> int:
        slots = range(offset // BLOCK, -(-(offset + nbytes) // BLOCK)) if kind == "pwrite" else ()
        written.extend(slot for slot in slots if slot not in written)
        return errno.EIO if any(slot in slots for slot in written[bad - 1 : bad]) else 0

    with nvmeio.AioHandle(engine=FakeEngine(fail=fail)) as failing:
        kept = PrefixCache(model, tmp_path, SIZE, handle=failing)
        for number in range(1, 100):
            bad = 0
            kept.save("one", ids, before)
            bad = number
            written.clear()
            try:
                kept.save("one", other, after)
            except TransferError as failed:
                assert failed.errno == errno.EIO
                assert "'one'" in str(failed)
                if kept.load("one", ids) is not None:
                    continue
            break
    # The head was the first that took the one before with it.
    assert number > 8
    longer = torch.cat([other, other], dim=1)
    kept = PrefixCache(model, tmp_path, SIZE, handle=handle)
    assert kept.load("one", longer) is None
    kept.save("one", other, after)
    assert same(kept.load("one", longer), after)


# Several processes and threads


CHILD = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from inference import test_prefixes as t
    t.catalog.STEP_BYTES, t._prefix_format.BLOCK_BYTES = 16 * t.BLOCK, t.BLOCK
    writes = 0

    def die(kind, offset, nbytes):
        global writes
        writes += -(-nbytes // t.BLOCK) if kind == "pwrite" else 0
        if writes > 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    model, ids = t.made(), t.prompt(length=30)
    cache = t.computed(model, ids)
    with t.nvmeio.AioHandle(engine=t.FakeEngine(fail=die)) as handle:
        kept = t.PrefixCache(model, Path({directory!r}), t.SIZE, handle=handle)
        kept.save("whole", ids, cache)
        print("saved", flush=True)
        kept.save("half", ids, cache)
        print("not killed", flush=True)
"""


def test_another_process_loads_what_a_killed_one_saved(
    model: Any, tmp_path: Path, handle: nvmeio.AioHandle
) -> None:
    text = CHILD.format(tests=str(Path(__file__).parents[1]), directory=str(tmp_path))
    child = Program[str](
        [sys.executable, "-c", textwrap.dedent(text)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    said, _ = child.communicate()
    assert said.split("\n")[-2:] == ["saved", ""]
    assert child.returncode == -signal.SIGKILL
    ids = prompt(length=30)
    longer = torch.cat([ids, prompt(length=3, seed=1)], dim=1)
    kept = PrefixCache(model, tmp_path, SIZE, handle=handle)
    assert kept.load("half", longer) is None
    cache = computed(model, ids)
    kept.save("half", ids, cache)
    for name in ("whole", "half"):
        found = kept.load(name, longer)
        assert same(found, cache)
    assert continued(model, longer, found).equal(continued(model, longer, cache))


def test_savers_of_one_name_take_turns(
    model: Any, tmp_path: Path, handle: nvmeio.AioHandle
) -> None:
    """What is there is one of them, whole."""
    prompts = [prompt(length=20, seed=seed) for seed in range(4)]
    caches = [computed(model, ids) for ids in prompts]
    kept = PrefixCache(model, tmp_path, SIZE, handle=handle)
    failed: list[BaseException] = []

    def work(ids: torch.Tensor, cache: Any) -> None:
        try:
            kept.save("one", ids, cache)
        except BaseException as error:
            failed.append(error)

    workers = [
        threading.Thread(target=work, args=pair) for pair in zip(prompts, caches, strict=True)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failed
    right = []
    for ids, cache in zip(prompts, caches, strict=True):
        try:
            found = kept.load("one", torch.cat([ids, ids], dim=1))
        except ValueError:
            continue
        right.append(same(found, cache))
    assert right == [True]


def test_a_store_that_is_being_written_to_is_waited_for_and_told(
    model: Any, tmp_path: Path, handle: nvmeio.AioHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "PATIENCE_S", 0.0)
    kept, ids = PrefixCache(model, tmp_path, SIZE, handle=handle), prompt()
    cache = computed(model, ids)
    kept.save("one", ids, cache)
    with BlockStore(tmp_path, "transformers-prefixes", BLOCK, SIZE, handle=handle):
        with pytest.raises(TransferError) as failed:
            kept.save("two", ids, cache)
        assert failed.value.errno == errno.EBUSY
        assert kept.load("one", ids) is not None  # readers wait for nobody
    kept.save("two", ids, cache)


# Streamed models


def save_retrained(model: Any, directory: Path) -> None:
    """A loaded model, with other weights of the same shapes."""
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.mul_(0.99)
    model.save_pretrained(directory)


def test_a_streamed_model_shares_prefixes_with_the_whole(
    tmp_path: Path, stream: Make, one_handle: nvmeio.AioHandle
) -> None:
    saved(llama, tmp_path / "model")
    whole = loaded(tmp_path / "model")
    model = stream(tmp_path / "model", resident_bytes=400_000, kv_offload=tmp_path)
    ids = prompt(length=20)
    mine = PrefixCache(model, tmp_path, SIZE, handle=one_handle)
    theirs = PrefixCache(whole, tmp_path, SIZE, handle=one_handle)
    cache = computed(whole, ids[:, :15])
    theirs.save("one", ids[:, :15], cache)
    found = mine.load("one", ids)
    assert type(found).__name__ == "OffloadedCache"
    assert continued(model, ids, found).equal(continued(whole, ids, cache))
    mine.save("two", ids, found)  # its layers are brought back one by one
    assert same(theirs.load("two", torch.cat([ids, ids], dim=1)), cache)
    saved(lambda: llama(vocab_size=120), tmp_path / "other")
    other = stream(tmp_path / "other", resident_bytes=400_000)
    with pytest.raises(ValueError, match="vocab_size was 128 and is 120"):
        PrefixCache(other, tmp_path, SIZE, handle=one_handle).load("one", ids)


def test_the_weights_of_a_streamed_model_count(
    tmp_path: Path, stream: Make, one_handle: nvmeio.AioHandle
) -> None:
    saved(llama, tmp_path / "model")
    changed = loaded(tmp_path / "model")
    ids = prompt()
    PrefixCache(changed, tmp_path, SIZE, handle=one_handle).save("one", ids, computed(changed, ids))
    save_retrained(changed, tmp_path / "changed")
    model = stream(tmp_path / "changed", resident_bytes=400_000)
    with pytest.raises(ValueError, match="other weights"):
        PrefixCache(model, tmp_path, SIZE, handle=one_handle).load("one", ids)


def test_files_that_were_written_anew_count_once_they_are_opened(
    tmp_path: Path, stream: Make, one_handle: nvmeio.AioHandle
) -> None:
    """What was known of the files before `reopen` went on to count."""
    saved(llama, tmp_path / "model")
    ids, model = prompt(), stream(tmp_path / "model", resident_bytes=400_000)
    kept = PrefixCache(model, tmp_path, SIZE, handle=one_handle)
    kept.save("one", ids, computed(model, ids))
    model.weight_stream.close()
    with pytest.raises(ClosedError, match="closed"):
        kept.load("one", ids)
    save_retrained(loaded(tmp_path / "model"), tmp_path / "model")
    model.weight_stream.reopen()
    with pytest.raises(ValueError, match="other weights"):
        kept.load("one", ids)


def test_the_files_that_a_stream_has_open_count(
    tmp_path: Path, stream: Make, one_handle: nvmeio.AioHandle
) -> None:
    """Others had taken their names since: keys of the old weights were kept as of the new."""
    saved(llama, tmp_path / "model")
    ids, model = prompt(), stream(tmp_path / "model", resident_bytes=400_000)
    save_retrained(loaded(tmp_path / "model"), tmp_path / "new")
    os.replace(tmp_path / "new" / "model.safetensors", tmp_path / "model" / "model.safetensors")
    PrefixCache(model, tmp_path, SIZE, handle=one_handle).save("one", ids, computed(model, ids))
    other = stream(tmp_path / "model", resident_bytes=400_000)
    with pytest.raises(ValueError, match="other weights"):
        PrefixCache(other, tmp_path, SIZE, handle=one_handle).load("one", ids)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT's
def test_the_adapters_of_a_streamed_model_count(
    tmp_path: Path, stream: Make, one_handle: nvmeio.AioHandle
) -> None:
    """The files of its base alone were looked at: what the adapters had learnt since was not."""
    peft = pytest.importorskip("peft")
    saved(llama, tmp_path / "model")
    ids, base = prompt(), stream(tmp_path / "model", resident_bytes=400_000, trainable=True)
    model = peft.get_peft_model(base, adapter(peft))
    kept = PrefixCache(model, tmp_path, SIZE, handle=one_handle)
    kept.save("one", ids, computed(model, ids))
    assert kept.load("one", ids) is not None
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.add_(0.01)
    with pytest.raises(ValueError, match="other weights"):
        kept.load("one", ids)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="reads 3.11's exception tables")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("interrupts", [at_places, at_random_times])
def test_interrupted_calls_leave_a_prefix_or_none(
    interrupts: Any, model: Any, tmp_path: Path, handle: nvmeio.AioHandle
) -> None:
    ids = prompt(length=24)
    cache = computed(model, ids[:, :17])
    kept = PrefixCache(model, tmp_path, SIZE, handle=handle)

    def work() -> None:
        kept.save("one", ids[:, :17], cache)
        found = kept.load("one", ids)
        assert found is not None
        kept.remove("one")

    for where in interrupts(work, 15):
        found = kept.load("one", ids)
        assert found is None or same(found, cache), where
        kept.save("one", ids[:, :17], cache)
        assert same(kept.load("one", ids), cache), where

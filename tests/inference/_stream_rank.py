"""The ranks of test_stream_ranks.py: what they do, run by `checkpoint._rank_program`."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint import _rank_program
from checkpoint._rank_program import LIMIT_S, PATIENCE_S, Rank, Work
from inference import _models as models
from inside import uses_of
from support import nvmeio_threads, spin_until, spin_until_collected

import nvmeio
from nvmeio._residency.reader import Reader
from nvmeio.inference import generate_in_blocks
from nvmeio.inference._parallel import rank_reader
from nvmeio.inference._plan import units as units_module
from nvmeio.testing import FakeEngine

# How long a rank is waited for that hangs: longer than any that does not.
GIVEN_UP_S = 12.0

# Nothing stays of the model of most tests, whose layers have 2.4 MB.
SMALL: dict[str, Any] = {"window": 2, "resident_bytes": "6M"}

loaded = functools.cache(models.loaded)


def handle_of(me: Rank) -> nvmeio.AioHandle:
    return nvmeio.AioHandle(engine=FakeEngine(fail=me._meet))


def stream(path: Path, **options: Any) -> Any:
    chosen: dict[str, Any] = {"timeout_s": PATIENCE_S, **SMALL, **options}
    return nvmeio.stream_model(path, process_group=dist.group.WORLD, **chosen)


def together() -> None:
    """A rank is always waited for, on however busy a machine."""
    rank_reader.LINGER_S = PATIENCE_S


def own_prompt(me: Rank) -> torch.Tensor:
    return models.prompt(2 + me.rank % 2, 4 + 2 * me.rank, seed=me.rank)


def right(model: Any, path: Path, ids: torch.Tensor) -> bool:
    return torch.equal(models.logits(model, ids), models.logits(loaded(path), ids))


class Prefixed(torch.nn.Module):
    """What is trained is added to the embeddings of a frozen base."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.prefix = torch.nn.Parameter(torch.zeros(base.config.hidden_size))

    def forward(self, ids: torch.Tensor) -> Any:
        embedded = self.base.get_input_embeddings()(ids) + self.prefix
        return self.base(inputs_embeds=embedded, labels=ids).loss


def nothing_stays() -> None:
    spin_until_collected(lambda: not {t for t in nvmeio_threads() if "ranks" in t.name})


# What ranks do


def trains(me: Rank) -> None:
    """Gradients through a base of each rank's own, averaged by DistributedDataParallel."""
    parallel = torch.nn.parallel.DistributedDataParallel
    path, ids = me.notes / "model", own_prompt(me)

    def losses(base: Any) -> list[float]:
        model = Prefixed(base)
        names = [name for name, weight in model.named_parameters() if not weight.requires_grad]
        names += [name for name, _ in model.named_buffers()]
        parallel._set_params_and_buffers_to_ignore_for_model(model, names)
        trained, found = parallel(model), []
        optimizer = torch.optim.SGD([model.prefix], lr=0.1)
        for _ in range(3):
            loss = trained(ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    wanted = losses(models.loaded(path))
    for budget in ("64M", "6M"):
        base = nvmeio.stream_model(path, resident_bytes=budget, trainable=True)
        assert losses(base) == wanted
        base.weight_stream.close()
    base = nvmeio.stream_model(path, resident_bytes="6M", trainable=True)
    try:
        parallel(Prefixed(base))(ids)
    except RuntimeError as error:
        assert "_set_params_and_buffers_to_ignore_for_model" in str(error)
    else:
        raise AssertionError("weights of rank 0 were taken")
    base.weight_stream.close()


def shares(me: Rank, packed: str = "model") -> None:
    """Each byte is read by one rank, an equal part by each; counted below the handle."""
    together()
    handle = handle_of(me)
    model = stream(me.notes / packed, handle=handle)
    ids = own_prompt(me)
    assert right(model, me.notes / "model", ids)
    units, passes = len(model.weight_stream.units), 3
    spin_until(lambda: not uses_of(model).resources.reader._wants)
    me.meet_others()  # the first units of the next pass are there
    me.read.clear()
    for _ in range(passes):
        models.logits(model, ids)
    wanted = passes * model.weight_stream.stats.streamed_bytes / me.world
    assert wanted > 6_000_000 / me.world
    read = lambda: sum(nbytes for _, nbytes in me.read)  # noqa: E731
    spin_until(lambda: read() >= 0.99 * wanted)
    spin_until(lambda: not uses_of(model).resources.reader._wants)
    me.meet_others()
    assert abs(read() - wanted) <= 0.01 * wanted, (read(), wanted, units)
    model.weight_stream.close()
    handle.close()
    nothing_stays()


def prompts(me: Rank, packed: str = "model", blocks: bool = False) -> None:
    """Other prompts, of other lengths, and other numbers of passes on each rank."""
    path = me.notes / "model"
    whole = loaded(path)
    model = stream(me.notes / packed)
    ids, count = own_prompt(me), 2 + 3 * me.rank
    wanted = models.tokens(whole, ids, count)
    assert torch.equal(models.tokens(model, ids, count), wanted)
    if blocks:
        mask = torch.ones_like(ids)
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        found = generate_in_blocks(model, ids, micro_batches=2, attention_mask=mask, **options)
        assert torch.equal(found, wanted)
    me.meet_others()
    if me.rank == me.world - 1:  # one alone, the others are in no pass
        assert torch.equal(models.tokens(model, ids, 3), models.tokens(whole, ids, 3))
    model.weight_stream.close()  # who is done first serves the others
    assert model.weight_stream.closed
    with me.raises(nvmeio.ClosedError):
        models.logits(model, ids)
    model.weight_stream.reopen()
    assert torch.equal(models.tokens(model, ids, count), wanted)
    model.weight_stream.close()
    nothing_stays()


OPTIONS: dict[str, dict[str, Any]] = {
    "gpt2": {"resident_bytes": "620K"},
    "mixtral": {"resident_bytes": "900K"},
    "quantised": {"resident_bytes": "1M", "compute": "packed"},
    "widened": {"resident_bytes": "4M", "compute": "widened"},
    "small head": {"resident_bytes": "2M", "compute": "packed"},
}


def kinds(me: Rank) -> None:
    """Rows of embeddings and experts are read by each rank for itself; ties, quantised weights."""
    for name, options in OPTIONS.items():
        path = me.notes / name.replace("widened", "quantised")
        if name == "small head":
            units_module.SMALL_BYTES = 1 << 20  # as it is but in tests
        model = stream(path, window=1, **options)
        ids = own_prompt(me)
        if "compute" in options:
            how = options["compute"]
            whole = me.notes / f"{path.name} alone"
            alone = nvmeio.stream_model(whole, **SMALL, compute=how)
            assert torch.equal(models.logits(model, ids), models.logits(alone, ids))
            alone.weight_stream.close()
        else:
            for _ in range(2):
                assert right(model, path, ids)
        stats = model.weight_stream.stats
        assert (stats.experts_read > 0) == (name == "mixtral") and stats.streamed_bytes
        model.weight_stream.close()
    units_module.SMALL_BYTES = 1024
    model = stream(me.notes / "gpt2-parts", resident_bytes="350K", window=1)
    assert right(model, me.notes / "gpt2", own_prompt(me))
    assert model.weight_stream.stats.rows_read
    model.weight_stream.close()
    # A rank alone needs nobody
    group = [dist.new_group([rank]) for rank in range(me.world)][me.rank]
    model = nvmeio.stream_model(me.notes / "model", process_group=group)
    assert type(uses_of(model).resources.reader) is Reader
    model.weight_stream.close()


def fail(me: Rank) -> None:
    """Whichever rank's read fails, all that want its part raise, and compute the next time."""
    together()
    handle = handle_of(me)
    path = me.notes / "model"
    model = stream(path, handle=handle)
    ids = own_prompt(me)
    wanted = models.logits(model, ids)
    for victim in (0, me.world - 1):
        me.meet_others()
        if me.rank == victim:
            me.read_errno = errno.EIO
        told = "weights" if me.rank == victim else f"rank {victim} could not read its part of"
        with me.raises(nvmeio.TransferError, "EIO", told) as raised:
            models.logits(model, ids)
        assert raised[0].errno == errno.EIO
        me.read_errno = 0
        me.meet_others()
        assert torch.equal(models.logits(model, ids), wanted)
    model.weight_stream.close()
    # A byte of one rank's part is another one: nobody computes with it
    me.meet_others()
    part = me.notes / "parts" / f"rank-{me.rank}" / "model.safetensors.part"
    if me.rank == 1:
        flip_in_part(part)
    me.meet_others()
    model = stream(me.notes / "parts", handle=handle)
    with me.raises(nvmeio.IntegrityError, "differ from what was packed"):
        models.logits(model, ids)
    model.weight_stream.close()
    model = stream(me.notes / "parts", handle=handle, checksum=False)
    models.logits(model, ids)
    model.weight_stream.close()
    handle.close()


def flip_in_part(part: Path) -> None:
    """In what is there of the largest record."""
    with part.open("r+b") as file:
        at = os.lseek(file.fileno(), part.stat().st_size // 2, os.SEEK_DATA) + 100
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 4]), at)


def killed(me: Rank, victim: int, packed: str = "model") -> bool:
    """A rank dies in the middle of a pass."""
    together()
    handle = handle_of(me)
    model = stream(me.notes / packed, handle=handle, timeout_s=60)
    ids = own_prompt(me)
    models.logits(model, ids)
    me.meet_others()
    me.kill_reading = me.rank == victim
    with me.raises(nvmeio.TransferError) as raised:
        for _ in range(3):
            models.logits(model, ids)
    assert raised[0].errno in (errno.ECONNRESET, errno.ETIMEDOUT, errno.ECANCELED), raised
    with me.raises(nvmeio.TransferError):
        models.logits(model, ids)
    model.weight_stream.close()  # there is nobody to wait for
    alone = nvmeio.stream_model(me.notes / "model", handle=handle)
    assert right(alone, me.notes / "model", ids)
    alone.weight_stream.close()
    handle.close()
    return False


def hangs(me: Rank) -> bool:
    """A rank whose drive does not answer is given up, and gives up."""
    together()
    handle = handle_of(me)
    me.meet_others()
    model = stream(me.notes / "model", handle=handle, timeout_s=GIVEN_UP_S)
    ids = own_prompt(me)
    models.logits(model, ids)
    me.meet_others()
    if me.rank == 1:
        me.read_gate = threading.Event()
        waiting = threading.Thread(target=lambda: quietly(model, ids), daemon=True)
        waiting.start()
        me.told("given up")
        me.read_gate.set()
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive()
    else:
        with me.raises(nvmeio.TransferError):
            for _ in range(3):
                models.logits(model, ids)
        me.tell("given up", "")
    model.weight_stream.close()
    handle.close()
    return False


def quietly(model: Any, ids: torch.Tensor) -> None:
    with contextlib.suppress(nvmeio.TransferError):
        for _ in range(3):
            models.logits(model, ids)


def stopped(me: Rank) -> None:
    """A rank that stands still in a pass is served without: it holds nobody up for long."""
    me.meet_others()
    model = stream(me.notes / "model", timeout_s=GIVEN_UP_S)
    ids = own_prompt(me)
    path = me.notes / "model"
    gone = threading.Event()
    if me.rank == 1:
        units = model.weight_stream.units
        hook = units[1].modules[0].register_forward_pre_hook(lambda *_: gone.wait(PATIENCE_S))
        thread = threading.Thread(target=lambda: models.logits(model, ids))
        thread.start()
        me.told("computed")
        hook.remove()
        gone.set()
        thread.join(PATIENCE_S)
    else:
        for _ in range(2):
            assert right(model, path, ids)
        me.tell("computed", "")
    assert right(model, path, ids)
    model.weight_stream.close()


def interrupted(me: Rank) -> None:
    """Ctrl-C on one rank, in a pass and in `close`: the others never notice."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    path = me.notes / "model"
    model = stream(path)
    ids = own_prompt(me)
    wanted = models.tokens(loaded(path), ids, 4)
    if me.rank == 0:
        module = model.weight_stream.units[2].modules[0]

        def press(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)

        hook = module.register_forward_pre_hook(press)
        with me.raises(KeyboardInterrupt):
            models.tokens(model, ids, 4)
        hook.remove()
    assert torch.equal(models.tokens(model, ids, 4), wanted)
    if me.rank == 0:  # it waits for the others, who are not done
        reader = uses_of(model).resources.reader
        pressing = threading.Thread(target=press_when, args=(lambda: reader._leaving,))
        pressing.start()
        with me.raises(KeyboardInterrupt):
            model.weight_stream.close()
        pressing.join()
    me.meet_others()
    assert torch.equal(models.tokens(model, ids, 4), wanted)
    model.weight_stream.close()


def press_when(seen: Callable[[], bool]) -> None:
    spin_until(seen)
    os.kill(os.getpid(), signal.SIGINT)


def dropped(me: Rank) -> None:
    """A stream that one rank drops ends for the others, who say so."""
    model = stream(me.notes / "model")
    ids = own_prompt(me)
    assert right(model, me.notes / "model", ids)
    me.meet_others()
    if me.rank == 1:
        del model
        spin_until_collected(lambda: not {t for t in nvmeio_threads() if "ranks" in t.name})
    me.meet_others()
    if me.rank != 1:
        with me.raises(nvmeio.TransferError, "rank"):
            for _ in range(3):
                models.logits(model, ids)
        model.weight_stream.close()
    gc.collect()


def wrong(me: Rank) -> None:
    """What does not belong together is refused by all ranks."""
    first = me.notes / "model"

    def refused(error: Any, *texts: str, at: Any = None, **options: Any) -> None:
        """One rank's mistake, or everybody's."""
        hurt = at is None or me.rank == at
        with me.raises(error if hurt else nvmeio.TransferError, *texts):
            stream(options.pop("path", first), **options)
        me.meet_others()

    other, parts = me.notes / "other", me.notes / "parts"
    mixed = other if me.rank == 1 else first
    with me.raises(nvmeio.IntegrityError, "rank 1 streams another model than rank 0"):
        stream(mixed)
    with me.raises(nvmeio.IntegrityError, "other settings"):
        stream(first, dtype="bfloat16" if me.rank == 1 else None)
    with me.raises(nvmeio.IntegrityError, "parts of different models"):
        stream(me.notes / "parts-of-other" if me.rank == 1 else parts)
    swapped = parts / f"rank-{1 - me.rank}"
    with me.raises((ValueError, nvmeio.TransferError), "and this is rank"):
        stream(swapped)
    me.meet_others()
    with me.raises((ValueError, nvmeio.TransferError), "of 4 of a model", "there are 2 ranks"):
        stream(me.notes / "four")
    me.meet_others()
    nowhere = me.notes / "nowhere" if me.rank == 1 else first
    refused(FileNotFoundError, "nowhere", at=1, path=nowhere)
    refused(ValueError, "too small", resident_bytes=4096)
    refused(ValueError, "each rank reads one directory", path=[first, me.notes / "other"])
    refused(ValueError, "window", at=0, window=0 if me.rank == 0 else 2)
    for path in (parts, parts / "rank-1"):
        with me.raises(ValueError, "process_group="):
            nvmeio.stream_model(path)
    with me.raises(ValueError, "timeout_s must be more than 0"):
        stream(first, timeout_s=0)
    refused(ValueError, "timeout_s must be", at=0, timeout_s=0 if me.rank == 0 else PATIENCE_S)
    # What one rank is refused before the others can be told of it, they give up; all stay together
    with me.raises(TypeError if me.rank == 1 else TimeoutError):
        if me.rank == 1:
            nvmeio.stream_model(first, process_group=3)
        stream(first, timeout_s=LIMIT_S)
    me.meet_others()
    stream(first).weight_stream.close()
    with me.raises((ValueError, nvmeio.TransferError), "packed for"):
        stream(parts, layers=["model.layers.0", "model.layers.1.mlp"])
    me.meet_others()
    if me.rank == 1:
        me.told("given up")
    else:
        with me.raises(nvmeio.TransferError, within_s=PATIENCE_S) as raised:
            stream(first, timeout_s=LIMIT_S)
        assert raised[0].errno == errno.ETIMEDOUT, raised
        me.tell("given up", "")
        return
    with me.raises(nvmeio.TransferError):
        stream(first, timeout_s=LIMIT_S)


WORK: Work = {
    f"stream_{work.__name__}": work
    for work in (
        shares,
        trains,
        prompts,
        kinds,
        fail,
        killed,
        hangs,
        stopped,
        interrupted,
        dropped,
        wrong,
    )
}


def calmly(work: Callable[..., bool | None]) -> Callable[..., bool | None]:
    """transformers warns of its own affairs; and models of tests are small."""

    def run(me: Rank, **arguments: Any) -> bool | None:
        warnings.simplefilter("ignore")
        units_module.SMALL_BYTES = 1024
        return work(me, **arguments)

    return run


if __name__ == "__main__":
    _rank_program.main({name: calmly(work) for name, work in WORK.items()})

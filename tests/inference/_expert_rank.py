"""The ranks of test_expert_ranks.py: what they do, run by `checkpoint._rank_program`."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint import _rank_program
from checkpoint._rank_program import PATIENCE_S, Rank
from inference import _models as models
from inference._tp_rank import handle_of

import nvmeio
from nvmeio.inference._plan import units

units.SMALL_BYTES = 1024


def whole_of(me: Rank, name: str) -> Path:
    """The directory that transformers loads: beside a packed one it is in "whole"."""
    beside = me.notes / "whole"
    return (beside if beside.exists() else me.notes) / name


def stream(me: Rank, name: str, share: float = 0.6, **options: Any) -> Any:
    """`share`: how much of its own experts a rank has memory for."""
    whole = models.loaded(whole_of(me, name))
    named = dict(whole.named_parameters())
    experts = sum(p.nbytes for key, p in named.items() if ".experts." in key)
    others = sum(p.nbytes for p in named.values()) - experts
    given = int(others * 1.5) + int(experts * share / me.world) + (256 << 10)
    chosen = {
        "process_group": dist.group.WORLD,
        "tp_plan": "experts",
        "resident_bytes": given,
        "timeout_s": PATIENCE_S,
        **options,
    }
    return nvmeio.stream_model(me.notes / name, **chosen)


def assert_own_experts(me: Rank, model: Any) -> None:
    """A rank has none of another's in memory."""
    kept = model.weight_stream._cache._recency
    for number, experts in enumerate(model.weight_stream.experts):
        for expert in range(experts.number):
            assert expert % me.world == me.rank or (number, expert) not in kept


def equal(me: Rank) -> None:
    """Each rank has a prompt of its own; a rank's tokens are those of a process alone."""
    for name in ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "qwen3_moe_bf16", "gpt_oss_bf16"):
        load = models.loaded_aligned if whole_of(me, name) != me.notes / name else models.loaded
        whole = load(whole_of(me, name))
        for share in (0.6,) if name.endswith("bf16") else (0.6, 1.1):
            model = stream(me, name, share)
            for kernel in ("grouped_mm", "batched_mm", "eager"):
                for each in (model, whole):
                    each.set_experts_implementation(kernel)
                for length in (1, 2 + 5 * me.rank):
                    ids = models.prompt(batch=1 + me.rank, length=length, seed=me.rank)
                    wanted = models.logits(whole, ids)
                    found = models.logits(model, ids)
                    if kernel == "batched_mm":  # takes other kernels for other numbers of tokens
                        torch.testing.assert_close(found, wanted)
                    else:
                        assert torch.equal(found, wanted), (name, kernel, length)
            assert_own_experts(me, model)
            ids = models.prompt(batch=2, length=3, seed=me.rank)
            for each in (model, whole):
                each.set_experts_implementation("grouped_mm")
            found = models.tokens(model, ids, 40)
            assert torch.equal(found, models.tokens(whole, ids, 40)), name
            model.weight_stream.close()


def once(me: Rank) -> None:
    """All experts fit into the ranks' memory together: each is read by one rank, once."""
    model = stream(me, "mixtral", 1.3)
    whole = models.loaded(me.notes / "mixtral")
    for seed in range(4):
        models.logits(model, models.prompt(batch=4, length=30, seed=seed))
    stats = model.weight_stream.stats.experts
    read = torch.tensor([stats.misses + stats.read_ahead, stats.bytes_read])
    dist.all_reduce(read)
    experts = [p for n, p in whole.named_parameters() if ".experts." in n]
    assert int(read[0]) == len(model.weight_stream.experts) * experts[0].shape[0], read
    assert int(read[1]) == sum(p.nbytes for p in experts), read
    assert int(stats.bytes_read) <= 1.01 * int(read[1]) / me.world, (stats, read)
    assert not stats.evictions
    model.weight_stream.close()


def fails(me: Rank) -> None:
    """A rank whose drive fails tells the others at once; all say so, and again when asked."""
    handle = handle_of(me)
    model = stream(me, "mixtral", 0.6, handle=handle)
    ids = models.prompt(batch=2, length=4, seed=me.rank)
    models.logits(model, models.prompt(batch=1, length=1))  # needs few experts
    me.meet_others()
    bad = me.world - 1
    me.read_errno = errno.EIO if me.rank == bad else 0
    text = "expert" if me.rank == bad else ""
    with me.raises(nvmeio.TransferError, text):
        for seed in range(20):
            models.logits(model, models.prompt(batch=3, length=9, seed=seed))
    with me.raises(nvmeio.TransferError, "Call stream_model again"):
        models.logits(model, ids)
    model.weight_stream.close()
    handle.close()
    me.meet_others()
    whole = models.loaded(me.notes / "mixtral")
    again = stream(me, "mixtral")
    assert torch.equal(models.logits(again, ids), models.logits(whole, ids))
    again.weight_stream.close()


def refused(me: Rank) -> None:
    """A model without experts, and one that is to be trained."""
    for name, options in (("llama", {}), ("mixtral", {"trainable": True})):
        with me.raises(ValueError, "tp_plan"):
            nvmeio.stream_model(
                me.notes / name, process_group=dist.group.WORLD, tp_plan="experts", **options
            )


def hooked(me: Rank) -> None:
    """A hook of one rank raises between the layers: the others are told, and need no time limit."""
    model = stream(me, "mixtral")
    ids = models.prompt(batch=2, length=4, seed=me.rank)
    models.logits(model, ids)

    def hook(*_: Any) -> None:
        raise RuntimeError("from a hook")

    if me.rank == 0:
        model.model.layers[2].register_forward_pre_hook(hook)
        with me.raises(RuntimeError, "from a hook"):
            models.logits(model, ids)
    else:
        with me.raises(nvmeio.TransferError, "failed, died"):
            models.logits(model, ids)
    model.weight_stream.close()


def frozen(me: Rank, victim: int) -> bool:
    """A rank that does not go on: the others are told within the time limit."""
    limit = 5.0
    model = stream(me, "mixtral", timeout_s=limit)
    ids = models.prompt(batch=2, length=4, seed=me.rank)
    models.logits(model, ids)
    me.meet_others()
    if me.rank == victim:
        me.tell("frozen", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    pid = int(me.told("frozen"))
    try:
        with me.raises(nvmeio.TransferError, within_s=4 * limit):
            for _ in range(3):
                models.logits(model, ids)
    finally:
        os.kill(pid, signal.SIGKILL)
    return False


if __name__ == "__main__":
    _rank_program.main(
        {
            "experts_equal": equal,
            "experts_once": once,
            "experts_fails": fails,
            "experts_hooked": hooked,
            "experts_refused": refused,
            "experts_frozen": frozen,
        }
    )

"""One rank of a training that saves through `NvmeTrainer`.

`_trainer_rank.py RANK WORLD FOLDER`, and "machines" where each rank is the first of a machine,
"fails" where rank 1 fails in the second save.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch


def _be_slower_than_the_other() -> None:
    """Look at what a checkpoint consists of once the other process has put it in its place."""
    walk = os.walk

    def walk_when_gone(top: str) -> Iterator[tuple[str, list[str], list[str]]]:
        limit = time.monotonic() + 30
        while ".nvmeio-saving-" in top and os.path.exists(top) and time.monotonic() < limit:
            os.sched_yield()
        yield from walk(top)

    os.walk = walk_when_gone  # type: ignore[assignment]


def main() -> None:
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    store = folder.parent / f"{folder.name}-store"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world
    )
    machines = sys.argv[4:] == ["machines"]
    # accelerate asks for them, and takes the group that is there.
    local = 0 if machines else rank
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    torch.set_num_threads(1)

    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from nvmeio.integrations.transformers import NvmeTrainer

    if machines and rank:
        _be_slower_than_the_other()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    texts = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 64
    arguments = TrainingArguments(
        str(folder), max_steps=4, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
    )

    class Trainer(NvmeTrainer):  # type: ignore[misc,valid-type]
        def _save_rng_state(self, output_dir: str) -> None:
            if rank == 1 and self.state.global_step == 4 and sys.argv[4:] == ["fails"]:
                raise OSError(errno.ENOSPC, "the drive is full")
            super()._save_rng_state(output_dir)

    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=texts)
    assert arguments.world_size == world
    try:
        trainer.train()
    except OSError as failed:
        print(f"{type(failed).__name__} of rank {rank}: {failed}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads abort a busy process at its very end now and then


if __name__ == "__main__":
    main()

"""One rank of a training that saves through `NvmeTrainer`: `_trainer_rank.py RANK WORLD FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch


def main() -> None:
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    store = folder.parent / f"{folder.name}-store"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world
    )
    # accelerate asks for them, and takes the group that is there.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    torch.set_num_threads(1)

    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from nvmeio.integrations.transformers import NvmeTrainer

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
    trainer = NvmeTrainer(LlamaForCausalLM(config), arguments, train_dataset=texts)
    assert arguments.world_size == world
    trainer.train()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads abort a busy process at its very end now and then


if __name__ == "__main__":
    main()

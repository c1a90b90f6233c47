"""Checkpoints through DeepSpeed's FastFileWriter, as its users write them; nothing here of nvmeio.

python _deepspeed_save.py DIRECTORY
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.io import FastFileWriter, FastFileWriterConfig
from deepspeed.ops.op_builder import AsyncIOBuilder


def checkpoint() -> dict[str, torch.Tensor]:
    """Tensors of many dtypes and of odd sizes, larger and smaller than the writer's buffer."""
    draw = torch.Generator().manual_seed(3)
    floats = torch.randn(1_000_003, generator=draw)
    return {
        "float32": floats,
        "transposed": floats[:999_000].view(999, 1000).t(),
        "bfloat16": floats[:70_001].bfloat16(),
        "int64": torch.arange(12_345),
        "bool": floats[:777] > 0,
        "scalar": torch.tensor(7.0),
        "empty": torch.empty(0, 5),
    }


def main() -> None:
    directory = Path(sys.argv[1])
    saved = checkpoint()
    done = []
    for parallelism in (1, 2):
        handle = (
            AsyncIOBuilder()
            .load()
            .aio_handle(block_size=1 << 20, queue_depth=8, intra_op_parallelism=parallelism)
        )
        pinned = handle.new_cpu_locked_tensor(1 << 20, torch.empty(0, dtype=torch.uint8))
        for zipped in (True, False):
            for double in (True, False):
                path = directory / f"{parallelism}-{zipped}-{double}.pt"
                config = FastFileWriterConfig(
                    dnvme_handle=handle, pinned_tensor=pinned, double_buffer=double
                )
                writer = FastFileWriter(file_path=str(path), config=config)
                torch.save(saved, writer, _use_new_zipfile_serialization=zipped)
                writer.close()
                del writer
                loaded = torch.load(path)
                assert loaded.keys() == saved.keys()
                for name, tensor in saved.items():
                    assert loaded[name].dtype == tensor.dtype, (path, name)
                    assert torch.equal(loaded[name], tensor), (path, name)
                done.append(path.name)
        assert handle.free_cpu_locked_tensor(pinned)
    op = deepspeed.ops.op_builder.OpBuilder._loaded_ops["async_io"]
    print(json.dumps({"op": op.aio_handle.__module__, "done": done}))


if __name__ == "__main__":
    main()

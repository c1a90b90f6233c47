"""One rank of a vLLM model on a CPU: `_vllm_rank.py MODEL PORT RANK RANKS`.

Loads the model as vLLM does by itself, has its files leave the page cache, and loads it by nvmeio
and by vLLM again. Prints for each what this rank read from the drive, and whether its parameters
are the same.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_DIST_IDENT"] = f"nvmeio-{sys.argv[2]}"

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

from nvmeio.integrations import vllm as for_vllm


def bytes_read() -> int:
    """From drives, by this process, since it began."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"])


def hashes(model: Any) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def drop(directory: Path) -> None:
    for path in directory.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def main() -> None:
    model, port, rank, ranks = Path(sys.argv[1]), *map(int, sys.argv[2:])
    for_vllm.register()
    torch.accelerator.empty_cache = lambda: None  # there is none

    def configured(load_format: str) -> Any:
        return EngineArgs(
            model=str(model),
            load_format=load_format,
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=32,
            tensor_parallel_size=ranks,
        ).create_engine_config()

    with set_current_vllm_config(configured("auto")):
        init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        ensure_model_parallel_initialized(ranks, 1)

    def load(load_format: str) -> dict[str, Any]:
        gc.collect()
        torch.distributed.barrier()  # nobody has the files mapped
        if rank == 0:
            drop(model)
        torch.distributed.barrier()
        config = configured(load_format)
        before = bytes_read()
        with set_current_vllm_config(config):
            made = get_model(vllm_config=config)
        for thread in threading.enumerate():
            if "prefetch" in thread.name:  # vLLM's, for which nobody waits
                thread.join()
        return {"read": bytes_read() - before, "hashes": hashes(made)}

    load("auto")  # what is imported on the way is not counted
    found = {load_format: load(load_format) for load_format in ("nvmeio", "auto")}
    print("FOUND", json.dumps(found), flush=True)
    torch.distributed.barrier()
    os._exit(0)  # its shared memory is not taken down in any order that both like


if __name__ == "__main__":
    main()

"""Streams models with little memory: a process that has imported everything, and forks for each.

A line of JSON in is a job, a line out what became of it. The child may take `limit` bytes of
addresses beyond those that the imports took (RLIMIT_AS), which rules out mapping a model's files as
well as loading them.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import sys
import threading
import traceback
import warnings
from typing import Any

_CHILD_S = 300  # no answer is an answer


def _run(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    from inference._models import logits, prompt, tokens

    import nvmeio
    from nvmeio._memory.system import proc_bytes

    # What is free within the heap, or becomes so, could be had without asking the kernel.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    limit = proc_bytes("/proc/self/status", "VmSize") + job["limit"]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        torch.empty(job["limit"] + (2 << 20), dtype=torch.uint8)
    except RuntimeError:
        pass
    else:
        raise AssertionError("the limit does not hold")
    # A small ring of bounce blocks: the usual one may take more than the limit.
    with nvmeio.AioHandle(block_size=256 << 10, queue_depth=16) as handle:
        model = nvmeio.stream_model(
            job["directory"], resident_bytes=job["resident_bytes"], handle=handle
        )
        ids = prompt()
        found = {"logits": logits(model, ids), "tokens": tokens(model, ids, job["tokens"])}
        torch.save(found, job["out"])
        stats = model.weight_stream.stats
        model.weight_stream.close()
    return stats._asdict()


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(_CHILD_S)
        try:
            text = json.dumps(_run(job))
        except BaseException:
            text = json.dumps({"error": traceback.format_exc()})
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, ended = os.waitpid(child, 0)
    found: dict[str, Any] = json.loads(text) if text else {"error": f"it ended with {ended}"}
    return found


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is imported may print
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from inference import _models

        import nvmeio
        from nvmeio.inference._plan import units

        units.SMALL_BYTES = 1024  # as in the other tests: what is small here is streamed too
        torch.set_num_threads(1)
        # What transformers imports when a model is used the first time. No thread may be left: the
        # children are forks.
        small = _models.MODELS
        for make in small.values():
            model = make(layers=1, width=16).eval()
            _models.logits(model, _models.prompt())
            _models.tokens(model, _models.prompt(), 2)
            del model
        assert callable(nvmeio.stream_model)
    threading.stack_size(1 << 20)  # stacks are addresses too
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()

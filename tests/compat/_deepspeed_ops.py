"""Compile DeepSpeed's own ops to where the tests look for them, before any test's clock runs.

It takes minutes of both cores, and a test that compiled beside others was stopped by its limit.
"""

from __future__ import annotations

import os

import extensions
from _deepspeed_support import environment, needs_its_own_op


def main() -> None:
    if needs_its_own_op.args[0]:
        print(f"== they are not compiled: {needs_its_own_op.kwargs['reason']}")
        return
    os.environ.update(environment())
    with extensions.kept_with_environment():
        from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, PinMemoryBuilder

        for builder in (AsyncIOBuilder, PinMemoryBuilder, CPUAdamBuilder):
            builder().load(verbose=False)


if __name__ == "__main__":
    main()

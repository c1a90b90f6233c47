"""One streamed Llama on N ranks with a rate-limited drive each, against one rank with one drive.

    python benchmarks/rank_drives.py --dir /mnt/nvme
    python benchmarks/rank_drives.py --ranks 4 --rate 60 --tokens 8 --json

Every drive has a copy of the model; every rank reads its part of each layer from its own and gets
the rest through gloo. All decode the same prompt, so their tokens are compared with those of the
one rank. The turns alternate; what is told is the median of seconds a token. Needs root: see
`_loop_devices.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import _ranks
from _loop_devices import MB, limited


def decode(options: argparse.Namespace) -> None:
    """A rank: decode, and tell the tokens, the seconds of each and the bytes that were read."""
    import torch
    from peers.inference import prompt_ids

    import nvmeio

    torch.set_num_threads(1)
    with _ranks.group(options) as group, torch.no_grad():
        model = nvmeio.stream_model(
            str(options.model), resident_bytes=options.resident, process_group=group
        )
        with model.weight_stream as stream:
            output = model(prompt_ids(1), use_cache=True)
            tokens, seconds, before = [], [], stream.stats.bytes_read
            for _ in range(options.tokens):
                tokens.append(int(output.logits[0, -1].argmax()))
                began = time.perf_counter()
                last = torch.tensor([tokens[-1:]])
                output = model(last, past_key_values=output.past_key_values, use_cache=True)
                seconds.append(time.perf_counter() - began)
            nbytes = (stream.stats.bytes_read - before) / options.tokens
    print(json.dumps({"tokens": tokens, "seconds": seconds, "nbytes": nbytes}))


def main() -> None:
    parser = _ranks.parser(__doc__, 120, "model, about", model=Path, resident=int)
    parser.add_argument("--tokens", type=int, default=5)
    options = parser.parse_args()
    if options.rank is not None:
        return decode(options)
    from peers.inference import Streaming

    found: dict[int, list[float]] = {1: [], options.ranks: []}
    nbytes: dict[int, float] = {}
    tokens = None
    with _ranks.drives(options, int(2.5 * options.size * MB)) as (directory, made):
        models = [place / "model" for place, _ in made]
        with contextlib.closing(Streaming()) as writer:
            writer.write_model(str(models[0]), int(options.size * MB))
        for model in models[1:]:
            shutil.copytree(models[0], model)
        subprocess.run(["sync"], check=True)
        resident = int(options.size * MB) // 3
        given = [
            ("--model", model, "--tokens", options.tokens, "--resident", resident)
            for model in models
        ]
        with limited([number for _, number in made], int(options.rate * MB)):
            for ranks, rendezvous in _ranks.turns(options, directory):
                told = _ranks.run_ranks(__file__, given[:ranks], rendezvous)
                tokens = tokens or told[0]["tokens"]
                if any(each["tokens"] != tokens for each in told):
                    sys.exit("the ranks' tokens are not those of one rank")
                found[ranks].append(max(statistics.median(each["seconds"]) for each in told))
                nbytes[ranks] = max(each["nbytes"] for each in told)
    medians = {ranks: statistics.median(values) for ranks, values in found.items()}
    ratio = medians[1] / medians[options.ranks]
    if options.json:
        rates = {"rate_mb_per_s": options.rate, "s_per_token": found, "nbytes_per_rank": nbytes}
        print(json.dumps({**rates, "ratio": ratio}, indent=2))
        return None
    for ranks, median in medians.items():
        least = nbytes[ranks] / options.rate / MB
        print(
            f"{ranks} rank{'s' * (ranks > 1)}: {median:.2f} s a token; each read"
            f" {nbytes[ranks] / MB:.1f} MB a token, {least:.2f} s at {options.rate:g} MB/s"
        )
    print(f"ratio {ratio:.2f} with {options.ranks} ranks, same tokens")
    return None


if __name__ == "__main__":
    main()

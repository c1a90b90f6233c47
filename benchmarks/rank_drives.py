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
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _loop_devices import MB, drive, limited, need_root

TURN_TIMEOUT_S = 900


def decode(options: argparse.Namespace) -> None:
    """A rank: decode, and tell the tokens, the seconds of each and the bytes that were read."""
    import torch
    import torch.distributed as dist
    from peers.inference import prompt_ids

    import nvmeio

    torch.set_num_threads(1)
    group = None
    if options.rendezvous:
        store = dist.FileStore(options.rendezvous, options.ranks)
        dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.ranks)
        group = dist.group.WORLD
    model = nvmeio.stream_model(
        str(options.model), resident_bytes=options.resident, process_group=group
    )
    with model.weight_stream as stream, torch.no_grad():
        output = model(prompt_ids(1), use_cache=True)
        tokens, seconds, before = [], [], stream.stats.bytes_read
        for _ in range(options.tokens):
            tokens.append(int(output.logits[0, -1].argmax()))
            began = time.perf_counter()
            output = model(
                torch.tensor([tokens[-1:]]), past_key_values=output.past_key_values, use_cache=True
            )
            seconds.append(time.perf_counter() - began)
        nbytes = (stream.stats.bytes_read - before) / options.tokens
    if group is not None:
        dist.destroy_process_group()
    print(json.dumps({"tokens": tokens, "seconds": seconds, "nbytes": nbytes}))


def turn(models: Sequence[Path], options: argparse.Namespace, rendezvous: Path | None) -> Any:
    """What each of so many ranks told."""
    ranks = []
    for rank, model in enumerate(models):
        command = [sys.executable, __file__, "--rank", str(rank), "--ranks", str(len(models))]
        command += ["--model", str(model), "--tokens", str(options.tokens)]
        command += ["--resident", str(options.resident)]
        command += ["--rendezvous", str(rendezvous)] if rendezvous else []
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    try:
        told = [rank.communicate(timeout=TURN_TIMEOUT_S)[0] for rank in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    if any(rank.returncode for rank in ranks):
        sys.exit("a rank failed; its error is above")
    return [json.loads(text) for text in told]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dir", type=Path, default=Path("."), help="where the images lie")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", type=float, default=60, help="MB/s of each drive (60)")
    parser.add_argument("--size", type=float, default=120, help="MB of the model, about (120)")
    parser.add_argument("--tokens", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    for name, kind in (("rank", int), ("model", Path), ("rendezvous", str), ("resident", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        return decode(options)
    need_root()
    from peers.inference import Streaming

    with contextlib.ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="nvmeio-ranks-", dir=options.dir))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        room = int(2.5 * options.size * MB) + (256 << 20)
        made = [stack.enter_context(drive(directory, n, room)) for n in range(options.ranks)]
        models = [place / "model" for place, _ in made]
        with contextlib.closing(Streaming()) as writer:
            writer.write_model(str(models[0]), int(options.size * MB))
        for model in models[1:]:
            shutil.copytree(models[0], model)
        subprocess.run(["sync"], check=True)
        options.resident = int(options.size * MB) // 3
        found: dict[int, list[float]] = {1: [], options.ranks: []}
        nbytes: dict[int, float] = {}
        tokens = None
        with limited([number for _, number in made], int(options.rate * MB)):
            for repeat in range(options.repeats):
                for ranks in sorted(found, reverse=bool(repeat % 2)):
                    rendezvous = directory / f"rendezvous-{repeat}" if ranks > 1 else None
                    told = turn(models[:ranks], options, rendezvous)
                    tokens = tokens or told[0]["tokens"]
                    if any(each["tokens"] != tokens for each in told):
                        sys.exit("the ranks' tokens are not those of one rank")
                    found[ranks].append(max(statistics.median(each["seconds"]) for each in told))
                    nbytes[ranks] = max(each["nbytes"] for each in told)
    medians = {ranks: statistics.median(values) for ranks, values in found.items()}
    ratio = medians[1] / medians[options.ranks]
    if options.json:
        told = {"rate_mb_per_s": options.rate, "s_per_token": found, "nbytes_per_rank": nbytes}
        print(json.dumps({**told, "ratio": ratio}, indent=2))
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

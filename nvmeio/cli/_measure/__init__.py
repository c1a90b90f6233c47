"""What every measurement here is made with, that of `nvmeio bench` and those of benchmarks/.

`turns` (who runs when), `worker` (a process of its own for a peer), `fio` and `deepspeed` (peers
that need a word), `disk` (what the drive and the page cache had to do with it).
"""

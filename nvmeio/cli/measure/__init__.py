"""What every measurement here is made with, that of `nvmeio bench` and those of benchmarks/.

All that benchmarks/ takes from the command line is in here: `turns` (who runs when), `worker` (a
process of its own for a peer), `fio` and `deepspeed` (peers that need a word), `disk` (what the
drive and the page cache had to do with it), `scratch` (directories to measure in), `machine` and
`cufile_facts` (what there is to measure on).
"""

from nvmeio._checks import parse_size as parse_size

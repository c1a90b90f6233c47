#!/bin/sh
# The first hour with a GPU, from a bare machine: one GPU, no network, torch with CUDA 2.11 or later in its image, and
# neither cffi, pycparser, numpy, typer nor a compiler for sure.
#
#     sh benchmarks/gpu_day.sh [DIRECTORY ON THE DRIVE] [RESULTS]
#
# Before, on a machine with a network, a compiler and the same Python and glibc or older ones:
#
#     python setup.py build_ext --inplace             # nvmeio/_native*.abi3.so: for every Python from 3.10 on
#     pip download -d wheels --only-binary :all: cffi pycparser numpy isal safetensors nvidia-cufile-cu12 --no-deps
#     pip download -d wheels --only-binary :all: typer rich    # the facts ask nvmeio.cli, and part C asks the facts
#     cc -shared -fPIC -O1 -o wheels/cufile_traps.so tests/fakes/cufile_traps.c -ldl    # see part C
#
# and carry the repository with nvmeio/_native*.abi3.so and wheels/ in it. Both are ignored by git: where a tool copies
# the tracked files alone, name them (`carry`: "wheels", and each of the three libraries). A wheel of DeepSpeed that was built
# with DS_BUILD_AIO=1 may lie in wheels/ too; without it that step says that it is missing.
#
# The parts are runs of their own, each worth having alone: a limit for a command need not be longer than eight minutes
# (PARTS=A sh benchmarks/gpu_day.sh, then PARTS=B, and so on). After every step RESULTS has the JSON and the table of the
# part, and one summary of all parts so far. The first wrong byte ends its part, and those behind it.
set -u
cd "$(dirname "$0")/.." || exit 1
place=${1:-${TMPDIR:-/tmp}} results=${2:-${OUT:-.}}
python=${PYTHON:-python3}
mkdir -p "$results" || exit 1
packages=$(mktemp -d "${TMPDIR:-/tmp}/gpu-day-XXXXXX") || exit 1
trap 'rm -rf "$packages"' EXIT
export PYTHONPATH="$PWD:$packages${PYTHONPATH:+:$PYTHONPATH}"
unset PYTHONDONTWRITEBYTECODE  # each step is a process, which would compile all of nvmeio again

for wheel in wheels/*.whl; do  # a wheel is an archive of what is to be imported; those that torch's image has win
    test -e "$wheel" || continue
    name=$(basename "$wheel" | sed 's/-.*//' | tr '[:upper:]' '[:lower:]')
    "$python" -c "import $name" 2>/dev/null || "$python" -m zipfile -e "$wheel" "$packages"
done
"$python" -c 'import torch, cffi, typer, nvmeio; print("torch", torch.__version__, "nvmeio", nvmeio.__version__)' || {
    echo "the head of $0 says what to carry" >&2
    exit 1
}

# A virtual machine may have no /proc/modules and no /run/udev/data: cuFile's driver would never open, and no file on a
# disk could be registered. Where they are missing, others stand in for them, which lets its compat mode be tried: no
# modules, and udev's entry of the drive to be measured, with the two properties that cuFile asks for.
traps() {
    test -e wheels/cufile_traps.so || return 0
    if ! test -e /proc/modules || ! test -d /run/udev/data; then
        mkdir -p "$packages/udev/data"
        : >"$packages/modules"
        test -e /proc/modules || export NVMEIO_TEST_MODULES="$packages/modules"
        if ! test -d /run/udev/data; then
            export NVMEIO_TEST_UDEV="$packages/udev"
            "$python" - "$place" "$packages/udev/data" <<'END'
import os, sys

place, data = sys.argv[1:]
number = os.stat(place).st_dev
device = f"{os.major(number)}:{os.minor(number)}"
with open("/proc/self/mountinfo") as mounts:
    kinds = {words[2]: words[words.index("-") + 1] for words in map(str.split, mounts)}
if os.major(number) and device in kinds:  # else it is on no block device, and udev has no entry
    with open(f"{data}/b{device}", "w") as entry:
        entry.write(f"E:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE={kinds[device]}\n")
END
        fi
        export LD_PRELOAD="$PWD/wheels/cufile_traps.so"
    fi
}

status=0
for part in ${PARTS:-A B C D}; do
    case $part in
        A) minutes=4 ;;
        B) minutes=8 ;;
        C) minutes=6 && traps ;;
        D) minutes=6 ;;
        *) echo "PARTS: some of A B C D, not $part" >&2 && exit 1 ;;
    esac
    "$python" benchmarks/gpu_check.py --dir "$place" --parts "$part" --minutes "$minutes" ${GPU_ARGS:-} \
        --json "$results/gpu-$part.json" --table "$results/gpu-$part.md" \
        --summary "$results/gpu-summary.md" --with "$results"/gpu-[A-D].json ||
        status=1
    unset LD_PRELOAD NVMEIO_TEST_MODULES NVMEIO_TEST_UDEV
    if grep -q 'WRONG:' "$results/gpu-$part.json" 2>/dev/null; then
        echo "part $part was wrong: those behind it are not run" >&2
        break
    fi
done
exit $status

#!/bin/sh
# The native shim under sanitizers and valgrind: builds drive_shim.c with the shim's own files and
# runs it, over the system calls and over a libaio that misbehaves; and drive_packed.c, which widens
# and multiplies.
#
#     tests/native/run.sh [plain|asan|tsan|valgrind] ...      all but plain if none is named
#
# ROUNDS and SEED go to the drivers; CC is the compiler; files go to a directory in $TMPDIR.
# Exit status: 0 all went well, 77 something that is needed is missing (it says what), else failed.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
shim=$here/../../native_shim
cc=${CC:-cc}
rounds=${ROUNDS:-2}
seed=${SEED:-1}
work=$(mktemp -d "${TMPDIR:-/tmp}/nvmeio-native-XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

command -v "$cc" >/dev/null || { echo "no C compiler: $cc" >&2; exit 77; }

build() { # name, flags ...
    name=$1
    shift
    echo 'int main(void) { return 0; }' >"$work/try.c"
    if ! "$cc" "$@" -o "$work/try" "$work/try.c" 2>"$work/why" || ! "$work/try" 2>>"$work/why"; then
        echo "$name: $cc $* does not work here: $(tail -n 1 "$work/why")" >&2
        exit 77
    fi
    # Lines and functions are what reports name; to follow variables takes the compiler a quarter longer.
    set -- -std=c11 -D_GNU_SOURCE -g1 -O1 -fno-omit-frame-pointer -Wall -Wextra \
        -Wno-unused-parameter "$@" -I"$shim"
    "$cc" "$@" -o "$work/packed-$name" -Wl,--wrap=pthread_create "$here/drive_packed.c" \
        "$shim"/packed/*.c -ldl -lpthread -lm
    "$cc" "$@" -o "$work/$name" "$here/drive_shim.c" \
        "$shim"/common/*.c "$shim"/pump/*.c "$shim"/protection/*.c -ldl -lpthread
    "$cc" -std=c11 -O1 -shared -fPIC -o "$work/faulty.so" "$here/../fakes/faulty_libaio.c" -lpthread
}

drive() { # command ...
    "$@" "$work" "$rounds" "$seed"
    "$@" "$work" "$rounds" "$seed" "$work/faulty.so" \
        submit_error=11 submit_error_every=3 short_nbytes=8192 event_every=5 event_error=4
    "$@" "$work" "$rounds" "$seed" "$work/faulty.so" \
        submit_at_most=2 reverse=1 hold_every=3 getevents_error=4 getevents_error_every=2
}

[ $# -gt 0 ] || set -- asan tsan valgrind
for variant; do
    echo "== $variant"
    case $variant in
    plain)
        build plain
        "$work/packed-plain" "$rounds" "$seed"
        drive "$work/plain"
        ;;
    asan)
        build asan -fsanitize=address,undefined -fno-sanitize-recover=undefined
        export ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1
        "$work/packed-asan" "$rounds" "$seed"
        drive "$work/asan"
        ;;
    tsan) # GCC warns that it does not know fences; the shim has none
        build tsan -fsanitize=thread
        export TSAN_OPTIONS=halt_on_error=1:die_after_fork=0:allocator_may_return_null=1
        "$work/packed-tsan" "$rounds" "$seed"
        drive "$work/tsan"
        ;;
    valgrind)
        command -v valgrind >/dev/null || { echo "valgrind is not installed" >&2; exit 77; }
        build plain
        set -- valgrind --quiet --error-exitcode=99 --fair-sched=yes --leak-check=full \
            --show-leak-kinds=definite,indirect --errors-for-leak-kinds=definite,indirect
        "$@" "$work/packed-plain" 1 "$seed"
        drive "$@" "$work/plain"
        ;;
    *)
        echo "not one of plain, asan, tsan, valgrind: $variant" >&2
        exit 2
        ;;
    esac
done

#!/bin/sh
# Say in plain words what a machine lacks to run the CUDA backends.
set -u
missing=0
say() {
    echo "make: $1" >&2
    missing=1
}
[ -e /dev/nvidiactl ] || say "no NVIDIA device (/dev/nvidiactl is absent)"
# Triton compiles a small launcher for every kernel at run time; the interpreter on a CPU needs none.
compiler=${CC:-}
if [ -z "$compiler" ]; then
    for candidate in cc gcc clang; do command -v "$candidate" >/dev/null 2>&1 && compiler=$candidate && break; done
fi
if [ -z "$compiler" ] || ! command -v "$compiler" >/dev/null 2>&1; then
    say "no C compiler (cc, gcc, clang or \$CC): triton needs one on a GPU; on Debian and Ubuntu: apt-get install gcc"
fi
.venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    say "the torch in .venv sees no CUDA device (a CPU build, or no driver)"
exit $missing

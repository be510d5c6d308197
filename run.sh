#!/usr/bin/env bash
# The front door.
#   ./run.sh                      every technique on real text, compared with one process; a table
#   ./run.sh test [args]          the tests (args go to pytest)
#   ./run.sh FILE [N] [flags]     one file on N ranks (all GPUs, else 2): ./run.sh ddp 4 --steps 50
#   ./run.sh bench [flags]        ours against torch's own, for every file that has both
#   ./run.sh plan [flags]         which layout of hybrid_3d for my model on my cluster
#   ./run.sh scale FILE [flags]   1, 2, 4, .. ranks: speed-up and efficiency
#   ./run.sh weights [flags]      take weights from Hugging Face's files, or give them
#   ./run.sh sample [flags]       text from a checkpoint
#   ./run.sh sweep N [SEED]       N random runs over files, ranks, sizes and flags, in fp64
#   ./run.sh gpu                  what needs a GPU, as one table
#   ./run.sh papers               numbers that papers have published, beside what this code says
# Where there is no torch >= 2.11 or no NumPy it makes .venv first. PYTHON=... is another python.
# Paths in flags are relative to this folder, wherever run.sh is called from.
set -euo pipefail
files="ddp zero fsdp tensor_parallel pipeline_parallel context_parallel moe amp_accum_ckpt"
files+=" hybrid_3d"
if [[ ${PYTHON:-} == */* && $PYTHON != /* ]]; then
  PYTHON=$PWD/$PYTHON # relative to where it was said
fi
cd "$(dirname "${BASH_SOURCE[0]}")"

needed="numpy, torch"

is_usable() { # has this Python what is needed?
  local check="import $needed, sys; v = torch.__version__.split('.')"
  check+='; sys.exit((int(v[0]), int(v[1])) < (2, 11))'
  command -v "$1" >/dev/null && "$1" -c "$check" 2>/dev/null
}

is_new_enough() {
  command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))'
}

fail() {
  echo "run.sh: error: $1" >&2
  exit 2
}

find_python() {
  local candidate
  if [[ -n ${PYTHON:-} ]]; then
    command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON: no such program"
    is_usable "$PYTHON" || fail "PYTHON=$PYTHON lacks one of: $needed (torch >= 2.11)"
    return
  fi
  for candidate in .venv/bin/python python3 python; do
    if is_usable "$candidate"; then
      PYTHON=$candidate
      return
    fi
  done
  make_environment
}

make_environment() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
    if is_new_enough "$candidate" 2>/dev/null; then
      echo "run.sh: making .venv with $("$candidate" --version), once; this takes minutes" >&2
      "$candidate" -m venv .venv
      .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
      PYTHON=.venv/bin/python
      return
    fi
  done
  fail "needs Python >= 3.10 (set PYTHON=...)"
}

one_file() { # FILE [N] [flags]
  local file=${1%.py} ranks
  shift
  [[ " $files " == *" $file "* ]] || fail "no technique $file; one of: $files"
  if [[ ${1:-} =~ ^[0-9]+$ ]]; then
    ranks=$1
    shift
  else
    ranks=$("$PYTHON" -c 'from tools.launch import usual_ranks; print(usual_ranks())')
  fi
  exec "$PYTHON" tools/launch.py "$ranks" "$file.py" "$@"
}

command=${1:-}
case $command in
  -h | --help | help)
    sed -n '2,15s/^# \{0,1\}//p' run.sh # the lines at the top
    exit
    ;;
esac
if [[ $command == test ]]; then
  needed+=", pytest"
fi
find_python
case $command in
  "") exec "$PYTHON" tools/bench.py check ;;
  bench | scale) exec "$PYTHON" tools/bench.py "$@" ;;
  test)
    if "$PYTHON" -c 'import xdist' 2>/dev/null; then # on all cores
      set -- "$1" -n auto --dist worksteal "${@:2}"
    fi
    exec "$PYTHON" -m pytest "${@:2}"
    ;;
  plan | gpu | papers | weights | sample) exec "$PYTHON" "tools/$command.py" "${@:2}" ;;
  sweep) OMP_NUM_THREADS=1 exec "$PYTHON" tools/sweep.py "${@:2}" ;;
  *) one_file "$@" ;;
esac

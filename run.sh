#!/usr/bin/env bash
# The front door.
#   ./run.sh                      every technique on real text, compared with one process; a table
#   ./run.sh test [args]          the tests (args go to pytest)
#   ./run.sh FILE [N] [flags]     one file on N ranks (all GPUs, else 2): ./run.sh ddp 4 --steps 50
#   ./run.sh bench [FILE] [flags] the idea, ours and torch's own: calls, bytes, time
#   ./run.sh scale FILE [flags]   1, 2, 4, .. ranks: speed-up and efficiency
#   ./run.sh plan --gpus N --batch B [flags]    which layout of hybrid_3d for my model on my cluster
#   ./run.sh weights import|export FROM TO      weights from Hugging Face's files, or to them
#   ./run.sh sample DIR [PROMPT]  text from a checkpoint
#   ./run.sh sweep N [SEED]       N random runs over files, ranks, sizes and flags, in fp64
#   ./run.sh draw [--measure]     the pictures of docs/
#   ./run.sh gpu                  what needs a GPU, as one table
# Where there is no torch >= 2.11 or no NumPy it makes .venv first. PYTHON=... is another python.
# Paths in flags are relative to this folder, wherever run.sh is called from.
set -euo pipefail
if [[ ${PYTHON:-} == */* && $PYTHON != /* ]]; then
  PYTHON=$PWD/$PYTHON # relative to where it was said
fi
cd "$(dirname "${BASH_SOURCE[0]}")"
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} # no word on what 127.0.0.1 is called
command=${1:-}
needed="numpy, torch"
if [[ $command == test ]]; then
  needed+=", pytest"
fi

is_usable() { # has this Python what is needed?
  local check="import $needed, sys; v = torch.__version__.split('.')"
  check+='; sys.exit((int(v[0]), int(v[1])) < (2, 11))'
  "$1" -c "$check" 2>/dev/null
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
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      echo "run.sh: making .venv with $("$candidate" --version), once; this takes minutes" >&2
      "$candidate" -m venv .venv
      .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
      echo "run.sh: for commands that begin with python or torchrun: source .venv/bin/activate" >&2
      PYTHON=.venv/bin/python
      return
    fi
  done
  fail "needs Python >= 3.10 (set PYTHON=...)"
}

case $command in
  -h | --help | help)
    sed -n '2,/^set/s/^# \{0,1\}//p' run.sh # the lines at the top
    exit
    ;;
  "" | bench | scale | test | plan | weights | sample | draw | gpu | sweep) ;;
  *) [[ -f ${command%.py}.py ]] || fail "no technique $command: see ./run.sh help" ;;
esac
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
  plan | weights | sample | draw | gpu) exec "$PYTHON" "tools/$command.py" "${@:2}" ;;
  sweep) OMP_NUM_THREADS=1 exec "$PYTHON" tools/sweep.py "${@:2}" ;;
  *) exec "$PYTHON" tools/launch.py "$@" ;;
esac

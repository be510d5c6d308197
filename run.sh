#!/usr/bin/env bash
# The front door.
#   ./run.sh                    every technique on real text with its check on, then a table; fails if any fails
#   ./run.sh test [args]        the tests (args go to pytest)
#   ./run.sh FILE [N] [flags]   one file on N ranks, e.g. ./run.sh ddp 4 --steps 50
#   ./run.sh bench [flags]      ours against torch's own, for every file that has both
#   ./run.sh sweep N [SEED]     N random runs over files, ranks, sizes and flags, each equal to one process in fp64
#   ./run.sh soak [KILLS]       a run whose ranks are killed again and again ends as the one that never was
# On a machine without torch >= 2.11 and pytest it makes .venv first. PYTHON=... chooses another interpreter.
set -euo pipefail
[[ ${PYTHON:-} == */* && $PYTHON != /* ]] && PYTHON=$PWD/$PYTHON # relative to where it was said
cd "$(dirname "${BASH_SOURCE[0]}")"

files=(ddp zero fsdp tensor_parallel pipeline_parallel context_parallel moe amp_accum_ckpt hybrid_3d)
bench=(--impl both --layers 4 --width 256 --heads 8 --seq 256 --batch 8 --steps 20 --no-check)
export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore:Failed to initialize NumPy}" # torch's, where NumPy is not installed

usable() { # has this Python what the project needs?
  "$1" - 2>/dev/null <<'PY'
import sys, torch, pytest
sys.exit(tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 11))
PY
}

set_up() {
  local candidate
  if [[ -n "${PYTHON:-}" ]]; then
    usable "$PYTHON" || { echo "run.sh: error: PYTHON=$PYTHON has no torch >= 2.11 or no pytest" >&2; exit 2; }
    return
  fi
  for candidate in .venv/bin/python python3 python; do
    if command -v "$candidate" >/dev/null && usable "$candidate"; then PYTHON=$candidate; return; fi
  done
  for candidate in python3 python3.13 python3.12 python3.11 python3.10 ""; do
    [[ -n "$candidate" ]] || { echo "run.sh: error: needs Python >= 3.10 (set PYTHON=...)" >&2; exit 2; }
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && break
  done
  echo "run.sh: making .venv with $("$candidate" --version) and installing requirements.txt (once; minutes) ..." >&2
  "$candidate" -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements.txt
  PYTHON=.venv/bin/python
}

gpus() { "$PYTHON" -c 'import torch; print(torch.cuda.device_count())'; }
cores() { "$PYTHON" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())'; }
default_ranks() { local n; n=$(gpus); if ((n > 0)); then echo "$n"; else echo 2; fi; }

launch() { # FILE RANKS flags...
  local file=$1 ranks=$2 threads
  shift 2
  threads=$(($(cores) / ranks))
  export OMP_NUM_THREADS="${THREADS:-$((threads > 0 ? threads : 1))}"
  echo "run.sh: $file.py on $ranks ranks, $OMP_NUM_THREADS threads each: $*" >&2
  # --standalone finds a free port
  "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node="$ranks" "$file.py" "$@"
}

present() { for file in "${files[@]}"; do [[ -f $file.py ]] && echo "$file"; done; }

benched() { # what a file needs beside $bench
  case $1 in
    zero) echo "--stage 1" ;;
    pipeline_parallel) echo "--micro 8" ;;
    context_parallel) echo "--impl scratch --attn zigzag --seq 4096 --layers 2 --batch 1" ;; # torch's runs on GPUs only
    tensor_parallel) echo "--sp" ;;
  esac
}

layout() { # the ranks and flags with which a file is run by default, where they are not "all ranks" and none
  case $1 in
    hybrid_3d) if (($2 >= 4)); then echo "$2 --tp 2 --pp 2"; else echo "$2 --dp $2 --tp 1 --pp 1"; fi ;;
    *) echo "$2" ;;
  esac
}

all() { # TITLE flags...: every file in turn, then the table
  local title=$1 ranks code failed=() file words own=()
  shift
  ranks=$(default_ranks)
  reports=$(mktemp -d) # not local: the trap needs it
  trap 'rm -rf "$reports"' EXIT
  for file in $(present); do
    read -ra words <<<"$(layout "$file" "$ranks")"
    [[ $title != ours* ]] || read -ra own <<<"$(benched "$file")"
    printf '\n==== %s ====\n' "$file"
    code=0
    launch "$file" "${words[@]}" "$@" ${own[@]+"${own[@]}"} --json "$reports/$file.json" || code=$?
    ((code == 0)) || failed+=("$file")
  done
  printf '\n==== %s ====\n' "$title"
  "$PYTHON" - "$reports" "${failed[*]:-}" $(present) <<'PY'
import json, os, sys
folder, failed, files = sys.argv[1], sys.argv[2].split(), sys.argv[3:]
bad = not files
mb = lambda n: f"{n / 1e6:.2f}"
print(f"{'file':18}{'ranks':>6}{'worst gap':>11}{'sent MB':>10}{'textbook':>10}{'held MB':>9}{'peak MB':>9}{'tok/s':>9}{'vs torch':>10}  verdict")
for file in files:
    path = os.path.join(folder, file + ".json")
    if file in failed or not os.path.exists(path):
        bad = True
        print(f"{file:18}{'FAILED' if file in failed else 'NO REPORT':>60}")
        continue
    with open(path) as f:
        r = json.load(f)
    me, check = r["ranks"][0], r["check"]
    sent = sum(c["wire"] for c in me["collectives"].values())
    book = sum(row["expected"] for row in r["textbook"] if row["what"].startswith("wire"))
    held = sum(me["memory"][k] for k in ("parameters", "gradients", "optimizer"))
    print(f"{file:18}{r['world_size']:6}" + (f"{check['gradient']:11.1e}" if check else f"{'-':>11}") + f"{mb(sent):>10}{mb(book):>10}"
          f"{mb(held):>9}{mb(me['memory']['peak']):>9}{r['tokens_per_second']:9,.0f}"
          + (f"{r['speedup']:9.2f}x" if r.get("speedup") else f"{'-':>10}") + ("  passed" if check and check["passed"] else "  ran"))
    bad |= bool(check) and not check["passed"]
print("" if files else "no technique file found: nothing ran")
sys.exit(bad)
PY
}

set_up
case ${1:-} in
  "") all "every technique, checked against the plain GPT (MB = 1e6 bytes, rank 0)" ;;
  bench) shift; all "ours against torch's own: medians of alternating blocks" "${bench[@]}" "$@" ;;
  test) shift; exec "$PYTHON" -m pytest "$@" ;;
  sweep | soak) task=$1; shift; OMP_NUM_THREADS=1 exec "$PYTHON" "tests/$task.py" "$@" ;;
  -h | --help | help) sed -n '2,9s/^# \{0,1\}//p' run.sh ;;
  *)
    file=${1%.py}; shift
    [[ -f $file.py ]] || { echo "run.sh: error: no file $file.py; one of: $(present | tr '\n' ' ')" >&2; exit 2; }
    if [[ ${1:-} =~ ^[0-9]+$ ]]; then ranks=$1; shift; else ranks=$(default_ranks); fi
    launch "$file" "$ranks" "$@" ;;
esac

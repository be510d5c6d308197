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
cores() { "$PYTHON" -c 'import os; print(len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0)))'; }
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

rows() { # RANKS: every file, as lines "label file ranks flags"
  for file in $(present); do
    if [[ $file != hybrid_3d ]]; then echo "$file $file $1"
    elif (($1 >= 4)); then echo "$file $file $1 --tp 2 --pp 2"
    else echo "$file $file $1 --dp $1 --tp 1 --pp 1"; fi
  done
}

bench_rows() { # what is timed; context_parallel's twin in torch runs on GPUs only
  local long="--impl scratch --seq 4096 --layers 2 --batch 1"
  cat <<EOF
one_process ddp 1 --impl scratch
ddp ddp 2
zero_1 zero 2 --stage 1
zero_2 zero 2 --stage 2
zero_3 zero 2 --stage 3
fsdp fsdp 2
tensor_parallel tensor_parallel 2
tensor_parallel_sp tensor_parallel 2 --sp
gpipe pipeline_parallel 2 --micro 8 --schedule gpipe
1f1b pipeline_parallel 2 --micro 8 --schedule 1f1b
interleaved pipeline_parallel 2 --micro 8 --schedule interleaved
zb-h1 pipeline_parallel 2 --micro 8 --schedule zb-h1
amp_accum_ckpt amp_accum_ckpt 2
hybrid_dp hybrid_3d 2 --dp 2 --tp 1 --pp 1
hybrid_tp_pp hybrid_3d 4 --dp 1 --tp 2 --pp 2
hybrid_dp_pp hybrid_3d 4 --dp 2 --tp 1 --pp 2
one_process_long context_parallel 1 $long
zigzag_long context_parallel 2 --attn zigzag $long
one_process_moe moe 1 --impl scratch
moe_moe moe 2
EOF
}

limits() { # what this machine allows: two processes with nothing to tell each other, and gloo's bandwidth
  local one=("$PYTHON" ddp.py "${bench[@]}" --impl scratch --batch 4) folder
  folder=$(mktemp -d)
  export OMP_NUM_THREADS=1
  "${one[@]}" --json "$folder/apart.json" >/dev/null & "${one[@]}" >/dev/null; wait
  cat >"$folder/gloo.py" <<'PY'
import json, statistics, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x, y, found = torch.ones(2 ** 22), torch.ones(2 ** 21), {}
gather, scatter = (getattr(dist, a, None) or getattr(dist, b) for a, b in (
    ("all_gather_single", "all_gather_into_tensor"), ("reduce_scatter_single", "reduce_scatter_tensor")))
for name, call in dict(all_reduce=lambda: dist.all_reduce(x), all_gather=lambda: gather(x, y),
                       reduce_scatter=lambda: scatter(y, x),
                       all_to_all=lambda: dist.all_to_all_single(x, x.clone())).items():
    times = []
    for _ in range(9):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    found[name] = x.nbytes / statistics.median(times) / 1e9
if dist.get_rank() == 0:
    ms = json.load(open(sys.argv[1]))["ms_per_step"]
    print(f"\nlimits: two processes apart, with half of the batch each, take {ms:.1f} ms;",
          "of 16.8 MB gloo moves, in GB/s,", ", ".join(f"{name} {rate:.2f}" for name, rate in found.items()))
dist.destroy_process_group()
PY
  "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node=2 "$folder/gloo.py" "$folder/apart.json"
  rm -rf "$folder"
}

all() { # TITLE ROWS flags...: every row in turn, then the table
  local title=$1 lines=$2 code failed=() labels=() words
  shift 2
  reports=$(mktemp -d) # not local: the trap needs it
  trap 'rm -rf "$reports"' EXIT
  while read -ra words <&3; do
    labels+=("${words[0]}")
    printf '\n==== %s ====\n' "${words[0]}"
    code=0
    launch "${words[1]}" "${words[2]}" "$@" ${words[3]+"${words[@]:3}"} --json "$reports/${words[0]}.json" || code=$?
    ((code == 0)) || failed+=("${words[0]}")
  done 3<<<"$lines"
  printf '\n==== %s ====\n' "$title"
  "$PYTHON" - "$reports" "${failed[*]:-}" ${labels[@]+"${labels[@]}"} <<'PY'
import json, os, sys
folder, failed, labels = sys.argv[1], sys.argv[2].split(), sys.argv[3:]
bad, timed = not labels, "one_process" in labels
mb = lambda n: f"{n / 1e6:.2f}"
print(f"{'':18}{'ranks':>6}{'worst gap':>11}{'sent MB':>10}{'textbook':>10}{'held MB':>9}{'peak MB':>9}"
      f"{'ms/step':>9}{'tok/s':>9}" + (f"{'vs torch':>10}{'efficiency':>12}" if timed else "") + "  verdict")
ms = {}
for label in labels:
    path = os.path.join(folder, label + ".json")
    if label in failed or not os.path.exists(path):
        bad = True
        print(f"{label:18}{'FAILED' if label in failed else 'NO REPORT':>60}")
        continue
    with open(path) as f:
        r = json.load(f)
    me, check, n = r["ranks"][0], r["check"], r["world_size"]
    sent = sum(c["wire"] for c in me["collectives"].values())
    book = sum(row["expected"] for row in r["textbook"] if row["what"].startswith("wire"))
    held = sum(me["memory"][k] for k in ("parameters", "gradients", "optimizer"))
    ms[label] = r["ms_per_step"]
    one = ms.get("one_process" + (label[label.rindex("_"):] if label.endswith(("_long", "_moe")) else ""))
    worst = check and max(check[kind] for kind in ("loss", "gradient", "grad_norm", "parameter"))
    beside = f"{r['speedup']:9.2f}x" if r.get("speedup") else f"{'-':>10}"
    beside += f"{one / r['ms_per_step'] / n:12.0%}" if timed and n <= 2 else f"{'-':>12}"
    print(f"{label:18}{n:6}" + (f"{worst:11.1e}" if check else f"{'-':>11}") + f"{mb(sent):>10}{mb(book):>10}"
          f"{mb(held):>9}{mb(me['memory']['peak']):>9}{r['ms_per_step']:9.1f}{r['tokens_per_second']:9,.0f}"
          + beside * timed + ("  passed" if check and check["passed"] else "  ran"))
    bad |= bool(check) and not check["passed"]
print("" if labels else "no technique file found: nothing ran")
sys.exit(bad)
PY
}

set_up
case ${1:-} in
  "") n=$(default_ranks); n=$((n > 3 ? 4 : n > 1 ? 2 : 1)) # the toy has 4 heads and 4 layers
    all "every technique, checked against the plain GPT (MB = 1e6 bytes, rank 0)" "$(rows "$n")" ;;
  bench)
    shift
    export THREADS=1
    all "ours against torch's own: medians of alternating blocks" "$(bench_rows)" "${bench[@]}" "$@"
    limits ;;
  test) shift; exec "$PYTHON" -m pytest "$@" ;;
  sweep | soak | plan) task=$1; shift; OMP_NUM_THREADS=1 exec "$PYTHON" "tools/$task.py" "$@" ;;
  -h | --help | help) sed -n '2,9s/^# \{0,1\}//p' run.sh ;;
  *)
    file=${1%.py}; shift
    [[ -f $file.py ]] || { echo "run.sh: error: no file $file.py; one of: $(present | tr '\n' ' ')" >&2; exit 2; }
    if [[ ${1:-} =~ ^[0-9]+$ ]]; then ranks=$1; shift; else ranks=$(default_ranks); fi
    launch "$file" "$ranks" "$@" ;;
esac

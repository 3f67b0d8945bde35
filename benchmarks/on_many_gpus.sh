#!/usr/bin/env bash
# Everything that needs two, four or eight GPUs of a host, in order of worth, within LIMIT seconds (default 500) and one call.
#
#   benchmarks/on_many_gpus.sh [PART...]      parts: build apart together bits; if they are named: checkpoint, profile
#   MODEL=tiny N=4 benchmarks/on_many_gpus.sh     rehearses it on N fake CPU devices
#   EXTRA=FILE      commands of a single GPU each, a line "NAME SECONDS COMMAND": on the last GPU beside the tests of `apart`; what
#                   was not begun then, on all GPUs at the end
#
# build: the CUDA library. apart: tests of one GPU on all GPUs but the last (of two on none), those of two on the last two.
# together: the exchange between all, its times, the whole model (STAGES of bench_mesh.py). bits: all GPUs against one.
# Records are in ${OUT:-bench-out}, logs and the rest in rest.tar.gz there, which is made anew whenever something has ended.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=. OUT=${OUT:-bench-out} NCCL_NVLS_ENABLE=0 JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 PYTHONUNBUFFERED=1
python=${PYTHON:-python3} model=${MODEL:-flash} limit=${LIMIT:-500} until=${LIMIT:-500}
rest=$(mktemp -d)
mkdir -p "$OUT"
if [ "$model" = tiny ]; then
  n=${N:-4} layers=2 drawn=2 steps=${STEPS:-120} every=40 memory=22000
  export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=$n
  alone=(tests/cuda/test_exchange.py tests/cuda/test_append.py) forms=XLA sizes=16,64
else
  gpus=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits) || exit 1
  n=${N:-$(wc -l <<< "$gpus")} layers=4 drawn=6 steps=${STEPS:-500} every=100 memory=$(head -n 1 <<< "$gpus")
  export JAX_PLATFORMS=cuda,cpu
  alone=(tests) forms=ours,XLA sizes=16,64,512,2048
fi
case $n in 2 | 4 | 8) ;; *) echo "$n GPUs, expected 2, 4 or 8" >&2; exit 2 ;; esac
shown='^==|FAILED|ERROR|passed|failed|skipped' # of a log; what ends it is shown, too
touch "$rest/queue"
[ -z "${EXTRA:-}" ] || grep -vE '^[[:space:]]*(#|$)' "$EXTRA" > "$rest/queue"

pack() {  # one at a time, and never half a file
  flock "$rest/lock" bash -c 'tar -czf "$1/packing" -C "$0" --exclude="cache-*" --exclude=lock . && mv "$1/packing" "$1/rest.tar.gz"' \
    "$rest" "$OUT"
}
trap pack EXIT

run() {  # NAME SECONDS COMMAND...: its log, how it ended; not longer than until the part or the whole must have ended
  local name=$1 seconds=$2 start=$SECONDS left=$((until - SECONDS)) state
  shift 2
  [ "$left" -lt "$seconds" ] && seconds=$left
  if [ "$seconds" -lt 10 ]; then echo "== $name: no time left"; return 1; fi
  JAX_COMPILATION_CACHE_DIR=$rest/cache-$name timeout -k 5 "$seconds" "$@" > "$rest/$name.log" 2>&1
  state=$?
  {  # in one piece: others end at the same time
    echo "== $name: ended with $state, $((SECONDS - start)) s of $SECONDS"
    { grep -E "$shown" "$rest/$name.log" | tail -n "${TAIL:-6}"; tail -n 2 "$rest/$name.log"; } | awk '!seen[$0]++' | cut -c-300
  } > "$rest/$name.end"
  cat "$rest/$name.end"
  pack
  return "$state"
}

part() {  # SECONDS FUNCTION: nothing of it runs longer
  until=$((SECONDS + $1 < limit ? SECONDS + $1 : limit))
  "$2"
  until=$limit
}

on() { local CUDA_VISIBLE_DEVICES=$1; shift; export CUDA_VISIBLE_DEVICES; "$@"; }

tests() {  # NAME SECONDS PYTEST-ARGUMENTS...
  local name=$1 seconds=$2
  shift 2
  XLA_PYTHON_CLIENT_PREALLOCATE=false run "$name" "$seconds" \
    "$python" -m pytest -q -p no:cacheprovider -p no:benchmark -m gpu "$@"
}

extras() {  # GPU: lines of EXTRA, one after the other
  local name seconds command
  while [ $((until - SECONDS)) -ge 10 ]; do  # GPUs take them from one queue
    read -r name seconds command < <(flock "$rest/lock" bash -c 'head -n 1 "$0"; sed -i 1d "$0"' "$rest/queue") || return 0
    on "$1" run "$name" "$seconds" bash -c "$command"
  done
}

build() {
  [ "$model" = tiny ] && return
  run build 120 bash -c "cmake -S csrc -B build/gpu -DPYTHON=$python -DDSV4_CUDA_ARCHITECTURES=90 \
    && cmake --build build/gpu -j $(nproc) && cmake --install build/gpu --prefix . --component libraries"
}

apart() {
  local each=$((memory / 11000)) of=() gpu
  for ((gpu = 0; gpu < n - 1 && n > 2; ++gpu)); do  # a process takes up to 11 GB; the last but one has others beside
    for ((i = 0; i < (gpu < n - 2 ? each : each / 2); ++i)); do of+=("$gpu"); done
  done
  if [ "${#of[@]}" -gt 0 ]; then
    # Of several GPUs each process sees one (tests/conftest.py).
    DSV4_TEST_GPUS=$(IFS=,; echo "${of[*]}") TAIL=20 tests alone 600 -n "${#of[@]}" "${alone[@]}" &
  fi
  {
    on $((n - 2)),$((n - 1)) tests two-exchange 150 -p no:xdist -k "not sanitizer" tests/cuda/test_exchange.py
    on $((n - 2)),$((n - 1)) tests two-mesh 150 -p no:xdist tests/model/test_mesh.py
  } &
  on $((n - 2)),$((n - 1)) tests two-context 200 -p no:xdist tests/test_context.py &
  extras $((n - 1)) &
  wait
}

together() {
  export XLA_PYTHON_CLIENT_MEM_FRACTION=0.92
  [ "$n" = 2 ] || tests exchange 45 -p no:xdist -k "not sanitizer" tests/cuda/test_exchange.py
  shown=' us |GB/s' TAIL=30 run exchange-times 45 "$python" benchmarks/bench_exchange.py --model "$model" --parts sizes \
    --sizes $sizes --forms $forms --json "$OUT/exchange.json"
  shown='^==| ms|failed$|Error' TAIL=60 run mesh "$((until - SECONDS))" "$python" benchmarks/bench_mesh.py --model "$model" --devices "$n" \
    --brief --stages "${STAGES:-first,dspark,data,mixed,prefill,more}" --limit "$((until - SECONDS - 20))" --json "$OUT/mesh.json"
  unset XLA_PYTHON_CLIENT_MEM_FRACTION
}

bits() {
  export XLA_PYTHON_CLIENT_PREALLOCATE=false
  local soak=("$python" -m tests.model.soak_mesh --model "$model" --layers "$layers" --steps "$steps" --every "$every")
  local splits=("1 $n" "$n 1") split
  [ "$n" = 2 ] || splits+=("2 $((n / 2))")
  [ "$model" != tiny ] || splits=("2 $((n / 2))")  # fake devices share the cores of one machine
  for split in "${splits[@]}"; do  # two side by side: the whole of it on one GPU takes 20 GB
    read -r data tensor <<< "$split"
    run "soak-$data-$tensor" 120 "${soak[@]}" --data "$data" --tensor "$tensor" --json "$rest/soak-$data-$tensor.json" &
    [ "$tensor" = "$n" ] || wait
  done
  [ "$n" = 2 ] || tests several 100 -p no:xdist -k several tests/model/test_mesh.py tests/test_context.py
  shown='^==|differ|failed$|Error' run equal 90 "$python" benchmarks/bench_mesh.py --model "$model" --devices "$n" --brief --stages equal \
    --json "$OUT/equal.json"
  for ((gpu = 0; gpu < n; ++gpu)); do extras "$gpu" & done
  wait
}

checkpoint() {  # LAYERS of the model, as many as one GPU holds, written to memory, loaded to one and to all; `generate` over them
  XLA_PYTHON_CLIENT_PREALLOCATE=false TAIL=25 shown='GB|equal|WRONG|token' run generate 590 "$python" benchmarks/generate_mesh.py \
    --model "$model" --layers "${LAYERS:-$drawn}" --devices "$n" --folder "${FOLDER:-/dev/shm}" --json "$rest/generate.json"
}

profile() {
  export XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 XLA_PYTHON_CLIENT_PREALLOCATE=true
  TAIL=12 run wo_b 60 "$python" benchmarks/bench_exchange.py --parts wo_b --model "$model" --json "$rest/wo_b.json"
  TAIL=150 run timeline 100 "$python" benchmarks/timeline.py --devices "$n" --model "$model" --layers 12 --json "$rest/timeline.json"
}

for name in ${*:-build apart together bits}; do
  case $name in
    apart) part "${APART:-160}" apart ;;
    together) part "${TOGETHER:-200}" together ;;
    build | bits | checkpoint | profile) part "$limit" "$name" ;;
    *) echo "unknown part $name" >&2; exit 2 ;;
  esac
done

#!/usr/bin/env bash
# Everything that needs two GPUs, in order of worth, within LIMIT seconds (default 420): whole models timed (mesh.json, mesh.log under
# ${OUT:-bench-out}), then side by side what compares with one GPU, then profiles; of these the logs are in rest.tar.gz. MODEL=tiny
# rehearses it all on two fake CPU devices. `benchmarks/on_two_gpus.sh bench check profile` runs only those parts.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=. OUT=${OUT:-bench-out} NCCL_NVLS_ENABLE=0 JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
python=${PYTHON:-python3} model=${MODEL:-flash} limit=${LIMIT:-420}
rest=$(mktemp -d) layers=4 drawn=6
mkdir -p "$OUT"
if [ "$model" = tiny ]; then
  export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2
  steps=${STEPS:-40} every=20 layers=2 drawn=2
else
  export JAX_PLATFORMS=cuda,cpu
  steps=${STEPS:-2000} every=200
fi

run() {  # NAME SECONDS COMMAND...: its own compilation cache, its log, how it ended; not longer than the whole may take
  local name=$1 left=$((limit - SECONDS)) seconds=$2 start=$SECONDS
  shift 2
  [ "$left" -lt "$seconds" ] && seconds=$left
  if [ "$seconds" -lt 10 ]; then echo "== $name: no time left"; return; fi
  JAX_COMPILATION_CACHE_DIR=$(mktemp -d) timeout "$seconds" "$@" > "$rest/$name.log" 2>&1
  echo "== $name: ended with $?, $((SECONDS - start)) s of $SECONDS"
  tail -n "${TAIL:-3}" "$rest/$name.log" | cut -c-400
}

bench() {
  export XLA_PYTHON_CLIENT_MEM_FRACTION=0.92
  TAIL=60 run mesh 275 "$python" benchmarks/bench_mesh.py --model "$model" --json "$OUT/mesh.json" --limit "${BENCH:-235}"
  cp "$rest/mesh.log" "$OUT/mesh.log"
}

check() {
  export XLA_PYTHON_CLIENT_PREALLOCATE=false
  local soak=("$python" -m tests.model.soak_mesh --model "$model" --layers "$layers" --steps "$steps" --every "$every")
  local pytest=("$python" -m pytest -q -p no:cacheprovider -p no:benchmark -p no:xdist -m gpu)
  {
    run soak-tensor 110 "${soak[@]}" --data 1 --tensor 2 --json "$rest/soak-tensor.json"
    run soak-data 110 "${soak[@]}" --data 2 --tensor 1 --json "$rest/soak-data.json"
  } &
  {
    TAIL=25 run generate 160 "$python" benchmarks/generate_mesh.py --model "$model" --layers "$drawn" --json "$rest/generate.json"
    run tests 120 "${pytest[@]}" -k "not sanitizer" tests/model/test_mesh.py tests/cuda/test_exchange.py
  } &
  run context 150 "${pytest[@]}" tests/test_context.py &
  wait
}

profile() {
  export XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 XLA_PYTHON_CLIENT_PREALLOCATE=true
  TAIL=12 run wo_b 60 "$python" benchmarks/bench_exchange.py --parts wo_b --model "$model" --json "$rest/wo_b.json"
  TAIL=150 run timeline 100 "$python" benchmarks/timeline.py --devices 2 --model "$model" --layers 12 --json "$rest/timeline.json"
}

for part in ${*:-bench check profile}; do
  "$part"
  tar -czf "$OUT/rest.tar.gz" -C "$rest" .
done

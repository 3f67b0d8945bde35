#!/usr/bin/env bash
# Everything that needs a GPU, in order of worth: build, check, time. Output under ${OUT:-bench-out}; a stage that fails does not
# stop the next. `benchmarks/on_gpu.sh tests kernels` runs only those stages. The JSON files are records for benchmarks/records/;
# where there is no git history, DSV4_COMMIT says what was measured.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=. OUT=${OUT:-bench-out}
python=${PYTHON:-python3}
mkdir -p "$OUT"
stages=${*:-build tests swap kernels ops steps model triton}

stage() {
  case $1 in
    build)
      { cmake -S csrc -B build/gpu -DPYTHON="$python" -DDSV4_CUDA_ARCHITECTURES=90 && cmake --build build/gpu -j "$(nproc)" \
        && cmake --install build/gpu --prefix . --component libraries; } > "$OUT/build.log" 2>&1 ;;
    tests)  # every kernel against its reference or float64, byte invariance, logits alone and among others; most of it is compiling
      # A process takes up to 11 GB of the device.
      memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1)
      "$python" -c "import xdist" 2> /dev/null && several="-n $((memory / 11000)) -p no:benchmark"
      JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false timeout 400 "$python" -m pytest -p no:cacheprovider ${several:-} \
        -m gpu tests > "$OUT/tests.log" 2>&1 ;;
    swap)  # blocks between HBM and pinned memory, against the copy ceiling and the schemes it replaces
      timeout 240 "$python" benchmarks/bench_swap.py --json "$OUT/swap.json" --plot "$OUT/swap.png" > "$OUT/swap.log" 2>&1 ;;
    kernels)  # every handler in a CUDA graph, checked against the reference before; PEERS: a folder with peers' times of this session
      for op in append compress_csa compress_index compress_hca gather index_scores top_k attend moe route dense_fp8 dense_bf16 \
          hyper_connection queries kv_store; do
        timeout "${KERNEL_SECONDS:-240}" "$python" benchmarks/kernels.py "$op" ${PEERS:+--peers "$PEERS"} --json "$OUT/kernels-$op.json" \
          > "$OUT/kernels-$op.log" 2>&1 || echo "kernels $op: FAILED"
      done ;;
    products)  # e4m3 rows and weights: every shape's bits and times; for memory errors a few of them. Only if it is named
      timeout 400 "$python" benchmarks/products.py --seconds 300 --json "$OUT/products.json" > "$OUT/products.log" 2>&1
      state=$?
      timeout 60 compute-sanitizer --error-exitcode 9 "$python" benchmarks/products.py --work "simulated 1" \
        --shapes 2,6,10,14,17,19,20,22,24,26,28,31 > "$OUT/products-memcheck.log" 2>&1 || echo "products: compute-sanitizer: $?"
      return $state ;;
    ops)  # every op, every implementation, against the ceilings of the run
      for op in append compress_csa compress_index compress_hca gather index_scores top_k attend kv_store; do
        timeout 200 "$python" -m dsv4_jax bench "$op" --json "$OUT/$op.json" --plot "$OUT/$op.png" > "$OUT/$op.log" 2>&1
      done ;;
    steps)  # whole decode steps: Flash and Pro, long context, large batch
      for shape in "flash 64 128K" "pro 64 32K" "flash 1 1M" "flash 256 8K"; do
        read -r model batch context <<< "$shape"
        timeout 150 "$python" -m dsv4_jax bench step --model "$model" --batch "$batch" --context "$context" \
          --json "$OUT/step-$model-$batch-$context.json" > "$OUT/step-$model-$batch-$context.log" 2>&1
      done
      # Eight steps a call, and with the loop itself in the command buffer: what is left of the dispatch of one.
      captured=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE
      timeout 150 "$python" -m dsv4_jax bench step --loop 8 --steps 3 --json "$OUT/loop.json" > "$OUT/loop.log" 2>&1
      timeout 150 "$python" -m dsv4_jax bench step --loop 8 --steps 3 --xla xla_gpu_enable_command_buffer=$captured \
        --json "$OUT/loop-captured.json" > "$OUT/loop-captured.log" 2>&1 ;;
    generate)  # what a step costs beyond the device, and what sampling adds; 12 layers of Flash
      timeout 400 "$python" benchmarks/bench_generate.py --layers 12 --prompts 1 64 --json "$OUT/generate.json" > "$OUT/generate.log" 2>&1 ;;
    serve)  # streams through a server; SERVE_TOKENIZER: a tokenizer.json. Needs the extra serve. Only if it is named
      timeout 400 "$python" benchmarks/bench_serve.py --layers 12 --tokenizer "$SERVE_TOKENIZER" --json "$OUT/serve.json" \
        > "$OUT/serve.log" 2>&1 ;;
    model)  # 12 layers of Flash with weights as released
      timeout 200 "$python" -m dsv4_jax bench model --layers 12 --batch 1,64,256 --json "$OUT/model.json" > "$OUT/model.log" 2>&1 ;;
    exchange)  # between GPUs, of which it needs two: only if it is named
      timeout 120 "$python" benchmarks/bench_exchange.py --json "$OUT/exchange.json" > "$OUT/exchange.log" 2>&1 ;;
    triton)  # needs jax-triton: a wheel in .wheels/ is enough
      "$python" -m pip install --quiet --no-deps --no-index .wheels/jax_triton*.whl
      JAX_PLATFORMS=cuda,cpu timeout 200 "$python" -m pytest -p no:cacheprovider tests/triton > "$OUT/triton.log" 2>&1 ;;
    *) echo "unknown stage $1" >&2; return 2 ;;
  esac
}

for name in $stages; do
  started=$SECONDS
  if stage "$name"; then state=ok; else state=FAILED; fi
  echo "$name: $state, $((SECONDS - started)) s"
  tail -n 3 "$OUT/$name.log" 2>/dev/null
done

#!/usr/bin/env bash
# The wheel as built elsewhere, on a machine with a GPU: used with the machine's own jax, away from this tree; then
# `doctor` and `pytest -m gpu` against what was installed. Output under ${OUT:-bench-out}.
#     pip wheel --no-deps -w dist . -C cmake.define.DSV4_CUDA_ARCHITECTURES=90 && benchmarks/on_gpu_wheel.sh dist/*.whl
set -uo pipefail
wheel=$(realpath "$1")
tree=$(realpath "$(dirname "$0")/..")
out=$(realpath -m "${OUT:-$tree/bench-out}")
mkdir -p "$out"
away=${AWAY:-$(mktemp -d)}
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-index --no-deps --target "$away/installed" "$wheel" || exit 1
export PYTHONPATH="$away/installed"
cp -r "$tree"/{tests,benchmarks,examples,docs,csrc,README.md,pyproject.toml,mkdocs.yml,CHANGELOG.md} "$away" # all but the package
cd "$away" || exit 1
"$python" -c 'import dsv4_jax; print(dsv4_jax.__file__)'
"$python" -m dsv4_jax doctor | tee "$out/wheel-doctor.log" || exit 1
export JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false
"$python" -m pytest -p no:cacheprovider -p no:benchmark -n "${NPROC:-11}" --dist worksteal -m gpu tests -k "not sanitizer" \
  > "$out/wheel-tests.log" 2>&1
state=$?
tail -n 5 "$out/wheel-tests.log"
exit $state

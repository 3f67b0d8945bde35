// What benchmarks/products.py calls: products of e4m3 rows and weights in every shape in which they are compiled, their
// bits against each other's, and their times in CUDA graphs. All calls return a cudaError_t, or a time below zero.
#include <cuda_runtime.h>

#include <cstdio>

#include "dense/e4m3_launch.cuh"
#include "dense/round_rows.cuh"
#include "products_time.cuh"

using namespace dsv4;

// A matrix in several copies, and rows and results for each, so that what a call reads comes from memory.
struct Problem {
  int weight_rows, columns, groups, copies, max_rows;
  uint8_t *weights, *scales;  // one copy after the other; scales are those of all
  __nv_bfloat16* x;           // [max_rows, groups * columns] for each copy
  uint8_t* codes;
  float* row_scales;
  void* out;  // [max_rows, weight_rows] float32 for each copy

  size_t matrix() const { return static_cast<size_t>(weight_rows) * columns; }
  size_t row_columns() const { return static_cast<size_t>(groups) * columns; }
  size_t scale_bytes() const {
    return static_cast<size_t>((weight_rows + kE4m3ScaleRows - 1) / kE4m3ScaleRows) * (columns / kE4m3Columns);
  }
};

namespace {

__device__ uint32_t mixed(uint32_t x) {
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
  return x;
}
// Codes of numbers as those of trained weights: small ones more often than great ones. No NaN.
__global__ void fill_codes(uint32_t* to, size_t words, uint32_t seed) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < words; i += step) {
    uint32_t word = 0;
    for (int b = 0; b < 4; ++b) {
      const uint32_t r = mixed(static_cast<uint32_t>(4 * i + b) * 2654435761u + seed);
      const uint32_t exponent = 14 - min(static_cast<int>(__clz(r >> 1 | 1)), 14);  // each half as often
      word |= ((r & 0x80u) | exponent << 3 | (r >> 8 & 7u)) << 8 * b;
    }
    to[i] = word;
  }
}
__global__ void fill_scales(uint8_t* to, size_t count, uint32_t seed) {
  const size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  if (i < count) to[i] = 107 + mixed(static_cast<uint32_t>(i) + seed) % 8;
}
// Sums of four uniform numbers, of a size that changes from block to block.
__global__ void fill_rows(__nv_bfloat16* to, size_t count, uint32_t seed) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count; i += step) {
    const uint32_t r = mixed(static_cast<uint32_t>(i) * 2246822519u + seed);
    const float sum = static_cast<float>((r & 255) + (r >> 8 & 255) + (r >> 16 & 255) + (r >> 24)) - 510.f;
    to[i] = __float2bfloat16_rn(ldexpf(sum, static_cast<int>(mixed(static_cast<uint32_t>(i >> 7)) & 7) - 12));
  }
}
__global__ void count_differences(const uint32_t* a, const uint32_t* b, size_t words, unsigned long long* count) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  unsigned long long here = 0;
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < words; i += step)
    here += a[i] != b[i];
  if (here > 0) atomicAdd(count, here);
}

cudaError_t round_some(const Problem& p, int copy, int first, int rows, cudaStream_t stream) {
  const size_t at = copy * p.max_rows * p.row_columns();
  const int pitch = (rows + 3) / 4 * 4;
  return round_rows({p.x + at + first * p.row_columns(), p.codes + at,
                     p.row_scales + copy * p.row_columns() / kE4m3Columns * (p.max_rows + 4), rows, pitch,
                     static_cast<int>(p.row_columns())},
                    stream);
}
cudaError_t multiply(const Problem& p, int copy, int rows, int parts, const E4m3Choice& choice, bool float_out,
                     cudaStream_t stream) {
  const size_t at = copy * p.max_rows * p.row_columns();
  const E4m3Args args = {p.row_scales + copy * p.row_columns() / kE4m3Columns * (p.max_rows + 4),
                         p.weights + copy * p.matrix(),
                         p.scales,
                         static_cast<float*>(p.out) + copy * static_cast<size_t>(p.max_rows) * p.weight_rows,
                         rows,
                         (rows + 3) / 4 * 4,
                         p.weight_rows,
                         p.columns,
                         p.groups,
                         float_out};
  return launch_e4m3(args, p.codes + at, parts, choice, stream);
}

}  // namespace

extern "C" {

int products_shapes(int few) { return few ? kE4m3FewShapes : kE4m3FewShapes + kE4m3ManyShapes; }
int products_parts(int weight_rows, int columns) { return e4m3_parts(weight_rows, columns); }
int products_chosen(int weight_rows, int columns, int groups, int rows, int parts) {
  E4m3Args args = {};
  args.rows = rows, args.weight_rows = weight_rows, args.columns = columns, args.groups = groups;
  return choose_e4m3(args, parts);
}
const char* products_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

// Random, with `copies` of all; null if there is no room.
void* products_open(int weight_rows, int columns, int groups, int copies, int max_rows) {
  auto* p = new Problem{weight_rows, columns, groups, copies, max_rows};
  const size_t x = copies * static_cast<size_t>(max_rows) * p->row_columns();
  const size_t pitches = copies * p->row_columns() / kE4m3Columns * (max_rows + 4);
  if (cudaMalloc(&p->weights, copies * p->matrix()) != cudaSuccess ||
      cudaMalloc(&p->scales, p->scale_bytes()) != cudaSuccess || cudaMalloc(&p->x, 2 * x) != cudaSuccess ||
      cudaMalloc(&p->codes, x) != cudaSuccess || cudaMalloc(&p->row_scales, 4 * pitches) != cudaSuccess ||
      cudaMalloc(&p->out, 4 * copies * static_cast<size_t>(max_rows) * weight_rows) != cudaSuccess) {
    std::fprintf(stderr, "no room: %s\n", cudaGetErrorString(cudaGetLastError()));
    return nullptr;
  }
  fill_codes<<<1024, 256>>>(reinterpret_cast<uint32_t*>(p->weights), copies * p->matrix() / 4, 1);
  fill_scales<<<(p->scale_bytes() + 255) / 256, 256>>>(p->scales, p->scale_bytes(), 2);
  fill_rows<<<1024, 256>>>(p->x, x, 3);
  return cudaDeviceSynchronize() == cudaSuccess ? p : nullptr;
}
void products_close(Problem* p) {
  for (void* data : {static_cast<void*>(p->weights), static_cast<void*>(p->scales), static_cast<void*>(p->x),
                     static_cast<void*>(p->codes), static_cast<void*>(p->row_scales), p->out})
    cudaFree(data);
  delete p;
}
// The first copy's operands from the host or to it: 0 weights, 1 scales, 2 x, 3 codes, 4 row scales, 5 out.
int products_move(Problem* p, int which, void* host, size_t bytes, int to_device) {
  void* const data[] = {p->weights, p->scales, p->x, p->codes, p->row_scales, p->out};
  return cudaMemcpy(to_device ? data[which] : host, to_device ? host : data[which], bytes, cudaMemcpyDefault);
}
int products_round(Problem* p, int first, int rows) {
  const cudaError_t error = round_some(*p, 0, first, rows, nullptr);
  return error != cudaSuccess ? error : cudaDeviceSynchronize();
}
// Rounds rows `first` on and multiplies them into a poisoned result, that of the first copy.
int products_multiply(Problem* p, int first, int rows, int parts, int shape, int window, int band, int float_out) {
  const size_t bytes = static_cast<size_t>(rows) * p->weight_rows * (float_out ? 4 : 2);
  cudaError_t error = cudaMemset(p->out, 0xFF, bytes);
  if (error == cudaSuccess) error = round_some(*p, 0, first, rows, nullptr);
  if (error == cudaSuccess) error = multiply(*p, 0, rows, parts, {shape, window, band}, float_out, nullptr);
  return error != cudaSuccess ? error : cudaDeviceSynchronize();
}
// Keeps the first copy's result as the one to compare with, in that of the second copy.
int products_keep(Problem* p, int rows, int float_out) {
  const size_t bytes = static_cast<size_t>(rows) * p->weight_rows * (float_out ? 4 : 2);
  return cudaMemcpy(static_cast<float*>(p->out) + static_cast<size_t>(p->max_rows) * p->weight_rows, p->out, bytes,
                    cudaMemcpyDeviceToDevice);
}
// How many words of the result of rows `first` on differ from the kept ones.
int64_t products_differences(Problem* p, int first, int rows, int float_out) {
  unsigned long long *count, found = 0;
  const size_t row_words = static_cast<size_t>(p->weight_rows) * (float_out ? 4 : 2) / 4;
  const auto* kept = reinterpret_cast<const uint32_t*>(static_cast<float*>(p->out) +
                                                       static_cast<size_t>(p->max_rows) * p->weight_rows);
  if (cudaMalloc(&count, 8) != cudaSuccess || cudaMemset(count, 0, 8) != cudaSuccess) return -1;
  count_differences<<<512, 256>>>(static_cast<const uint32_t*>(p->out), kept + first * row_words, rows * row_words,
                                  count);
  const cudaError_t error = cudaMemcpy(&found, count, 8, cudaMemcpyDefault);
  cudaFree(count);
  return error == cudaSuccess ? static_cast<int64_t>(found) : -1;
}

// Whether kernels start while the one before them ends, as those of a sequence do.
void products_early(int early) { follows = early != 0; }

// us of a call, the median of `replays` graphs of `calls` calls. rounding: 0 the product alone, 1 with rounding before
// it, 2 rounding alone.
float products_time(Problem* p, int rows, int parts, int shape, int window, int band, int rounding, int calls,
                    int replays) {
  const auto round_all = [&](cudaStream_t stream) {
    for (int c = 0; c < p->copies; ++c) round_some(*p, c, 0, rows, stream);
  };
  return time_graphs(calls, replays, round_all, [&](int i, cudaStream_t stream) {
    const int copy = i % p->copies;
    cudaError_t error = rounding > 0 ? round_some(*p, copy, 0, rows, stream) : cudaSuccess;
    if (error == cudaSuccess && rounding < 2)
      error = multiply(*p, copy, rows, parts, {shape, window, band}, false, stream);
    return error;
  });
}
}

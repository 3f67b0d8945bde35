// The products of bf16 rows with packed FP8 weights (csrc/dense/fp8.cu), for benchmarks/products.py to time beside.
#include "../csrc/dense/fp8.cu"
#include "products_time.cuh"

namespace dsv4 {
const Handler* handlers = nullptr;  // of csrc/common/library.cc
}

// us of a call, the median of `replays` graphs; operands are bytes of `pool`, as many copies of the weights as it
// holds. Numbers mean nothing.
extern "C" float products_now_time(uint8_t* pool, size_t bytes, int weight_rows, int columns, int groups, int rows,
                                   int calls, int replays) {
  using namespace dsv4;
  const size_t matrix = static_cast<size_t>(weight_rows) * columns, scales = matrix / 8192 + 256;
  const size_t x = 2 * static_cast<size_t>(rows) * groups * columns, out = 2 * static_cast<size_t>(rows) * weight_rows;
  const auto whole = [](size_t n) { return (n + 1023) / 1024 * 1024; };
  const size_t each = whole(matrix) + whole(x) + whole(out), copies = (bytes - whole(scales)) / each;
  if (copies == 0) return -static_cast<float>(cudaErrorMemoryAllocation);
  return time_graphs(
      calls, replays, [](cudaStream_t) {},
      [&](int i, cudaStream_t stream) {
        uint8_t* at = pool + whole(scales) + i % copies * each;
        const DenseFp8Args args = {reinterpret_cast<const __nv_bfloat16*>(at + whole(matrix)),
                                   at,
                                   pool,
                                   at + whole(matrix) + whole(x),
                                   rows,
                                   weight_rows,
                                   columns,
                                   groups,
                                   false};
        return launch(args, parts_of(weight_rows, columns), stream);
      });
}
// A pool of random bits with no NaN among its bf16 and e4m3 numbers, scales of about 1.
__global__ void products_now_fill(uint32_t* to, size_t words) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < words; i += step) {
    uint32_t r = static_cast<uint32_t>(i) * 2654435761u;
    r ^= r >> 15, r *= 0x846ca68bu, r ^= r >> 16;
    to[i] = (r & 0x87FF87FFu) | 0x38003800u;
  }
}
extern "C" uint8_t* products_now_open(size_t bytes) {
  void* pool = nullptr;
  if (cudaMalloc(&pool, bytes) != cudaSuccess) return nullptr;
  products_now_fill<<<1024, 256>>>(static_cast<uint32_t*>(pool), bytes / 4);
  cudaMemset(pool, 112, 1 << 20);  // scales of 2^-15
  return cudaDeviceSynchronize() == cudaSuccess ? static_cast<uint8_t*>(pool) : nullptr;
}

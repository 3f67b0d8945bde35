// What `swap` is measured against: pinned contiguous copies, a copy per piece, and one launch per layer and leaf.
// Built and called by benchmarks/swap_baselines.py. All calls return a cudaError_t; times are of CUDA events.
//
// The host side of both schemes mirrors the device's: [layers, host units, piece bytes] per leaf in pinned memory.
#include <cuda_runtime.h>

#include <cstdint>

struct Leaf {
  uint8_t* device;  // [layers, device_units, piece_bytes]
  uint8_t* host;    // [layers, host_units, piece_bytes]
  int64_t layers, device_units, host_units, piece_bytes;
};

namespace {

// One warp a block piece, 8 bytes a lane: the access pattern of FastDeploy's swap_cache_per_layer.
__global__ void warp_per_piece(uint8_t* device, uint8_t* host, const int* device_ids, const int* host_ids, int pairs,
                               int64_t piece_bytes, bool out) {
  const int pair = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (pair >= pairs) return;
  uint8_t* a = device + device_ids[pair] * piece_bytes;
  uint8_t* b = host + host_ids[pair] * piece_bytes;
  const auto* from = reinterpret_cast<const uint64_t*>(out ? a : b);
  auto* to = reinterpret_cast<uint64_t*>(out ? b : a);
  for (int64_t i = threadIdx.x % 32; i < piece_bytes / 8; i += 32) to[i] = from[i];
}

cudaError_t copy_run(const Leaf& leaf, int64_t layer, int64_t unit, int64_t record, int64_t count, bool out,
                     cudaStream_t s) {
  uint8_t* a = leaf.device + (layer * leaf.device_units + unit) * leaf.piece_bytes;
  uint8_t* b = leaf.host + (layer * leaf.host_units + record) * leaf.piece_bytes;
  const size_t bytes = static_cast<size_t>(count * leaf.piece_bytes);
  return out ? cudaMemcpyAsync(b, a, bytes, cudaMemcpyDeviceToHost, s)
             : cudaMemcpyAsync(a, b, bytes, cudaMemcpyHostToDevice, s);
}

// Pairs from i on whose ids count up together.
int run_length(const int* device_ids, const int* host_ids, int pairs, int i) {
  int n = 1;
  while (i + n < pairs && device_ids[i + n] == device_ids[i] + n && host_ids[i + n] == host_ids[i] + n) ++n;
  return n;
}

// A cudaMemcpyAsync per run of at most `longest` consecutive ids, layer and leaf.
cudaError_t copies(const Leaf* leaves, int n, const int* device_ids, const int* host_ids, int pairs, int longest,
                   bool out, cudaStream_t s) {
  for (int leaf = 0; leaf < n; ++leaf) {
    for (int64_t layer = 0; layer < leaves[leaf].layers; ++layer) {
      for (int i = 0; i < pairs;) {
        int count = run_length(device_ids, host_ids, pairs, i);
        count = count < longest ? count : longest;
        const cudaError_t error = copy_run(leaves[leaf], layer, device_ids[i], host_ids[i], count, out, s);
        if (error != cudaSuccess) return error;
        i += count;
      }
    }
  }
  return cudaSuccess;
}

cudaError_t launches(const Leaf* leaves, int n, const int* on_device, int pairs, bool out, cudaStream_t s) {
  for (int leaf = 0; leaf < n; ++leaf) {
    const Leaf& x = leaves[leaf];
    for (int64_t layer = 0; layer < x.layers; ++layer) {
      warp_per_piece<<<(pairs + 7) / 8, 256, 0, s>>>(x.device + layer * x.device_units * x.piece_bytes,
                                                     x.host + layer * x.host_units * x.piece_bytes, on_device,
                                                     on_device + pairs, pairs, x.piece_bytes, out);
    }
  }
  return cudaGetLastError();
}

}  // namespace

// Bytes of a `Leaf`, which swap_baselines.py mirrors.
extern "C" int baseline_leaf_size() { return static_cast<int>(sizeof(Leaf)); }

extern "C" int baseline_alloc(void** host, size_t bytes) { return cudaHostAlloc(host, bytes, cudaHostAllocDefault); }
extern "C" int baseline_free(void* host) { return cudaFreeHost(host); }

// Milliseconds a repeat of one contiguous copy between pinned memory and the device.
extern "C" int baseline_ceiling(void* device, void* host, size_t bytes, int out, int repeats, float* ms) {
  Leaf leaf = {static_cast<uint8_t*>(device), static_cast<uint8_t*>(host), 1, 1, 1, static_cast<int64_t>(bytes)};
  cudaEvent_t begin, end;
  cudaError_t error = cudaEventCreate(&begin);
  if (error == cudaSuccess) error = cudaEventCreate(&end);
  if (error == cudaSuccess) error = cudaEventRecord(begin, cudaStreamPerThread);
  for (int i = 0; i < repeats && error == cudaSuccess; ++i)
    error = copy_run(leaf, 0, 0, 0, 1, out, cudaStreamPerThread);
  if (error == cudaSuccess) error = cudaEventRecord(end, cudaStreamPerThread);
  if (error == cudaSuccess) error = cudaEventSynchronize(end);
  if (error == cudaSuccess) error = cudaEventElapsedTime(ms, begin, end);
  *ms /= repeats;
  return error;
}

// scheme 0: a copy per piece. 1: runs of consecutive ids as one copy a layer and leaf if all ids are one run, else a
// launch per layer and leaf. `ids`: device ids, then host ids, in host memory; `on_device` the same in device memory.
// Milliseconds a repeat, enqueueing included.
extern "C" int baseline_swap(const Leaf* leaves, int n, const int* ids, const int* on_device, int pairs, int scheme,
                             int out, int repeats, float* ms) {
  cudaEvent_t begin, end;
  const cudaStream_t s = cudaStreamPerThread;
  const bool consecutive = run_length(ids, ids + pairs, pairs, 0) == pairs;
  cudaError_t error = cudaEventCreate(&begin);
  if (error == cudaSuccess) error = cudaEventCreate(&end);
  if (error == cudaSuccess) error = cudaEventRecord(begin, s);
  for (int i = 0; i < repeats && error == cudaSuccess; ++i) {
    error = scheme == 0   ? copies(leaves, n, ids, ids + pairs, pairs, 1, out, s)
            : consecutive ? copies(leaves, n, ids, ids + pairs, pairs, pairs, out, s)
                          : launches(leaves, n, on_device, pairs, out, s);
  }
  if (error == cudaSuccess) error = cudaEventRecord(end, s);
  if (error == cudaSuccess) error = cudaEventSynchronize(end);
  if (error == cudaSuccess) error = cudaEventElapsedTime(ms, begin, end);
  *ms /= repeats;
  return error;
}

// The attention half of a Flash HCA layer for one token as one persistent launch: how fast it could be. Built and
// called by benchmarks/persistent_layer.py, which says what is simplified.
//
// 132 blocks, one an SM. 128 of them project: each has its share of every matrix, copied through a ring of shared
// memory in the order in which it is multiplied, so that the next matrix arrives while the block waits for what it is
// multiplied with. Four attend, 16 heads each: all 192 keys lie in shared memory as bf16 before the queries come.
//
//   x normalised, of_input, compressor   96 blocks 16 rows of the first; 128 blocks 16 rows x 2048 of the second
//   wq_b                                 256 rows a block
//   attend                               queries' norm and RoPE; scores, softmax, values
//   wo_a                                 64 rows a block, of one group
//   wo_b, streams, mixing products       32 rows a block, which are its channels of the streams
//   x of the next half                   the same channels
//
// What one block makes for others goes through L2, counted there: who needs it waits for so many arrivals.
#include "persistent_layer_attend.cuh"
#include "persistent_layer_project.cuh"

namespace {

template <int kRing>
__global__ void __launch_bounds__(kLaunchThreads, 1) persistent_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  const bool projects = blockIdx.x < kProjectors;
  auto& projector = *reinterpret_cast<Projector<kRing>*>(dynamic);
  auto& attender = *reinterpret_cast<Attender*>(dynamic);
  if (threadIdx.x == 0) {
    (projects ? projector.epoch : attender.epoch) = *const_cast<volatile uint32_t*>(args.counters + kLaunches * kLanes);
    if (projects) {
      for (int i = 0; i < kRing; ++i) {
        barrier_init(shared_address(&projector.full[i]), 1);
        barrier_init(shared_address(&projector.empty[i]), kWorkWarps);
      }
      barrier_init(shared_address(&projector.fn_there), 1);
      barrier_init_fence();
    }
  }
  __syncthreads();
  if (threadIdx.x >= kWork) {
    if (projects && threadIdx.x == kWork) copy_all<kRing>(args, projector);
  } else if (projects) {
    project<kRing>(args, projector);
  } else {
    attend(args, attender);
  }
}

// Rounds of a barrier of all blocks: what one costs. With `bytes` of data from every block to every other before it.
__global__ void __launch_bounds__(kLaunchThreads, 1)
    meeting_kernel(uint32_t* counters, float* data, int rounds, int mode) {
  __shared__ uint32_t before;
  Args args = {};
  args.counters = counters;
  if (threadIdx.x == 0) before = *const_cast<volatile uint32_t*>(counters + kLanes);
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < rounds; ++i) {
    if (mode & 1) {
      float* to = data + i % 2 * kGrid * kLanes;
      if (threadIdx.x < kLanes) to[blockIdx.x * kLanes + threadIdx.x] = sum + threadIdx.x;
    }
    if (threadIdx.x < kWork) {
      workers();
      if (threadIdx.x == 0) arrive(args, 0);
      meet(args, 0, (before + i + 1) * kGrid);
    }
    if (mode & 1 && threadIdx.x < kWork) {
      const float4 x = fresh4(data + i % 2 * kGrid * kLanes + 4 * threadIdx.x);
      sum = (x.x + x.y) + (x.z + x.w);
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) counters[kLanes] = before + rounds;
  if (sum == 12345.f) data[0] = sum;
}

template <typename Kernel, typename... More>
cudaError_t launch(Kernel kernel, size_t shared, cudaStream_t stream, More... args) {
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kGrid), config.blockDim = dim3(kLaunchThreads);
  config.dynamicSmemBytes = shared, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

constexpr int kRing = 6;
constexpr size_t kShared = sizeof(Projector<kRing>) > sizeof(Attender) ? sizeof(Projector<kRing>) : sizeof(Attender);
static_assert(kShared <= kSharedLimit, "more shared memory than a block can have");

}  // namespace

// What persistent_layer.py mirrors: bytes of Args and of a stage, floats of a layer's vectors, counters.
extern "C" void persistent_sizes(int* sizes) {
  sizes[0] = sizeof(Args), sizes[1] = kOneStage, sizes[2] = kVectorFloats, sizes[3] = kCounters, sizes[4] = kRing,
  sizes[5] = 0;
}

// `launches` of `args.layers` layers each.
extern "C" int persistent_run(const Args* given, int launches, cudaStream_t stream) {
  Args args = *given;
  for (int i = 0; i < launches; ++i, args.first += args.layers) {
    const cudaError_t error = launch(persistent_kernel<kRing>, kShared, stream, args);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

extern "C" int persistent_meet(uint32_t* counters, float* data, int rounds, int mode, cudaStream_t stream) {
  return launch(meeting_kernel, 200 * 1024, stream, counters, data, rounds, mode);
}

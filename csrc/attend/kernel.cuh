// Sparse MQA decode over fp8 rows: one softmax over window and selected entries, with a sink (dsv4_jax/ops/attend.py).
//
// A cluster of `splits` blocks serves one token and 64 heads. The keys are cut into tiles of 64 (the window's, then the
// counted entries'), the tiles into up to `splits` splits of (almost) equal length, by their number: the cut depends on
// the token alone, so its bits do not depend on the batch. Within a block four warpgroups work on a split:
//
//   warpgroups 2, 3   gather rows, turn e4m3 codes into bf16 and store them swizzled, up to two tiles ahead
//   warpgroup 0       S = Q K^T (64 heads x 64 keys), online softmax, P; then O[:, 0:256] += P K
//   warpgroup 1       O[:, 256:512] += P K with the same P, through shared memory
//
// K and V are the same rows: one tile in shared memory serves both products. The splits are combined in rank order
// through distributed shared memory, which halves cross (2e-4 of relative error; it moves about 16 bytes a clock), and
// the sink enters there. docs/kernels.md says what bounds it and what was slower.
#pragma once

#include "attend/block.cuh"
#include "attend/combine.cuh"
#include "attend/consumers.cuh"
#include "attend/producers.cuh"
#include "common/overlap.cuh"

namespace dsv4 {

__global__ void __launch_bounds__(kThreads, 1)
    attend_kernel(const __grid_constant__ AttendArgs args, int splits, Cut cut, int head_blocks) {
  let_next_start();
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const int rank = blockIdx.x % splits, unit = blockIdx.x / splits;
  const int head = unit % head_blocks * kHeads, token = unit / head_blocks;
  const int thread = threadIdx.x, group = over<kWarpgroup>(thread), lane = lane_of(thread);
  const int warp = __shfl_sync(kAllLanes, warp_of(thread) & 3, 0);
  const bool producer = group >= 2;
  const int window_tiles = (args.window_keys + kTile - 1) / kTile;
  const auto cut_of = [=](int keys) {  // of a token with `keys` entries; splits beyond its last are empty
    const int tiles = window_tiles + (keys + kTile - 1) / kTile, runs = min(cut.runs(tiles), splits);
    return Split{min(rank, runs) * tiles / runs, min(rank + 1, runs) * tiles / runs};
  };
  const Split full = cut_of(args.entry_keys);  // if all entries count: known before the count is
  const auto run_of = [&](int keys) { return keys == args.entry_keys ? full : cut_of(keys); };
  const auto count = [&] {
    return args.entry_keys == 0 ? 0 : min(max(__ldg(args.entry_count + token), 0), args.entry_keys);
  };

  wait_for_previous();
  // What the first rows wait for comes first: the count, and their ids, where they are if all entries count.
  Producer p{args, token, 0, window_tiles, (group & 1) * 4 + warp, lane};
  int2 key = {0, 0}, next_key = {0, 0};
  if (producer) key = p.load_key(full.first), next_key = p.load_key(full.first + 1), p.count = count();
  if (thread < kHeads) s.sink[thread] = head + thread < args.heads ? __ldg(args.sink + head + thread) : 0.f;
  if (thread == 0) {
    s.rank = rank, s.token = token, s.head = head;
    for (int i = 0; i < kStages; ++i) {
      barrier_init(shared_address(&s.full[i]), kProducerWarps);
      barrier_init(shared_address(&s.empty[i]), kConsumerWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (producer) {
    give_registers<kProducerRegisters>();
    produce(p, s, run_of(p.count), full.first, key, next_key);
    cluster_sync();
    combine_splits(args, s, splits, thread);
    cluster_meet();  // no block leaves while another reads its sums
    return;
  }
  take_registers<kConsumerRegisters>();
  load_queries(args, s, token, head, thread);
  const Split run = run_of(count());
  const int row = accumulator_row(warp, lane);
  Sums o = {};
  if (group == 0) {
    Softmax softmax;
    weigh_and_sum(args, s, softmax, o, run, row, lane);
  } else {
    sum_only(s, o, run, row, lane);
  }
  // Both warpgroups are past the last product with the queries: their place takes the sums.
  store_sums(s, o, group, thread);
  cluster_sync();
  combine_splits(args, s, splits, thread);
  cluster_meet();  // no block leaves while another reads its sums
}

}  // namespace dsv4

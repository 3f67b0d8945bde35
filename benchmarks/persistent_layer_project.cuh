// What a projecting block does in a layer (persistent_layer.cu).
#pragma once

#include "persistent_layer_products.cuh"

namespace {

template <int kRing>
__device__ void project(const Args& args, Projector<kRing>& s) {
  const int block = blockIdx.x, thread = threadIdx.x, warp = warp_of(thread), lane = lane_of(thread);
  const uint32_t epoch = s.epoch;
  Turn<kRing> turn;
  // Calls `multiply` with the address of each of `count` stages.
  const auto stages = [&](int count, const auto& multiply) {
    for (int i = 0; i < count; ++i) {
      await(shared_address(&s.full[turn.index]), turn.phase);
      const uint32_t empty = shared_address(&s.empty[turn.index]);
      multiply(i, shared_address(s.stages[turn.index]), s.stages[turn.index] + kCodesBytes, [&] {
        __syncwarp();
        if (lane == 0) barrier_arrive(empty);
      });
      turn.next();
    }
  };
  // A matrix: its first stage is decoded before x is there; the warp's part of K begins with column `column` of x.
  const auto prepare = [&] {
    Fragments f;
    stages(1, [&](int, uint32_t stage, const uint8_t* scales, const auto& release) {
      uint4 words[kParts];
      load_codes(words, stage + warp * kWarpBytes, lane);
      const uint32_t scale = scales[warp];
      release();
      f = decoded(words, scale);
    });
    return f;
  };
  const auto product = [&](float(&d)[kCell], const Fragments& first, int column) {
    const uint32_t x = shared_address(s.x) + 2 * column;
    multiply(d, first, x, lane);
    stages(kMatrixStages - 1, [&](int i, uint32_t stage, const uint8_t* scales, const auto& release) {
      uint4 words[kParts];
      load_codes(words, stage + warp * kWarpBytes, lane);
      multiply_codes(d, words, x + (i + 1) * 256, scales[warp], lane, release);
    });
  };
  for (int l = 0; l < args.layers; ++l) {
    const int layer = args.first + l;
    const uint32_t round = epoch + l + 1;
    const float* vectors = args.vectors + static_cast<size_t>(layer) * kVectorFloats;

    // x: eight columns a thread.
    const float4 norm0 = early4(vectors + kNormX + 8 * thread);
    const float4 norm1 = early4(vectors + kNormX + 8 * thread + 4);
    const float2 norm_q = early2(vectors + kNormQ + 2 * thread);
    const float base = early(vectors + kBase + quad_lane(lane)), scale = early(vectors + kScale);
    mark(args, layer, 0);
    if (l > 0) meet(args, kMixedThere, (round - 1) * kProjectors);
    mark(args, layer, 1);
    {
      const float4 a = fresh4(args.mixed + 8 * thread), b = fresh4(args.mixed + 8 * thread + 4);
      const float4 part = fresh4(args.squares + 4 * lane);
      const float sum = lanes_sum<kLanes>((part.x + part.y) + (part.z + part.w));
      const float f = rsqrtf(sum * (1.f / kHidden) + kEps);
      put_x(s.x, 8 * thread,
            {bf16_pair(a.x * f * norm0.x, a.y * f * norm0.y), bf16_pair(a.z * f * norm0.z, a.w * f * norm0.w),
             bf16_pair(b.x * f * norm1.x, b.y * f * norm1.y), bf16_pair(b.z * f * norm1.z, b.w * f * norm1.w)});
    }
    workers();
    if (block < kInputBlocks) {
      float d[kCell] = {};
      const uint32_t x = shared_address(s.x) + warp * 1024;
      stages(kInputStages, [&](int i, uint32_t stage, const uint8_t* scales, const auto& release) {
        if (warp >= 8) return release();
        const uint32_t codes = stage + 2 * warp * kWarpBytes;
        uint4 words[kParts], later[kParts];
        load_codes(words, codes, lane);
        load_codes(later, codes + kWarpBytes, lane);
        const uint32_t scale = scales[2 * warp + 1];
        multiply_codes(d, words, x + i * 512, scales[2 * warp], lane, release);
        multiply_codes(d, later, x + i * 512 + 256, scale, lane, [] {});
      });
      if (warp < 8) {
        put_sums(s.sums[warp], d, lane);
        named_sync(2, 8 * kLanes);
        if (warp == 0) {
          if (lane < kRows16) args.of_x[block * kRows16 + lane] = add_parts<8, 1>(s.sums, 0, lane);
          __syncwarp();
          if (lane == 0) arrive(args, kOfXThere);
        }
      }
    }
    mark(args, layer, 2);
    {
      float d[kCell] = {};
      stages(kPooledStages, [&](int i, uint32_t stage, const uint8_t*, const auto& release) {
        if (warp < 8) return release();
        const int column = block % 2 * 2048 + (warp - 8) * 256 + i * 128;
        multiply_bf16(d, stage + (warp - 8) * 2 * kWarpBytes, shared_address(s.x) + 2 * column, lane, release);
      });
      if (warp >= 8) {
        put_sums(s.sums[warp], d, lane);
        named_sync(3, 8 * kLanes);
        if (warp == 8) {
          if (lane < kRows16)
            args.pooled[block % 2 * 2 * kDim + block / 2 * kRows16 + lane] = add_parts<8, 1>(s.sums, 8, lane);
          __syncwarp();
          if (lane == 0) arrive(args, kPooledThere);
        }
      }
    }

    // Queries: 256 of their rows.
    Fragments first = prepare();
    meet(args, kOfXThere, round * kInputBlocks);
    mark(args, layer, 3);
    {
      const float x = fresh(args.of_x + 2 * thread), y = fresh(args.of_x + 2 * thread + 1);
      const float sum = lanes_sum<kLanes>(x * x + y * y);
      if (lane == 0) s.reduced[warp] = sum;
      workers();
      const float f = rsqrtf(lanes_sum<kWorkWarps>(s.reduced[lane % kWorkWarps]) * (1.f / kLatent) + kEps);
      const int word = thread % 16;
      store_shared(shared_address(s.x) + thread / 16 * 64 + word % 4 * 16 + word / 4 * 4,
                   bf16_pair(x * f * norm_q.x, y * f * norm_q.y));
    }
    workers();
    mark(args, layer, 4);
    {
      float d[kCell] = {};
      product(d, first, 0);
      if (quad_lane(lane) == 0) {
        float* to = args.q + block * 256 + warp * kRows16 + quad_of(lane);
        to[0] = d[0], to[kLowerRow] = d[2];
      }
    }
    workers();
    if (thread == 0) arrive(args, kQThere + block / 32);
    mark(args, layer, 5);

    // wo_a, of eight heads.
    first = prepare();
    float old = 0;
    if (warp < kStreams) old = fresh(args.streams + warp * kHidden + block * kChannels + lane);
    meet(args, kOutThere + block / 32, round);
    mark(args, layer, 6);
    put_x(s.x, 8 * thread, fresh_words(args.out + block / 16 * kHidden + 8 * thread));
    if (warp < kStreams) s.old_streams[warp][lane] = old;
    workers();
    {
      float d[kCell] = {};
      product(d, first, warp / 4 * 1024);
      put_sums(s.sums[warp], d, lane);
    }
    workers();
    if (warp == 0) {
      const int row = 2 * lane;
      const float x = add_parts<4, 4>(s.sums, row / kRows16, row % kRows16);
      const float y = add_parts<4, 4>(s.sums, row / kRows16, row % kRows16 + 1);
      reinterpret_cast<uint32_t*>(args.latent)[block * 32 + lane] = bf16_pair(x, y);
      __syncwarp();
      if (lane == 0) arrive(args, kLatentThere);
    }
    mark(args, layer, 7);

    // wo_b, and into the streams.
    first = prepare();
    meet(args, kLatentThere, round * kProjectors);
    mark(args, layer, 8);
    float post = 0, comb[kStreams] = {};
    {
      const uint4 low = fresh_words(args.latent + 8 * thread), high = fresh_words(args.latent + kHidden + 8 * thread);
      if (warp < kStreams) {
        post = fresh(args.mixing + warp);
#pragma unroll
        for (int j = 0; j < kStreams; ++j) comb[j] = fresh(args.mixing + kStreams + j * kStreams + warp);
      }
      put_x(s.x, 8 * thread, low);
      put_x(s.x, kHidden + 8 * thread, high);
    }
    workers();
    {
      float d[kCell] = {};
      product(d, first, warp / 2 * 1024);
      put_sums(s.sums[warp], d, lane);
    }
    workers();
    mark(args, layer, 9);
    if (warp < kStreams) {
      float sum = post * add_parts<8, 2>(s.sums, lane / kRows16, lane % kRows16);
#pragma unroll
      for (int j = 0; j < kStreams; ++j) sum += comb[j] * s.old_streams[j][lane];
      s.new_streams[warp][lane] = sum;
      args.streams[warp * kHidden + block * kChannels + lane] = sum;
    }
    await(shared_address(&s.fn_there), l & 1);
    workers();
    for (int row = warp; row < kSumRows; row += kWorkWarps) {
      float sum = 0;
#pragma unroll
      for (int k = 0; k < kStreams; ++k) {
        const float x = s.new_streams[k][lane];
        sum += x * (row < kFnRows ? s.fn[(row * kStreams + k) * kChannels + lane] : x);
      }
      sum = lanes_sum<kLanes>(sum);
      if (lane == 0) args.sums[row * kProjectors + block] = sum;
    }
    workers();
    if (thread == 0) arrive(args, kSumsThere);
    mark(args, layer, 10);

    // x of the next half.
    meet(args, kSumsThere, round * kProjectors);
    if (l == 0 && block == 0 && thread == 0) args.counters[kLaunches * kLanes] = epoch + args.layers;
    mark(args, layer, 11);
    if (warp <= kStreams) {
      const float4 part = fresh4(args.sums + (warp < kStreams ? warp : kFnRows) * kProjectors + 4 * lane);
      const float sum = lanes_sum<kLanes>((part.x + part.y) + (part.z + part.w));
      if (lane == 0) s.reduced[warp] = sum;
    }
    workers();
    if (warp == 0) {
      const float f = rsqrtf(s.reduced[kStreams] * (1.f / (kStreams * kHidden)) + kEps);
      const float own = sigmoid(s.reduced[quad_lane(lane)] * f * scale + base) + kMixEps;
      float x = 0;
#pragma unroll
      for (int k = 0; k < kStreams; ++k) x += __shfl_sync(kAllLanes, own, k) * s.new_streams[k][lane];
      args.mixed[block * kChannels + lane] = x;
      const float sum = lanes_sum<kLanes>(x * x);
      if (lane == 0) args.squares[block] = sum;
      __syncwarp();
      if (lane == 0) arrive(args, kMixedThere);
    }
    mark(args, layer, 12);
  }
}

}  // namespace

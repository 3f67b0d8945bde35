// The widths of DeepSeek-V4: of a KV row, an index key and the compressors' state. Formats: dsv4_jax/formats/.
#pragma once

namespace dsv4 {

// A KV row: NoPE dims as e4m3 in groups that share a ue8m0 scale, RoPE dims as bf16.
constexpr int kNope = 448;
constexpr int kRope = 64;
constexpr int kDim = kNope + kRope;
constexpr int kRopePairs = kRope / 2;
constexpr int kScaleGroup = 64;                   // NoPE dims of a scale
constexpr int kScales = kNope / kScaleGroup + 1;  // bytes: the last one is zero

// An index key: e2m1 in groups that share a ue8m0 scale, or e4m3 with one float32 scale. Its last kRope dims rotate.
constexpr int kIndexDim = 128;
constexpr int kIndexHeads = 64;  // of a token, at most
constexpr int kFp4Group = 32;    // dims of a scale
constexpr int kFp4Bytes = kIndexDim / 2;
constexpr int kFp4Scales = kIndexDim / kFp4Group;

// A CSA entry is pooled from two groups of kCsaRatio tokens; a row of its state is [kv | score] of both halves.
constexpr int kCsaRatio = 4;
constexpr int kCsaHalves = 2;
constexpr int kCsaParts = 2 * kCsaHalves;         // of E channels, in a row of state
constexpr int kCsaRows = kCsaHalves * kCsaRatio;  // tokens of an entry
constexpr int kCsaBehind = kCsaRows - 1;          // of them before the last
// A row of HCA's state is [max | sum | acc].
constexpr int kHcaParts = 3;

}  // namespace dsv4

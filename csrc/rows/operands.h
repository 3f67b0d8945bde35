// Operands that handlers of rows have in common.
#pragma once

#include "common/operands.h"
#include "rows/emit.cuh"

namespace dsv4 {

// What the epilogue of rows of `channels` needs beside them.
inline void read_epilogue(Operands& operands, EpilogueArgs& args, int channels, int64_t tokens) {
  args.norm = operands.next<float>(xla::ffi::F32, channels);
  args.cosine = operands.next<float>(xla::ffi::F32, kRopePairs, tokens);
  args.sine = operands.next<float>(xla::ffi::F32, kRopePairs, tokens);
}

// The parts of a pool of rows of this format, of equally many rows.
inline RowPool read_pool(Operands& operands, int format) {
  namespace ffi = xla::ffi;
  RowPool pool = {};
  pool.format = format;
  if (format == static_cast<int>(Format::kFp8)) {
    pool.codes = operands.next<uint8_t>(ffi::U8, kNope);
    pool.rows = operands.rows();
    pool.rope = operands.next<uint16_t>(ffi::U16, kRope, pool.rows);
    pool.scale = operands.next(ffi::U8, kScales, pool.rows);
  } else if (format == static_cast<int>(Format::kIndexFp4)) {
    pool.codes = operands.next<uint8_t>(ffi::U8, kFp4Bytes);
    pool.rows = operands.rows();
    pool.scale = operands.next(ffi::U8, kFp4Scales, pool.rows);
  } else {
    pool.codes = operands.next<uint8_t>(ffi::U8, kIndexDim);
    pool.rows = operands.rows();
    pool.scale = operands.next(ffi::F32, 1, pool.rows);
  }
  return pool;
}

}  // namespace dsv4

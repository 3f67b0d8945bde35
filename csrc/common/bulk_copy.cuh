// Hopper's copy engine: runs of bytes, and boxes of a matrix, from global to shared memory, counted by an mbarrier.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/l2_policy.cuh"

namespace dsv4 {

__device__ __forceinline__ void copy_bulk(uint32_t to, const uint8_t* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void copy_bulk(uint32_t to, const uint8_t* from, uint32_t bytes, uint32_t barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

// Boxes of 64 columns (of bf16) of a matrix, as many and of as many rows as the map says, swizzled as the matrix units
// want blocks (common/hopper.cuh). The map's axes are a box's columns, rows, boxes. Rows that are not there are zeros.
__device__ __forceinline__ void copy_boxes(uint32_t to, const CUtensorMap& map, int row, int box, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(to),
      "l"(&map), "r"(0), "r"(row), "r"(box), "r"(barrier)
      : "memory");
}
// A box of 64 columns from shared memory, as above, to a matrix; what it has not is left out.
__device__ __forceinline__ void store_box(const CUtensorMap& map, uint32_t from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
               "r"(column), "r"(row), "r"(from)
               : "memory");
}
__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until what the thread committed has been read.
__device__ __forceinline__ void store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// The same way in, of a matrix or of one of several.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, int column, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, int column, int row, int matrix,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(matrix), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void fetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

}  // namespace dsv4

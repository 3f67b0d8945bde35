// Pool rows of logical entries as an XLA FFI handler: one launch, only enqueues. Wrapper and arguments:
// dsv4_jax/cuda/entry_rows.py.
#include <cuda_runtime.h>

#include "common/handler.h"
#include "common/overlap.cuh"

namespace dsv4 {

constexpr int kEntryThreads = 128;

struct EntryRowsArgs {
  const int32_t* entries;  // [T, K], from 0 on
  const int32_t* slots;    // [T]
  const int32_t* table;    // [slots, columns], the blocks of each
  int32_t* rows;           // [T, K]
  int keys, slot_count, columns, base, per_block, blocks;
};

__global__ void __launch_bounds__(kEntryThreads) entry_rows_kernel(const __grid_constant__ EntryRowsArgs args) {
  let_next_start();
  wait_for_previous();
  const int key = blockIdx.y * kEntryThreads + threadIdx.x;
  if (key >= args.keys) return;
  const int64_t token = blockIdx.x;
  const int entry = max(args.entries[token * args.keys + key], 0), column = entry / args.per_block;
  const int64_t slot = min(max(args.slots[token], 0), args.slot_count - 1);
  const int block = args.table[slot * args.columns + min(column, args.columns - 1)];
  args.rows[token * args.keys + key] =
      args.base + min(max(block, 0), args.blocks - 1) * args.per_block + entry % args.per_block;
}

namespace {

namespace ffi = xla::ffi;

using Ids = ffi::Buffer<ffi::S32, 2>;
using Slots = ffi::Buffer<ffi::S32, 1>;

constexpr int64_t kMaxKeys = 65535 * kEntryThreads;

ffi::Error entry_rows(cudaStream_t stream, Ids entries, Slots slots, Ids table, ffi::Result<Ids> rows, int32_t base,
                      int32_t per_block, int32_t blocks) {
  const int64_t tokens = entries.dimensions()[0], keys = entries.dimensions()[1], count = table.dimensions()[0],
                columns = table.dimensions()[1];
  if (const ffi::Error error = check(
          "entry_rows", {{"slots", slots, {tokens}, kElements}, {"rows", *rows, {tokens, keys}, kElements}},
          {{base >= 0 && per_block > 0 && blocks > 0 && base + int64_t{blocks} * per_block <= INT32_MAX,
            "rows of the blocks must be int32"},
           {count > 0 && columns > 0 && count <= INT32_MAX && columns <= INT32_MAX, "the table must not be empty"},
           {tokens <= INT32_MAX && keys <= kMaxKeys, "at most 8388480 entries of a token"}});
      error.failure())
    return error;
  if (tokens == 0 || keys == 0) return ffi::Error::Success();
  const EntryRowsArgs args = {entries.typed_data(),
                              slots.typed_data(),
                              table.typed_data(),
                              rows->typed_data(),
                              static_cast<int>(keys),
                              static_cast<int>(count),
                              static_cast<int>(columns),
                              base,
                              per_block,
                              blocks};
  return launched("entry_rows", start_rows(entry_rows_kernel, tokens, keys, kEntryThreads, 1, stream, args));
}

}  // namespace

DSV4_HANDLER(entry_rows, dsv4_entry_rows, entry_rows,
             on_stream()
                 .Arg<Ids>()
                 .Arg<Slots>()
                 .Arg<Ids>()
                 .Ret<Ids>()
                 .Attr<int32_t>("base")
                 .Attr<int32_t>("per_block")
                 .Attr<int32_t>("blocks"));

}  // namespace dsv4

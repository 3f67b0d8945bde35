// Hyper-connections as XLA FFI handlers and as plain C calls: one makes what the next block reads, the other how its
// output goes into the streams, which may be made beside that block. One launch each, only enqueued: fit for a command
// buffer. Wrapper and argument meaning: dsv4_jax/cuda/hyper_connection.py.
#include <cuda_runtime.h>

#include <string>

#include "common/built_for.h"
#include "common/operands.h"
#include "residual/hyper_connection_kernel.cuh"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

// Widths of V4-Flash and V4-Pro.
constexpr int kFlashWidth = 4096, kProWidth = 7168;
constexpr int warps_of(int width) { return width / (dsv4::kHyperParts * dsv4::kHyperSpan); }

template <int kWarps>
cudaError_t launch_with(const dsv4::HyperArgs& args, cudaStream_t stream) {
  const auto kernel = dsv4::hyper_connection_kernel<kWarps>;
  constexpr int kShared = kWarps * dsv4::kHyperWarpBytes;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  const dim3 grid(dsv4::kHyperParts, (args.tokens + dsv4::kHyperTokens - 1) / dsv4::kHyperTokens);
  return dsv4::start(kernel, {grid, (kWarps + 1) * dsv4::kLanes, kShared, dsv4::kHyperParts}, dsv4::follows, stream,
                     args, dsv4::follows);
}

cudaError_t launch(const dsv4::HyperArgs& args, cudaStream_t stream) {
  if (args.tokens == 0) return cudaSuccess;
  if (args.width == kFlashWidth) return launch_with<warps_of(kFlashWidth)>(args, stream);
  if (args.width == kProWidth) return launch_with<warps_of(kProWidth)>(args, stream);
  return cudaErrorInvalidValue;
}

// Reads the results that follow each other as `Operands` reads operands.
class Results {
 public:
  explicit Results(ffi::RemainingRets results) : results_(results) {}
  float* next(int64_t rows, int64_t width) { return static_cast<float*>(any(ffi::F32, rows, width, rows)); }
  // The next result, of `least` to `most` rows.
  void* any(ffi::DataType type, int64_t least, int64_t width, int64_t most) {
    auto buffer = results_.get<ffi::AnyBuffer>(index_++);
    if (!buffer.has_value()) return fail();
    const auto sizes = (*buffer)->dimensions();
    if ((*buffer)->element_type() != type || sizes.size() != 2 || sizes[0] < least || sizes[0] > most ||
        sizes[1] != width)
      return fail();
    rows_ = sizes[0];
    return (*buffer)->untyped_data();
  }
  int64_t rows() const { return rows_; }  // of the result taken last
  bool good() const { return good_ && index_ == results_.size(); }

 private:
  void* fail() {
    good_ = false;
    return nullptr;
  }
  ffi::RemainingRets results_;
  size_t index_ = 0;
  int64_t rows_ = 0;
  bool good_ = true;
};

// Operands: streams, fn, the vector of norm, base and scale; post, comb and `outputs` outputs if there are any.
// Results: x; but of the head, what the other handler takes, and streams if there are outputs.
ffi::Error hyper_connection(cudaStream_t stream, ffi::RemainingArgs arguments, ffi::RemainingRets returned,
                            int32_t outputs, float hc_eps, float eps, bool head, bool bf16) {
  dsv4::Operands operands(arguments);
  dsv4::HyperArgs args = {};
  args.streams = operands.next<float>(ffi::F32);
  const int64_t tokens = operands.rows(), all = operands.width(), width = all / dsv4::kStreams;
  const int64_t rows = head ? dsv4::kStreams : dsv4::kHyperRows, entries = dsv4::kStreams * dsv4::kStreams;
  args.fn = operands.next<float>(ffi::F32, all, rows);
  args.norm = operands.next<float>(ffi::F32);
  if (operands.width() < width + rows + (head ? 1 : 3)) operands.refuse("the vector is too short");
  args.base = args.norm + width;
  args.scale = args.base + rows;
  if (outputs < 0 || outputs > dsv4::kHyperOutputs) operands.refuse("there must be no, one or two outputs");
  if (width * dsv4::kStreams != all || (width != kFlashWidth && width != kProWidth))
    operands.refuse("streams must be four of 4096 or 7168 channels");
  if (tokens > dsv4::kHyperMostTokens) operands.refuse("more than 131072 tokens");
  if (outputs > 0) {
    args.old_post = operands.next<float>(ffi::F32, dsv4::kStreams, tokens);
    args.old_comb = operands.next<float>(ffi::F32, entries, tokens);
    for (int i = 0; i < outputs && i < dsv4::kHyperOutputs; ++i)
      args.outputs[i] = operands.next<float>(ffi::F32, width, tokens);
  }
  if (!operands.good()) return ffi::Error::InvalidArgument("hyper_connection: " + operands.problem());
  Results results(returned);
  const int64_t filled = (tokens + dsv4::kHyperTokens - 1) / dsv4::kHyperTokens * dsv4::kHyperTokens;
  args.x = results.any(bf16 ? ffi::BF16 : ffi::F32, tokens, width, filled);
  args.x_rows = static_cast<int>(results.rows());
  if (!head) {
    args.back = results.next(tokens, dsv4::kHyperBack);
    if (outputs > 0) args.new_streams = results.next(tokens, all);
  }
  if (!results.good()) return ffi::Error::InvalidArgument("hyper_connection: the results have other types or shapes");
  args.tokens = static_cast<int>(tokens);
  args.width = static_cast<int>(width);
  args.rows = static_cast<int>(rows);
  args.hc_eps = hc_eps;
  args.eps = eps;
  args.bf16_out = bf16;
  const cudaError_t error = launch(args, stream);
  if (error != cudaSuccess) return ffi::Error::Internal(std::string("hyper_connection: ") + cudaGetErrorString(error));
  return ffi::Error::Success();
}

cudaError_t launch_mixing(const dsv4::HyperMixingArgs& args, cudaStream_t stream) {
  if (args.tokens == 0) return cudaSuccess;
  const int blocks = (args.tokens + dsv4::kMixingTokens - 1) / dsv4::kMixingTokens;
  return dsv4::start(dsv4::hyper_mixing_kernel, {dim3(blocks), dsv4::kMixingThreads}, false, stream, args);
}

using Matrix = ffi::Buffer<ffi::F32, 2>;

ffi::Error hyper_mixing(cudaStream_t stream, Matrix back, ffi::Result<Matrix> post, ffi::Result<Matrix> comb,
                        int32_t iterations, float eps) {
  const int64_t tokens = back.dimensions()[0];
  const auto is = [&](const auto& of, int64_t width) {
    return of.dimensions()[0] == tokens && of.dimensions()[1] == width;
  };
  if (!is(back, dsv4::kHyperBack) || !is(*post, dsv4::kStreams) || !is(*comb, dsv4::kStreams * dsv4::kStreams) ||
      tokens > dsv4::kHyperMostTokens) {
    return ffi::Error::InvalidArgument("hyper_mixing: of up to 131072 tokens 20 numbers; shapes must agree");
  }
  const dsv4::HyperMixingArgs args = {back.typed_data(),        post->typed_data(), comb->typed_data(),
                                      static_cast<int>(tokens), iterations,         eps};
  const cudaError_t error = launch_mixing(args, stream);
  if (error != cudaSuccess) return ffi::Error::Internal(std::string("hyper_mixing: ") + cudaGetErrorString(error));
  return ffi::Error::Success();
}

}  // namespace

DSV4_BUILT_FOR(hyper_connection);
DSV4_ARGS_SIZE(hyper_connection, dsv4::HyperArgs)
DSV4_ARGS_SIZE(hyper_mixing, dsv4::HyperMixingArgs)

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4HyperConnection, hyper_connection,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int32_t>("outputs")
                                  .Attr<float>("hc_eps")
                                  .Attr<float>("eps")
                                  .Attr<bool>("head")
                                  .Attr<bool>("bf16"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4HyperMixing, hyper_mixing,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Matrix>()
                                  .Ret<Matrix>()
                                  .Ret<Matrix>()
                                  .Attr<int32_t>("iterations")
                                  .Attr<float>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});

// The launches alone, for timing without XLA. Return a cudaError_t.
extern "C" int dsv4_hyper_connection_launch(const dsv4::HyperArgs* args, cudaStream_t stream) {
  return static_cast<int>(launch(*args, stream));
}
extern "C" int dsv4_hyper_mixing_launch(const dsv4::HyperMixingArgs* args, cudaStream_t stream) {
  return static_cast<int>(launch_mixing(*args, stream));
}

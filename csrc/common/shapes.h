// Kernels that are compiled in several shapes, of which a launch takes one by its number.
#pragma once

#include <cuda_runtime.h>

#include <tuple>

namespace dsv4 {

// `launch` of the shape of this number, from 1 on, of a tuple of them; an error if there is none.
template <typename Shapes, int kShape = 1, typename Launch>
cudaError_t with_shape(int shape, const Launch& launch) {
  if constexpr (kShape <= static_cast<int>(std::tuple_size_v<Shapes>)) {
    if (shape == kShape) return launch(std::tuple_element_t<kShape - 1, Shapes>{});
    return with_shape<Shapes, kShape + 1>(shape, launch);
  }
  return cudaErrorInvalidValue;
}

}  // namespace dsv4

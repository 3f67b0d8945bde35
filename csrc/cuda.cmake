# The CUDA library, for every capability asked for that nvcc knows. Part of CMakeLists.txt.
include(CheckLanguage)
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(DSV4_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin PATHS /usr/local/cuda/bin)
  if(DSV4_NVCC)
    set(CMAKE_CUDA_COMPILER ${DSV4_NVCC})
  endif()
endif()
if(NOT CMAKE_CUDA_COMPILER)
  check_language(CUDA)
endif()
if(NOT CMAKE_CUDA_COMPILER)
  if(DSV4_CUDA STREQUAL "AUTO")
    message(STATUS "nvcc not found: the CUDA kernels are not built")
    return()
  endif()
  message(FATAL_ERROR "nvcc not found: set CUDACXX, CUDA_HOME or -DCMAKE_CUDA_COMPILER=")
endif()

set(DSV4_CUDA_ARCHITECTURES 80 90 100 120 CACHE STRING "Compute capabilities to build the CUDA kernels for")
dsv4_supported_architectures(${CMAKE_CUDA_COMPILER} supported)
dsv4_architectures("${DSV4_CUDA_ARCHITECTURES}" "${supported}" archs)
set(CMAKE_CUDA_ARCHITECTURES ${archs_PORTABLE})
enable_language(CUDA)
option(DSV4_PTXAS_REPORT "Keep the assembler's report beside every object" OFF)
if(DSV4_PTXAS_REPORT)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CURRENT_SOURCE_DIR}/with_report.sh)
  add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)
endif()

# One fat library; each group of sources for every capability it can run on.
add_library(dsv4_cuda SHARED)
function(add_kernels group)
  if(NOT archs_${group})
    message(STATUS "not built for lack of a capability that can run it: ${ARGN}")
    return()
  endif()
  message(STATUS "for ${archs_${group}}: ${ARGN}")
  add_library(dsv4_${group} OBJECT ${ARGN})
  target_include_directories(dsv4_${group} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  target_include_directories(dsv4_${group} SYSTEM PRIVATE ${jaxlib}/include)
  set_target_properties(
    dsv4_${group} PROPERTIES CUDA_ARCHITECTURES "${archs_${group}}" POSITION_INDEPENDENT_CODE ON
                             CUDA_RUNTIME_LIBRARY Static)
  target_sources(dsv4_cuda PRIVATE $<TARGET_OBJECTS:dsv4_${group}>)
endfunction()
add_kernels(
  PORTABLE
  attend/queries.cu
  dense/bf16.cu
  exchange/exchange.cu
  fusion/sequence.cu
  index/entry_rows.cu
  moe/route.cu
  moe/swiglu.cu
  residual/normalise.cu
  rows/append.cu
  rows/compress.cu
  rows/gather.cu
  rows/kv_store.cu
  swap/swap.cu)
add_kernels(CLUSTER index/top_k.cu sampling/sample_tokens.cu)
add_kernels(
  HOPPER
  attend/bf16.cu
  attend/fp8.cu
  attend/query_product.cu
  dense/e4m3.cu
  dense/fp8.cu
  dense/stream.cu
  index/scores.cu
  moe/e4m3.cu
  moe/experts.cu
  residual/hyper_connection.cu)
set_target_properties(dsv4_cuda PROPERTIES LINKER_LANGUAGE CUDA CUDA_RUNTIME_LIBRARY Static)

dsv4_built_from(dsv4_cuda .cu .cuh .h)
string(REGEX MATCH "^([0-9]+)\\.([0-9]+)" found ${CMAKE_CUDA_COMPILER_VERSION})
math(EXPR version "${CMAKE_MATCH_1} * 1000 + ${CMAKE_MATCH_2} * 10")
target_compile_definitions(dsv4_cuda_from PRIVATE DSV4_CUDA_VERSION=${version})
install(TARGETS dsv4_cuda LIBRARY DESTINATION ${DSV4_DESTINATION} COMPONENT libraries)

# Which compute capabilities each group of CUDA sources is compiled for.
#
#   dsv4_architectures(ASKED SUPPORTED PREFIX)
#
# ASKED:     capabilities as "80;90;100;120"
# SUPPORTED: what the compiler can make code for, the same way; the others are left out with a message
# sets, for CUDA_ARCHITECTURES:
#   PREFIX_PORTABLE  all of them
#   PREFIX_CLUSTER   those with thread block clusters, 90 and up
#   PREFIX_HOPPER    90a if 90 is among them: wgmma and setmaxnreg are Hopper's own instructions
# An empty group is not built. The library names every kernel's own list (common/registry.h), so that a
# device without code is found before a launch. No PTX: what runs is what was compiled and can be tested.
function(dsv4_architectures asked supported prefix)
  set(portable)
  set(cluster)
  set(hopper)
  foreach(arch IN LISTS asked)
    if(NOT arch MATCHES "^[0-9]+$")
      message(FATAL_ERROR "DSV4_CUDA_ARCHITECTURES: '${arch}' is no compute capability such as 80, 90 or 100")
    elseif(arch LESS 80)
      message(FATAL_ERROR "DSV4_CUDA_ARCHITECTURES: the kernels need compute capability 8.0 or more, not '${arch}'")
    elseif(NOT arch IN_LIST supported)
      message(STATUS "this nvcc knows no compute capability ${arch}: left out")
      continue()
    endif()
    list(APPEND portable ${arch}-real)
    if(arch GREATER_EQUAL 90)
      list(APPEND cluster ${arch}-real)
    endif()
    if(arch EQUAL 90)
      list(APPEND hopper 90a-real)
    endif()
  endforeach()
  if(NOT portable)
    message(FATAL_ERROR "none of the compute capabilities '${asked}' is known to this nvcc, which has '${supported}'")
  endif()
  foreach(group portable cluster hopper)
    list(REMOVE_DUPLICATES ${group})
    string(TOUPPER ${group} name)
    set(${prefix}_${name} ${${group}} PARENT_SCOPE)
  endforeach()
endfunction()

# SUPPORTED of this nvcc: "75;80;90;..."
function(dsv4_supported_architectures nvcc out)
  execute_process(COMMAND ${nvcc} --list-gpu-arch OUTPUT_VARIABLE listed COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[0-9]+" found "${listed}")
  set(${out} ${found} PARENT_SCOPE)
endfunction()

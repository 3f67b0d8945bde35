# The digest of the sources a library is built from. dsv4_jax/libraries.py makes the same one and refuses a library
# that holds another.
#
#   dsv4_source_digest(OUT SUFFIX...)   64 hexadecimal digits, of the paths within csrc/ and the contents of the files
#                                       that have one of these suffixes; sets OUT_FILES, too: the files
function(dsv4_source_digest out)
  set(folder ${CMAKE_CURRENT_FUNCTION_LIST_DIR})
  set(patterns ${ARGN})
  list(TRANSFORM patterns PREPEND ${folder}/*)
  if(NOT CMAKE_SCRIPT_MODE_FILE)
    set(look_again CONFIGURE_DEPENDS) # which a script may not say
  endif()
  file(GLOB_RECURSE files ${look_again} ${patterns})
  set(lines)
  foreach(file IN LISTS files)
    file(RELATIVE_PATH name ${folder} ${file})
    file(SHA256 ${file} digest)
    list(APPEND lines "${name} ${digest}")
  endforeach()
  list(SORT lines)
  list(JOIN lines "\n" text)
  string(SHA256 digest "${text}")
  set(${out} ${digest} PARENT_SCOPE)
  set(${out}_FILES ${files} PARENT_SCOPE)
endfunction()

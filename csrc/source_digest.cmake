# The digest of the sources a library is built from. dsv4_jax/libraries.py makes the same one and refuses a library
# that holds another.
#
#   dsv4_source_digest(OUT FILE...)   64 hexadecimal digits, of the names and contents of files in one folder
function(dsv4_source_digest out)
  set(lines)
  foreach(file IN LISTS ARGN)
    get_filename_component(name ${file} NAME)
    file(SHA256 ${file} digest)
    list(APPEND lines "${name} ${digest}")
  endforeach()
  list(SORT lines)
  list(JOIN lines "\n" text)
  string(SHA256 digest "${text}")
  set(${out} ${digest} PARENT_SCOPE)
endfunction()

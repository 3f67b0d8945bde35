#!/bin/sh
# Runs a compiler and keeps what it says beside the object file (CMake's DSV4_PTXAS_REPORT): `-Xptxas -v` says a lot.
object=
for word in "$@"; do
  [ "$previous" = -o ] && object=$word
  previous=$word
done
"$@" > "$object.log" 2>&1 || { status=$?; cat "$object.log" >&2; exit $status; }

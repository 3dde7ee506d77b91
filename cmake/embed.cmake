# kvf_embed(OUT NAME FILES...): writes a C file with the concatenated files as kvf__NAME[] and kvf__NAME_bytes, at
# configure time and again when one of them changes.
function(kvf_embed out name)
  set(bytes "")
  foreach(file IN LISTS ARGN)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
    file(READ ${file} part HEX)
    string(APPEND bytes "${part}")
  endforeach()
  string(REGEX REPLACE "(................................................................)" "\\1\n" bytes "${bytes}")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
  file(CONFIGURE OUTPUT ${out} CONTENT "#include <stddef.h>
extern const unsigned char kvf__${name}[];
extern const size_t kvf__${name}_bytes;
const unsigned char kvf__${name}[] = {
${bytes}
};
const size_t kvf__${name}_bytes = sizeof kvf__${name};
" @ONLY)
endfunction()

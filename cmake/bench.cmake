# Builds kvfold-bench from bench/*.c and the static libraries. Its output lines name the commit and the flags.
file(GLOB bench_sources CONFIGURE_DEPENDS bench/*.c)
add_executable(kvfold-bench)
foreach(source IN LISTS bench_sources)
  kvf_needs_engine(${source} needs_engine)
  if(KVF_BUILD_ENGINE OR NOT needs_engine)
    target_sources(kvfold-bench PRIVATE ${source})
  endif()
endforeach()
kvf_compile(kvfold-bench)
if(KVF_BUILD_ENGINE)
  target_compile_definitions(kvfold-bench PRIVATE KVF_BENCH_ENGINE)
  target_link_libraries(kvfold-bench PRIVATE kvfold_engine_static)
endif()
target_link_libraries(kvfold-bench PRIVATE kvfold_static ${CMAKE_DL_LIBS} m)

string(TOUPPER "${CMAKE_BUILD_TYPE}" build_type)
string(STRIP "${CMAKE_C_FLAGS} ${CMAKE_C_FLAGS_${build_type}}" bench_flags)
set_property(SOURCE bench/json.c PROPERTY COMPILE_DEFINITIONS
  "KVF_BENCH_COMMIT=\"${kvf_commit}\""
  "KVF_BENCH_FLAGS=\"${CMAKE_C_COMPILER_ID} ${CMAKE_C_COMPILER_VERSION} ${CMAKE_BUILD_TYPE} ${bench_flags}\"")

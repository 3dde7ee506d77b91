# Installation: files and folders, the CMake package, the pkg-config files.
include(CMakePackageConfigHelpers)
set(kvf_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kvfold)

# kvf_install(LIBRARY EXPORT_SET): installs the shared and static library, its export file and its NAME.pc.
function(kvf_install name export_set)
  install(TARGETS ${name} ${name}_static EXPORT ${export_set})
  install(EXPORT ${export_set} NAMESPACE kvfold:: DESTINATION ${kvf_package_dir})
  # The prefix is found from the file's own place, so that an installed tree may be moved.
  file(RELATIVE_PATH kvf_pc_prefix /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
  string(REGEX REPLACE "/$" "" kvf_pc_prefix "${kvf_pc_prefix}")
  configure_file(cmake/${name}.pc.in ${name}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endfunction()

if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
  message(FATAL_ERROR "CMAKE_INSTALL_LIBDIR ${CMAKE_INSTALL_LIBDIR}: must be relative to the prefix")
endif()
kvf_install(kvfold kvfoldTargets)
set(kvf_left_out PATTERN "model.h" EXCLUDE PATTERN "probe.h" EXCLUDE PATTERN "runner.h" EXCLUDE PATTERN "engine.h" EXCLUDE)
if(KVF_BUILD_ENGINE)
  set(kvf_left_out)
  kvf_install(kvfold_engine kvfoldEngineTargets)
  if(TARGET kvfold_command)
    install(TARGETS kvfold_command)
  endif()
endif()
install(DIRECTORY include/kvfold DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h" ${kvf_left_out})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
configure_package_config_file(cmake/kvfoldConfig.cmake.in kvfoldConfig.cmake INSTALL_DESTINATION ${kvf_package_dir}
                              NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(kvfoldConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/kvfoldConfig.cmake ${PROJECT_BINARY_DIR}/kvfoldConfigVersion.cmake
        DESTINATION ${kvf_package_dir})

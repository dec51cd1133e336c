# Installs into one folder, which in a wheel is the Python package: lib/, include/, share/cmake/torchkiln/.
include(CMakePackageConfigHelpers)

# _build_info.json: facts of this build that the loader compares with the environment before it loads a library.
set(json_torches "")
foreach(minor IN LISTS torchkiln_torches)
  set(folder .)
  if(TORCHKILN_TORCHES)
    set(folder "torch${minor}")
  endif()
  set(cuda null)
  if(torchkiln_torch_CUDA_${minor})
    set(cuda "\"${torchkiln_torch_CUDA_${minor}}\"")
  endif()
  list(
    APPEND json_torches
    "{\"version\": \"${torchkiln_torch_VERSION_${minor}}\", \"cuda\": ${cuda}, \"folder\": \"${folder}\"}"
  )
endforeach()
list(JOIN json_torches ",\n    " json_torches)
set(json_cuda null)
set(json_architectures "")
set(json_ptx "")
if(TORCHKILN_WITH_CUDA)
  set(json_cuda "\"${CUDAToolkit_VERSION_MAJOR}.${CUDAToolkit_VERSION_MINOR}\"")
  list(
    TRANSFORM built_architectures
    REPLACE "-(real|virtual)$" ""
    OUTPUT_VARIABLE json_architectures
  )
  list(REMOVE_DUPLICATES json_architectures)
  list(TRANSFORM json_architectures REPLACE "(.+)" "\"\\1\"")
  list(JOIN json_architectures ", " json_architectures)
  # An architecture without a suffix is built as machine code and as PTX, which newer GPUs compile at load time.
  set(json_ptx "${built_architectures}")
  list(FILTER json_ptx EXCLUDE REGEX "-real$")
  list(TRANSFORM json_ptx REPLACE "^([0-9]+[af]?)(-virtual)?$" "\"\\1\"")
  list(JOIN json_ptx ", " json_ptx)
endif()
list(
  TRANSFORM torchkiln_cpu_instructions
  REPLACE "(.+)" "\"\\1\""
  OUTPUT_VARIABLE json_instructions
)
list(JOIN json_instructions ", " json_instructions)
set(json_python "${Python_VERSION_MAJOR}.${Python_VERSION_MINOR}")
if(Python_SOABI MATCHES "^cpython-[0-9]+t") # a Python without a GIL loads modules of its own
  string(APPEND json_python t)
endif()
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "import sysconfig; print(sysconfig.get_platform())"
  OUTPUT_VARIABLE json_platform
  OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY
)
configure_file(cpp/cmake/package/build_info.json.in _build_info.json @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/_build_info.json" DESTINATION .)

# The kernels have a separate export, because linking them does not need torch.
set(config_folder share/cmake/torchkiln)
install(
  TARGETS torchkiln_kernels
  EXPORT kernels
  LIBRARY DESTINATION lib
  INCLUDES DESTINATION include
)
install(
  EXPORT kernels
  FILE torchkiln-kernels.cmake
  NAMESPACE torchkiln::
  DESTINATION ${config_folder}
)
foreach(minor IN LISTS torchkiln_torches)
  install(
    EXPORT torchkiln-${minor}
    FILE torchkiln-torch${minor}.cmake
    NAMESPACE torchkiln::
    DESTINATION ${config_folder}
  )
endforeach()
install(DIRECTORY cuda/include/ cpp/include/ "${PROJECT_BINARY_DIR}/include/" DESTINATION include)

configure_package_config_file(
  cpp/cmake/package/torchkilnConfig.cmake.in
  torchkilnConfig.cmake
  INSTALL_DESTINATION ${config_folder}
)
write_basic_package_version_file(torchkilnConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES
    "${PROJECT_BINARY_DIR}/torchkilnConfig.cmake"
    "${PROJECT_BINARY_DIR}/torchkilnConfigVersion.cmake"
    cpp/cmake/FindTorch.cmake
    cpp/cmake/package/torchkiln_package.cmake
    cpp/cmake/cpu_isas.cmake
    cpp/cmake/formula/formula.cmake
    cpp/cmake/formula/formula.cpp.in
    cpp/cmake/formula/formula.cu.in
    cpp/cmake/nvcc.cmake
    cpp/cmake/cuda_architectures.cmake
  DESTINATION ${config_folder}
)

# The SBOM: third-party code compiled into the libraries, in the place that PEP 770 names. Written after compiling.
if(SKBUILD_STATE STREQUAL "wheel" AND CMAKE_GENERATOR STREQUAL "Ninja")
  set(sbom "${PROJECT_BINARY_DIR}/torchkiln.cdx.json")
  install(
    CODE
      "execute_process(
        COMMAND \"${Python_EXECUTABLE}\" \"${PROJECT_SOURCE_DIR}/cpp/cmake/tools/sbom.py\"
          \"${CMAKE_MAKE_PROGRAM}\" \"${PROJECT_BINARY_DIR}\" ${PROJECT_VERSION}
          \"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\" \"${sbom}\"
        COMMAND_ERROR_IS_FATAL ANY
      )"
  )
  install(FILES "${sbom}" DESTINATION "${SKBUILD_METADATA_DIR}/sboms")
endif()

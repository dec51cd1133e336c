# Everything lies in one folder, which is the Python package in a wheel: lib/, include/, share/cmake/torchkiln/.
include(CMakePackageConfigHelpers)

# _build_info.json: what the loader compares with the environment before it loads anything.
set(json_torches "")
foreach(minor IN LISTS TORCHKILN_TORCHES_FOUND)
  set(folder .)
  if(TORCHKILN_TORCHES)
    set(folder "torch${minor}")
  endif()
  set(cuda null)
  if(TORCHKILN_TORCH_CUDA_${minor})
    set(cuda "\"${TORCHKILN_TORCH_CUDA_${minor}}\"")
  endif()
  list(
    APPEND json_torches
    "{\"version\": \"${TORCHKILN_TORCH_VERSION_${minor}}\", \"cuda\": ${cuda}, \"folder\": \"${folder}\"}"
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
  # Those without a suffix are both machine code and PTX, which newer GPUs compile when they load it.
  set(json_ptx "${built_architectures}")
  list(FILTER json_ptx EXCLUDE REGEX "-real$")
  list(TRANSFORM json_ptx REPLACE "^([0-9]+[af]?)(-virtual)?$" "\"\\1\"")
  list(JOIN json_ptx ", " json_ptx)
endif()
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "import sysconfig; print(sysconfig.get_platform())"
  OUTPUT_VARIABLE json_platform
  OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY
)
configure_file(cpp/cmake/build_info.json.in _build_info.json @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/_build_info.json" DESTINATION .)

# The kernels are exported on their own, so that nobody needs torch to link them.
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
foreach(minor IN LISTS TORCHKILN_TORCHES_FOUND)
  install(
    EXPORT torchkiln-${minor}
    FILE torchkiln-torch${minor}.cmake
    NAMESPACE torchkiln::
    DESTINATION ${config_folder}
  )
endforeach()
install(DIRECTORY cuda/include/ cpp/include/ "${PROJECT_BINARY_DIR}/include/" DESTINATION include)
# The loops of elementwise operators on the CPU, and the choice of an instruction set.
install(
  FILES cpp/cpu/elementwise.h cpp/cpu/float16.h cpp/cpu/isa.h
  DESTINATION include/torchkiln/cpu
)

configure_package_config_file(
  cpp/cmake/torchkilnConfig.cmake.in
  torchkilnConfig.cmake
  INSTALL_DESTINATION ${config_folder}
)
write_basic_package_version_file(torchkilnConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES
    "${PROJECT_BINARY_DIR}/torchkilnConfig.cmake"
    "${PROJECT_BINARY_DIR}/torchkilnConfigVersion.cmake"
    cpp/cmake/torchkiln_torch.cmake
    cpp/cmake/torchkiln_package.cmake
    cpp/cmake/instruction_sets.cmake
    cpp/cmake/cuda_toolkit.cmake
    cpp/cmake/cuda_architectures.cmake
  DESTINATION ${config_folder}
)

# What a wheel contains of others, where PEP 770 wants it; written when everything has been compiled.
if(SKBUILD_STATE STREQUAL "wheel" AND CMAKE_GENERATOR STREQUAL "Ninja")
  set(sbom "${PROJECT_BINARY_DIR}/torchkiln.cdx.json")
  install(
    CODE
      "execute_process(
        COMMAND \"${Python_EXECUTABLE}\" \"${PROJECT_SOURCE_DIR}/cpp/cmake/sbom.py\"
          \"${CMAKE_MAKE_PROGRAM}\" \"${PROJECT_BINARY_DIR}\" ${PROJECT_VERSION}
          \"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\" \"${sbom}\"
        COMMAND_ERROR_IS_FATAL ANY
      )"
  )
  install(FILES "${sbom}" DESTINATION "${SKBUILD_METADATA_DIR}/sboms")
endif()

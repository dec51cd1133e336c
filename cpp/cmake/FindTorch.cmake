# find_package(Torch [version]): the target torchkiln::libtorch with torch's headers and libraries.
# Torch has its own CMake package, TorchConfig.cmake. This module replaces it, because that package requires a
# complete CUDA toolkit wherever torch has CUDA, appends to CMAKE_CUDA_FLAGS, and can be loaded once per project, while a
# wheel is built against five torch versions. A project may load both: the targets have different names and link the
# same files. -DTORCHKILN_TORCH_CONFIG=ON forwards to torch's package: torchkiln::libtorch then links its target `torch`.
#
# Hints: Torch_ROOT (the folder of the Python package or of a libtorch archive), Torch_DIR, CMAKE_PREFIX_PATH.
# Sets:  Torch_FOUND, Torch_VERSION (2.13.0), Torch_CUDA_VERSION (13.0; empty without CUDA), Torch_FOLDER
option(TORCHKILN_TORCH_CONFIG "Link torch through its own CMake package" OFF)

unset(Torch_CONFIG_FILE)
find_file(
  Torch_CONFIG_FILE
  TorchConfig.cmake
  HINTS ${Torch_ROOT} ${Torch_DIR} ${Torch_HINTS} ${CMAKE_PREFIX_PATH}
  PATH_SUFFIXES share/cmake/Torch Torch torch/share/cmake/Torch
  NO_DEFAULT_PATH
  NO_CACHE
)

# Reads Torch_VERSION and Torch_CUDA_VERSION from version.py of a Python package, or build-version of a libtorch archive.
set(Torch_VERSION "")
set(Torch_CUDA_VERSION "")
set(Torch_FOLDER "")
if(Torch_CONFIG_FILE)
  cmake_path(SET Torch_FOLDER NORMALIZE "${Torch_CONFIG_FILE}/../../../..")
  foreach(file IN ITEMS version.py build-version)
    if(NOT Torch_VERSION AND EXISTS "${Torch_FOLDER}/${file}")
      file(STRINGS "${Torch_FOLDER}/${file}" version REGEX "^(__version__ = ')?[0-9]" LIMIT_COUNT 1)
      string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" Torch_VERSION "${version}")
      file(STRINGS "${Torch_FOLDER}/${file}" cuda REGEX "^cuda" LIMIT_COUNT 1)
      if(cuda MATCHES "'([0-9]+\\.[0-9]+)")
        set(Torch_CUDA_VERSION "${CMAKE_MATCH_1}")
      endif()
    endif()
  endforeach()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  Torch
  REQUIRED_VARS Torch_FOLDER Torch_VERSION
  VERSION_VAR Torch_VERSION
)
if(NOT Torch_FOUND OR TARGET torchkiln::libtorch)
  return()
endif()

add_library(torchkiln::libtorch INTERFACE IMPORTED)
if(TORCHKILN_TORCH_CONFIG)
  find_package(Torch ${Torch_VERSION} EXACT REQUIRED CONFIG PATHS "${Torch_FOLDER}" NO_DEFAULT_PATH)
  target_link_libraries(torchkiln::libtorch INTERFACE torch)
  return()
endif()

# Reads the C++ standard of torch's headers from TorchConfig.cmake.
file(STRINGS "${Torch_CONFIG_FILE}" line REGEX "(CXX_STANDARD|cxx_std_)[ ]*[0-9]+" LIMIT_COUNT 1)
set(standard 17)
if(line MATCHES "(CXX_STANDARD |cxx_std_)([0-9]+)")
  set(standard ${CMAKE_MATCH_2})
endif()
# The oldest g++ whose standard library compiles torch's headers.
set(oldest_gcc 11)
if(standard EQUAL 17)
  set(oldest_gcc 9)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS oldest_gcc)
  message(
    FATAL_ERROR
    "torchkiln: found g++ ${CMAKE_CXX_COMPILER_VERSION} (${CMAKE_CXX_COMPILER}), needed ${oldest_gcc} or newer: the "
    "torch in ${Torch_FOLDER} is written in C++${standard}. Type, with the name of a newer one:\n"
    "  CXX=g++-${oldest_gcc} python -m pip install ..."
  )
endif()

target_compile_features(torchkiln::libtorch INTERFACE cxx_std_${standard})
target_include_directories(
  torchkiln::libtorch
  SYSTEM
  INTERFACE "${Torch_FOLDER}/include" "${Torch_FOLDER}/include/torch/csrc/api/include"
)
# No symbol of libtorch.so is used, but it loads all other libraries, CUDA's included.
target_link_libraries(
  torchkiln::libtorch
  INTERFACE
    "${Torch_FOLDER}/lib/libc10.so"
    "${Torch_FOLDER}/lib/libtorch_cpu.so"
    "-Wl,--push-state,--no-as-needed,${Torch_FOLDER}/lib/libtorch.so,--pop-state"
)
if(EXISTS "${Torch_FOLDER}/lib/libc10_cuda.so")
  target_link_libraries(
    torchkiln::libtorch
    INTERFACE "${Torch_FOLDER}/lib/libc10_cuda.so" "${Torch_FOLDER}/lib/libtorch_cuda.so"
  )
endif()

# torchkiln::torch: torch's headers and libraries, of the Python package or a libtorch archive. Used by our own build,
# and installed for those who link torchkiln::torchkiln.
#
# Torch's package configuration does more than that: it insists on a complete CUDA toolkit wherever torch has CUDA, and
# appends to the project's CUDA flags. Linking needs neither. Whoever has called find_package(Torch) can go on using it:
# the names do not meet, and both are the same files.
#
# torchkiln_import_torch(root [suffix]): a suffix to the name of the target, where there are several.
function(torchkiln_import_torch root)
  # Torch states the C++ standard that its headers need as a number in this file.
  set(config "${root}/share/cmake/Torch/TorchConfig.cmake")
  set(standard 17)
  if(NOT EXISTS "${config}" OR NOT EXISTS "${root}/include")
    message(
      FATAL_ERROR
      "torchkiln: found a torch without its headers or its CMake package (${root}), needed both. Type:\n"
      "  python -m pip install --force-reinstall torch"
    )
  endif()
  file(STRINGS "${config}" line REGEX "(CXX_STANDARD|cxx_std_)[ ]*[0-9]+" LIMIT_COUNT 1)
  if(line MATCHES "(CXX_STANDARD |cxx_std_)([0-9]+)")
    set(standard ${CMAKE_MATCH_2})
  endif()

  # The first g++ whose library is complete enough for torch's headers in that standard.
  if(standard EQUAL 17)
    set(needed 9)
  else()
    set(needed 11)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS needed)
    message(
      FATAL_ERROR
      "torchkiln: found g++ ${CMAKE_CXX_COMPILER_VERSION} (${CMAKE_CXX_COMPILER}), needed ${needed} or newer: the "
      "torch in ${root} is written in C++${standard}. Type, with the name of a newer one:\n"
      "  CXX=g++-${needed} python -m pip install ..."
    )
  endif()

  set(target "torchkiln::torch${ARGV1}")
  add_library(${target} INTERFACE IMPORTED GLOBAL)
  target_compile_features(${target} INTERFACE cxx_std_${standard})
  target_include_directories(
    ${target}
    SYSTEM
    INTERFACE "${root}/include" "${root}/include/torch/csrc/api/include"
  )
  # Nothing refers to libtorch.so, yet it is what loads all the others, CUDA's among them.
  target_link_libraries(
    ${target}
    INTERFACE
      "${root}/lib/libc10.so"
      "${root}/lib/libtorch_cpu.so"
      "-Wl,--push-state,--no-as-needed,${root}/lib/libtorch.so,--pop-state"
  )
  if(EXISTS "${root}/lib/libc10_cuda.so")
    target_link_libraries(
      ${target}
      INTERFACE "${root}/lib/libc10_cuda.so" "${root}/lib/libtorch_cuda.so"
    )
  endif()
endfunction()

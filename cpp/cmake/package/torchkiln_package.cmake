# For other packages with operators, after find_package(torchkiln COMPONENTS torch) in the project's top folder:
#
#   torchkiln_find_cuda()                    sets TORCHKILN_WITH_CUDA, and enables the CUDA language if it is on
#   torchkiln_add_module(name SOURCES ...    a Python module of C++ files and, with CUDA, .cu files. CPU_KERNELS are C++
#     CPU_KERNELS ... FORMULAS ...)          files that are compiled once per instruction set (torchkiln/cpu/isa.h).
#                                            FORMULAS are names of elementwise ops without kernels of their own: their
#                                            formula is in <project>/kernels/<name>.h (torchkiln/core/formula.h)
#
# TORCHKILN_CUDA, TORCHKILN_CUDA_ARCHITECTURES and TORCHKILN_ALLOW_CUDA_MISMATCH work as in torchkiln's own build.
include_guard(GLOBAL)
set(torchkiln_CMAKE_DIR "${CMAKE_CURRENT_LIST_DIR}")
include("${CMAKE_CURRENT_LIST_DIR}/cpu_isas.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/formula.cmake")

# A macro, because it enables languages and sets variables in the scope of the project.
macro(torchkiln_find_cuda)
  set(TORCHKILN_TORCH_FOLDER "${torchkiln_TORCH_FOLDER}")
  set(TORCHKILN_TORCH_VERSION "${torchkiln_TORCH_VERSION}")
  set(TORCHKILN_TORCH_CUDA "${torchkiln_TORCH_CUDA_VERSION}")
  set(TORCHKILN_NVIDIA_ROOTS "${torchkiln_TORCH_FOLDER}/../nvidia")
  cmake_path(NORMAL_PATH TORCHKILN_NVIDIA_ROOTS)
  include("${torchkiln_CMAKE_DIR}/nvcc.cmake")
endmacro()

function(torchkiln_add_module name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;CPU_KERNELS;FORMULAS")
  torchkiln_formula_sources(arg_CPU_KERNELS cpp "${PROJECT_NAME}" ${arg_FORMULAS})
  torchkiln_formula_sources(arg_SOURCES cu "${PROJECT_NAME}" ${arg_FORMULAS})
  if(NOT TORCHKILN_WITH_CUDA)
    list(FILTER arg_SOURCES EXCLUDE REGEX "\\.cu$")
  endif()
  python_add_library(${name} MODULE WITH_SOABI ${arg_SOURCES})
  # Uses torch's version of pybind11, because modules can share types only if their versions are equal.
  target_link_libraries(
    ${name}
    PRIVATE torchkiln::torch "${torchkiln_TORCH_FOLDER}/lib/libtorch_python.so"
  )
  target_compile_definitions(${name} PRIVATE "TORCHKILN_PACKAGE=\"${PROJECT_NAME}\"")
  if(TORCHKILN_WITH_CUDA)
    target_compile_definitions(${name} PRIVATE TORCHKILN_WITH_CUDA=1)
    target_link_libraries(${name} PRIVATE CUDA::cudart)
    set_target_properties(${name} PROPERTIES CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON)
  else()
    # torchkiln::torch defines it if torchkiln was built with CUDA, but this module is not.
    target_compile_options(${name} PRIVATE -UTORCHKILN_WITH_CUDA)
  endif()
  # at::parallel_for is a header and needs OpenMP to run in parallel.
  target_compile_options(${name} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-fopenmp>")
  # Symbols are resolved when the module is loaded, so that a missing one becomes an ImportError. Symbols from archives
  # stay local: half of a static libstdc++ would otherwise be resolved to the shared one of other libraries.
  target_link_options(${name} PRIVATE -fopenmp LINKER:-z,now LINKER:--exclude-libs,ALL)
  set_target_properties(
    ${name}
    PROPERTIES
      CXX_VISIBILITY_PRESET hidden
      CUDA_VISIBILITY_PRESET hidden
      VISIBILITY_INLINES_HIDDEN ON
      CXX_EXTENSIONS OFF
      CUDA_EXTENSIONS OFF
      LINKER_LANGUAGE CXX
      INSTALL_RPATH "$ORIGIN/../torchkiln/lib;$ORIGIN/../torch/lib"
  )
  # torchkiln.extend.require_torch() reads this file.
  file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/_torch.txt" "${torchkiln_TORCH_VERSION}\n")
  install(FILES "${CMAKE_CURRENT_BINARY_DIR}/_torch.txt" DESTINATION .)
  # Compile options that the project sets for the module also apply to the CPU kernels.
  if(arg_CPU_KERNELS)
    foreach(isa IN LISTS torchkiln_isas)
      set(kernels ${name}_${isa})
      add_library(${kernels} OBJECT ${arg_CPU_KERNELS})
      torchkiln_for_instruction_set(${kernels} ${isa})
      target_compile_options(${kernels} PRIVATE -Wall -Wextra)
      target_include_directories(
        ${kernels}
        PRIVATE "$<TARGET_PROPERTY:${name},INCLUDE_DIRECTORIES>"
      )
      target_compile_definitions(
        ${kernels}
        PRIVATE "$<TARGET_PROPERTY:${name},COMPILE_DEFINITIONS>"
      )
      target_link_libraries(${kernels} PRIVATE torchkiln::kernels)
      set_target_properties(
        ${kernels}
        PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON CXX_EXTENSIONS OFF
      )
      target_sources(${name} PRIVATE "$<TARGET_OBJECTS:${kernels}>")
    endforeach()
  endif()
endfunction()

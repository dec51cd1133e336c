# Decides whether CUDA kernels are built and with which nvcc, then enables the language. Sets TORCHKILN_WITH_CUDA.
#
# Looked at, in this order: the compiler that the user names (CMAKE_CUDA_COMPILER, CUDACXX), the system's toolkits, the
# registry's toolkit beside torch. Its version must equal that of the CUDA that torch was built with.
include("${CMAKE_CURRENT_LIST_DIR}/cuda_architectures.cmake")
set(
  TORCHKILN_CUDA
  AUTO
  CACHE STRING
  "CUDA kernels: AUTO (when torch has CUDA and a GPU is visible), ON or OFF"
)
set_property(CACHE TORCHKILN_CUDA PROPERTY STRINGS AUTO ON OFF)
set(
  TORCHKILN_CUDA_ARCHITECTURES
  ""
  CACHE STRING
  "native, all, or a list such as 80;90 (default: native where a GPU is visible, else all)"
)
option(TORCHKILN_ALLOW_CUDA_MISMATCH "Accept an nvcc of another CUDA version than torch's" OFF)
set(TORCHKILN_WITH_CUDA OFF)
set(toolkit_extras "nvcc,nvvm,crt,cccl")

# The CUDA version of an nvcc as X.Y, or empty when it does not run.
function(nvcc_version nvcc result)
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE text ERROR_QUIET)
  string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" ignored "${text}")
  set(${result} "${CMAKE_MATCH_1}" PARENT_SCOPE)
endfunction()

function(torchkiln_gpu_visible result)
  file(GLOB devices "/proc/driver/nvidia/gpus/*" "/dev/nvidia[0-9]*" "/usr/lib/wsl/lib/libcuda.so*")
  find_program(NVIDIA_SMI nvidia-smi)
  if(NVIDIA_SMI AND NOT devices)
    execute_process(COMMAND "${NVIDIA_SMI}" --list-gpus OUTPUT_VARIABLE devices ERROR_QUIET)
  endif()
  set(${result} OFF PARENT_SCOPE)
  if(devices MATCHES "nvidia|wsl|GPU [0-9]")
    set(${result} ON PARENT_SCOPE)
  endif()
endfunction()

# Every nvcc in the order of preference. The choice of an earlier run holds as long as it is there: with build isolation,
# it is gone by now.
function(list_nvccs result)
  set(nvccs "")
  if(CMAKE_CUDA_COMPILER)
    set(nvccs "${CMAKE_CUDA_COMPILER}")
  elseif(DEFINED ENV{CUDACXX})
    set(nvccs "$ENV{CUDACXX}")
  elseif(EXISTS "${TORCHKILN_NVCC}")
    set(nvccs "${TORCHKILN_NVCC}")
  else()
    find_program(system_nvcc nvcc NO_CACHE)
    if(system_nvcc)
      list(APPEND nvccs "${system_nvcc}")
    endif()
    set(candidates "$ENV{CUDA_HOME}/bin/nvcc" "$ENV{CUDA_PATH}/bin/nvcc" /usr/local/cuda/bin/nvcc)
    list(APPEND candidates "/usr/local/cuda-${TORCHKILN_TORCH_CUDA}/bin/nvcc")
    string(REGEX MATCH "^[0-9]+" major "${TORCHKILN_TORCH_CUDA}")
    list(
      TRANSFORM TORCHKILN_NVIDIA_ROOTS
      APPEND "/cu${major}/bin/nvcc"
      OUTPUT_VARIABLE registry_nvccs
    )
    foreach(nvcc IN LISTS candidates registry_nvccs)
      if(EXISTS "${nvcc}")
        list(APPEND nvccs "${nvcc}")
      endif()
    endforeach()
  endif()
  set(${result} "${nvccs}" PARENT_SCOPE)
endfunction()

# What the registry's toolkit in `root` lacks: its parts are wheels of their own, which pip may leave out or take from
# another version. They tell their version only in their records, beside the package.
function(find_registry_gaps root version result)
  set(gaps "")
  foreach(part IN ITEMS nvidia_nvvm nvidia_cuda_crt nvidia_cuda_cccl)
    file(GLOB record "${root}/../../${part}-*.dist-info")
    if(NOT record)
      list(APPEND gaps "no ${part}")
    elseif(NOT record MATCHES "/${part}-${version}\\.")
      cmake_path(GET record STEM LAST_ONLY name)
      list(APPEND gaps "${name}")
    endif()
  endforeach()
  list(JOIN gaps ", " gaps)
  set(${result} "${gaps}" PARENT_SCOPE)
endfunction()

# The registry's wheels do not have the shape that nvcc and CMake look for. `bin` must be a real folder, since nvcc
# looks for its neighbours in bin/.., and the libraries need names without a version.
function(link_toolkit_together root shadow)
  file(REMOVE_RECURSE "${shadow}")
  file(MAKE_DIRECTORY "${shadow}/bin" "${shadow}/lib64")
  file(GLOB tools "${root}/bin/*")
  foreach(tool IN LISTS tools)
    cmake_path(GET tool FILENAME name)
    file(CREATE_LINK "${tool}" "${shadow}/bin/${name}" SYMBOLIC)
  endforeach()
  file(CREATE_LINK "${root}/include" "${shadow}/include" SYMBOLIC)
  file(CREATE_LINK "${root}/nvvm" "${shadow}/nvvm" SYMBOLIC)
  file(CREATE_LINK lib64 "${shadow}/lib" SYMBOLIC)
  file(GLOB libraries "${root}/lib/*.a" "${root}/lib/*.so*")
  foreach(library IN LISTS libraries)
    cmake_path(GET library FILENAME name)
    file(CREATE_LINK "${library}" "${shadow}/lib64/${name}" SYMBOLIC)
    string(REGEX REPLACE "\\.so\\..*$" ".so" bare "${name}")
    if(NOT EXISTS "${root}/lib/${bare}")
      file(CREATE_LINK "${library}" "${shadow}/lib64/${bare}" SYMBOLIC)
    endif()
  endforeach()
endfunction()

# Chooses among the compilers. `found` tells, for the message, what was looked at and why it was not taken.
function(choose_nvcc nvcc_result found_result)
  set(found "")
  set(named "")
  if(CMAKE_CUDA_COMPILER OR DEFINED ENV{CUDACXX})
    set(named " (named by CMAKE_CUDA_COMPILER or CUDACXX: unset it)")
  endif()
  list_nvccs(nvccs)
  foreach(nvcc IN LISTS nvccs)
    nvcc_version("${nvcc}" version)
    cmake_path(GET nvcc PARENT_PATH root)
    cmake_path(GET root PARENT_PATH root)
    set(gaps "")
    if(EXISTS "${root}/lib" AND NOT EXISTS "${root}/lib64" AND EXISTS "${root}/bin/nvcc.profile")
      find_registry_gaps("${root}" "${version}" gaps)
      set(shadow "${PROJECT_BINARY_DIR}/cuda-toolkit")
    else()
      set(shadow "")
    endif()
    if(gaps)
      string(APPEND found "\n  nvcc ${version} with ${gaps}: ${nvcc}${named}")
    elseif(version STREQUAL TORCHKILN_TORCH_CUDA OR (version AND TORCHKILN_ALLOW_CUDA_MISMATCH))
      if(NOT version STREQUAL TORCHKILN_TORCH_CUDA)
        message(
          WARNING
          "torchkiln: nvcc ${version} (${nvcc}) for a torch with CUDA ${TORCHKILN_TORCH_CUDA}, as "
          "TORCHKILN_ALLOW_CUDA_MISMATCH says. The kernels may not load or may fail at run time."
        )
      endif()
      set(TORCHKILN_NVCC "${nvcc}" CACHE INTERNAL "The nvcc that was chosen")
      if(shadow)
        link_toolkit_together("${root}" "${shadow}")
        set(nvcc "${shadow}/bin/nvcc")
      endif()
      set(${nvcc_result} "${nvcc}" PARENT_SCOPE)
      return()
    else()
      string(APPEND found "\n  nvcc ${version}: ${nvcc}${named}")
    endif()
  endforeach()
  if(NOT found)
    set(found " no nvcc")
  endif()
  set(${nvcc_result} "" PARENT_SCOPE)
  set(${found_result} "${found}" PARENT_SCOPE)
endfunction()

torchkiln_gpu_visible(gpu_visible)
string(TOUPPER "${TORCHKILN_CUDA}" wanted)
if(NOT wanted MATCHES "^(AUTO|ON|OFF|TRUE|FALSE)$")
  message(FATAL_ERROR "torchkiln: found TORCHKILN_CUDA=${TORCHKILN_CUDA}, needed AUTO, ON or OFF")
endif()
if(wanted MATCHES "ON|TRUE" AND NOT TORCHKILN_TORCH_CUDA)
  message(
    FATAL_ERROR
    "torchkiln: found torch ${TORCHKILN_TORCH_VERSION} without CUDA (${TORCHKILN_TORCH_ROOT}), needed one with CUDA for "
    "TORCHKILN_CUDA=ON. Type one of\n"
    "  ${Python_EXECUTABLE} -m pip install --force-reinstall torch==${TORCHKILN_TORCH_VERSION} "
    "--index-url https://download.pytorch.org/whl/cu130\n"
    "  python -m pip install . -C torchkiln.cuda=off"
  )
endif()

if(wanted MATCHES "ON|TRUE" OR (wanted STREQUAL "AUTO" AND TORCHKILN_TORCH_CUDA AND gpu_visible))
  choose_nvcc(nvcc found)
  set(
    remedy
    "${Python_EXECUTABLE} -m pip install 'cuda-toolkit[${toolkit_extras}]==${TORCHKILN_TORCH_CUDA}.*'"
  )
  if(nvcc)
    set(TORCHKILN_WITH_CUDA ON)
  elseif(wanted STREQUAL "AUTO")
    message(
      WARNING
      "torchkiln: building for the CPU only. For the GPU, needed nvcc ${TORCHKILN_TORCH_CUDA}, the CUDA version of torch "
      "${TORCHKILN_TORCH_VERSION}; found:${found}\nType, and build again without build isolation:\n  ${remedy}"
    )
  else()
    message(
      FATAL_ERROR
      "torchkiln: needed nvcc ${TORCHKILN_TORCH_CUDA}, the CUDA version of torch ${TORCHKILN_TORCH_VERSION}; "
      "found:${found}\nType one of\n  ${remedy}\n"
      "  python -m pip install . -C torchkiln.allow-cuda-mismatch=on     (at your own risk)\n"
      "  python -m pip install . -C torchkiln.cuda=off                   (CPU only)"
    )
  endif()
endif()

if(TORCHKILN_WITH_CUDA)
  torchkiln_cuda_architectures("${nvcc}" "${gpu_visible}" CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_COMPILER "${nvcc}")
  if(NOT CMAKE_CUDA_HOST_COMPILER)
    set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
  endif()
  # The runtime that torch has loaded already, not a second copy of it.
  set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  if(CMAKE_CUDA_ARCHITECTURES STREQUAL "native")
    set(built_architectures "${CMAKE_CUDA_ARCHITECTURES_NATIVE}")
  else()
    set(built_architectures "${CMAKE_CUDA_ARCHITECTURES}")
  endif()
  message(STATUS "CUDA ${CMAKE_CUDA_COMPILER_VERSION} for ${built_architectures}: ${nvcc}")
endif()

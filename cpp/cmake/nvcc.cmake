# Decides whether CUDA kernels are built and with which nvcc, then enables the language. Sets TORCHKILN_WITH_CUDA.
# The search order: the compiler that the user names (CMAKE_CUDA_COMPILER, CUDACXX), after which no other is tried; the
# toolkits in CUDAToolkit_ROOT, CUDA_HOME and CUDA_PATH; Python's prefix, where conda installs it; the system; the wheels
# in the Python environment. The first one with the version of torch's CUDA is used.
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

# Every nvcc, in the order of preference. `named`: the variable by which the user names the only nvcc to try, if any. The
# choice of an earlier run is kept as long as the file exists; with build isolation it may have been deleted.
function(list_nvccs result named_result)
  set(named "")
  if(CMAKE_CUDA_COMPILER)
    set(named CMAKE_CUDA_COMPILER)
    set(nvccs "${CMAKE_CUDA_COMPILER}")
  elseif(NOT "$ENV{CUDACXX}" STREQUAL "")
    set(named CUDACXX)
    set(nvccs "$ENV{CUDACXX}")
  elseif(EXISTS "${TORCHKILN_NVCC}")
    set(nvccs "${TORCHKILN_NVCC}")
  else()
    set(candidates "")
    toolkit_variables(variables)
    foreach(variable IN LISTS variables)
      list(APPEND candidates "${${variable}}/bin/nvcc")
    endforeach()
    cmake_path(GET Python_EXECUTABLE PARENT_PATH python_folder)
    list(APPEND candidates "${python_folder}/nvcc")
    find_program(system_nvcc nvcc NO_CACHE)
    list(APPEND candidates "${system_nvcc}" /usr/local/cuda/bin/nvcc)
    list(APPEND candidates "/usr/local/cuda-${TORCHKILN_TORCH_CUDA}/bin/nvcc")
    string(REGEX MATCH "^[0-9]+" major "${TORCHKILN_TORCH_CUDA}")
    foreach(folder IN LISTS TORCHKILN_NVIDIA_ROOTS)
      list(APPEND candidates "${folder}/cu${major}/bin/nvcc")
    endforeach()
    set(nvccs "")
    foreach(nvcc IN LISTS candidates)
      if(EXISTS "${nvcc}" AND NOT IS_DIRECTORY "${nvcc}")
        list(APPEND nvccs "${nvcc}")
      endif()
    endforeach()
    list(REMOVE_DUPLICATES nvccs)
  endif()
  if(named)
    # It may be the name of a program on PATH.
    find_program(program "${nvccs}" NO_CACHE)
    if(program)
      set(nvccs "${program}")
    endif()
  endif()
  set(${result} "${nvccs}" PARENT_SCOPE)
  set(${named_result} "${named}" PARENT_SCOPE)
endfunction()

# Reads the variables that may name a toolkit from the environment, into the caller's scope. `result`: the names of those
# that are set.
macro(toolkit_variables result)
  set(${result} "")
  foreach(variable IN ITEMS CUDAToolkit_ROOT CUDA_HOME CUDA_PATH)
    # CUDAToolkit_ROOT may also be set as a CMake variable, which comes first.
    if(NOT (variable STREQUAL "CUDAToolkit_ROOT" AND CUDAToolkit_ROOT))
      set(${variable} "$ENV{${variable}}")
    endif()
    if(NOT "${${variable}}" STREQUAL "")
      list(APPEND ${result} ${variable})
    endif()
  endforeach()
endmacro()

# The missing parts of the toolkit from wheels in `root`. Each part is a separate wheel, so one may be missing or have
# another version. The versions are recorded only in the metadata beside the package.
function(find_registry_gaps root version result)
  set(gaps "")
  foreach(part IN ITEMS nvidia_cuda_runtime nvidia_nvvm nvidia_cuda_crt nvidia_cuda_cccl)
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

# The wheels do not have the folder layout that nvcc and CMake expect. `bin` must be a real folder, since nvcc
# searches bin/.. for its other parts, and the libraries need names without a version.
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

# nvcc's headers state the newest g++ that it supports. Checked here, because nvcc's error is a page long.
function(check_host_compiler nvcc)
  cmake_path(GET nvcc PARENT_PATH root)
  cmake_path(GET root PARENT_PATH root)
  file(
    GLOB header
    "${root}/include/crt/host_config.h"
    "${root}/targets/*/include/crt/host_config.h"
  )
  if(CMAKE_CUDA_HOST_COMPILER OR NOT header OR NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    return()
  endif()
  list(GET header 0 header)
  file(STRINGS "${header}" line REGEX "__GNUC__ > [0-9]+" LIMIT_COUNT 1)
  string(REGEX MATCH "^#if __GNUC__ > ([0-9]+)" bound "${line}")
  if(bound AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL "${CMAKE_MATCH_1}.999")
    message(
      FATAL_ERROR
      "torchkiln: found g++ ${CMAKE_CXX_COMPILER_VERSION} (${CMAKE_CXX_COMPILER}), needed at most ${CMAKE_MATCH_1}, the "
      "newest that ${nvcc} takes. Type, with the name of an older one, one of\n"
      "  CXX=g++-${CMAKE_MATCH_1} python -m pip install ...\n"
      "  python -m pip install --no-build-isolation . -C torchkiln.cuda=off     (CPU only)"
    )
  endif()
endfunction()

# Selects a compiler. `found` lists the rejected ones with the reasons, for the message.
function(choose_nvcc nvcc_result found_result)
  set(found "")
  set(note "")
  list_nvccs(nvccs named)
  if(named)
    set(note " (named by ${named}: unset it)")
  else()
    toolkit_variables(variables)
    foreach(variable IN LISTS variables)
      if(NOT EXISTS "${${variable}}/bin/nvcc")
        string(APPEND found "\n  no bin/nvcc in ${variable}=${${variable}}: unset it")
      endif()
    endforeach()
  endif()
  foreach(nvcc IN LISTS nvccs)
    # nvcc searches for its parts beside the path by which it is called.
    cmake_path(GET nvcc PARENT_PATH root)
    if(IS_SYMLINK "${nvcc}" AND NOT EXISTS "${root}/nvcc.profile")
      file(REAL_PATH "${nvcc}" nvcc)
      cmake_path(GET nvcc PARENT_PATH root)
    endif()
    cmake_path(GET root PARENT_PATH root)
    nvcc_version("${nvcc}" version)
    set(gaps "")
    set(shadow "")
    if(version AND root MATCHES "/nvidia/cu[0-9]+$")
      find_registry_gaps("${root}" "${version}" gaps)
      set(shadow "${PROJECT_BINARY_DIR}/cuda-toolkit")
    endif()
    if(NOT EXISTS "${nvcc}")
      string(APPEND found "\n  no such program: ${nvcc}${note}")
    elseif(NOT version)
      string(APPEND found "\n  one that does not run: ${nvcc}${note}")
    elseif(gaps)
      string(APPEND found "\n  nvcc ${version} with ${gaps}: ${nvcc}${note}")
    elseif(version STREQUAL TORCHKILN_TORCH_CUDA OR TORCHKILN_ALLOW_CUDA_MISMATCH)
      if(NOT version STREQUAL TORCHKILN_TORCH_CUDA)
        message(
          WARNING
          "torchkiln: nvcc ${version} (${nvcc}) for a torch with CUDA ${TORCHKILN_TORCH_CUDA}, as "
          "TORCHKILN_ALLOW_CUDA_MISMATCH says. The kernels may not load or may fail at run time."
        )
      endif()
      message(STATUS "nvcc ${version}: ${nvcc}")
      if(found)
        message(STATUS "Not taken:${found}")
      endif()
      set(TORCHKILN_NVCC "${nvcc}" CACHE INTERNAL "The nvcc that was chosen")
      if(shadow)
        link_toolkit_together("${root}" "${shadow}")
        set(nvcc "${shadow}/bin/nvcc")
      endif()
      set(${nvcc_result} "${nvcc}" PARENT_SCOPE)
      return()
    else()
      string(APPEND found "\n  nvcc ${version}: ${nvcc}${note}")
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
    "torchkiln: found torch ${TORCHKILN_TORCH_VERSION} without CUDA (${TORCHKILN_TORCH_FOLDER}), needed one with CUDA for "
    "TORCHKILN_CUDA=ON. Type one of\n"
    "  ${Python_EXECUTABLE} -m pip install --force-reinstall torch==${TORCHKILN_TORCH_VERSION} "
    "--index-url https://download.pytorch.org/whl/cu130\n"
    "  python -m pip install --no-build-isolation . -C torchkiln.cuda=off"
  )
endif()

set(cpu_only "")
if(wanted MATCHES "OFF|FALSE")
  set(cpu_only "TORCHKILN_CUDA=${TORCHKILN_CUDA}")
elseif(wanted STREQUAL "AUTO" AND NOT TORCHKILN_TORCH_CUDA)
  set(cpu_only "torch ${TORCHKILN_TORCH_VERSION} has no CUDA")
elseif(wanted STREQUAL "AUTO" AND NOT gpu_visible)
  set(cpu_only "no GPU is visible; with -C torchkiln.cuda=on for GPUs all the same")
endif()

if(cpu_only)
  message(STATUS "Kernels for the CPU only: ${cpu_only}")
else()
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
      "${TORCHKILN_TORCH_VERSION}; found:${found}\nType, and build again:\n  ${remedy}"
    )
  else()
    message(
      FATAL_ERROR
      "torchkiln: needed nvcc ${TORCHKILN_TORCH_CUDA}, the CUDA version of torch ${TORCHKILN_TORCH_VERSION}; "
      "found:${found}\nType one of\n  ${remedy}\n"
      "  python -m pip install --no-build-isolation . -C torchkiln.allow-cuda-mismatch=on     (at your own risk)\n"
      "  python -m pip install --no-build-isolation . -C torchkiln.cuda=off                   (CPU only)"
    )
  endif()
endif()

if(TORCHKILN_WITH_CUDA)
  check_host_compiler("${nvcc}")
  torchkiln_cuda_architectures("${nvcc}" "${gpu_visible}" CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_COMPILER "${nvcc}")
  if(NOT CMAKE_CUDA_HOST_COMPILER)
    set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
  endif()
  # Links the CUDA runtime statically, as cuBLAS does, so that the kernels load beside a torch without CUDA or with a
  # newer one. Streams, memory and the current device belong to the driver and are shared by all runtimes.
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  if(CMAKE_CUDA_ARCHITECTURES STREQUAL "native")
    set(built_architectures "${CMAKE_CUDA_ARCHITECTURES_NATIVE}")
  else()
    set(built_architectures "${CMAKE_CUDA_ARCHITECTURES}")
  endif()
  message(STATUS "CUDA ${CMAKE_CUDA_COMPILER_VERSION} for ${built_architectures}: ${nvcc}")
endif()

# Finds Python, and every torch to build against: the one that Python imports, or those in the folders of
# TORCHKILN_TORCHES. cpp/ is built once per torch, and finds it again by find_package(Torch).
#
#   torchkiln_torches            minor versions, such as 2.13; for each of them:
#   torchkiln_torch_<fact>_2.13    VERSION 2.13.0, CUDA 13.0 or empty, FOLDER of the Python package
#   TORCHKILN_TORCH_<fact>       the same facts for the torch with the oldest CUDA version, since code compiled for it
#                                also runs with newer ones
#   TORCHKILN_NVIDIA_ROOTS       folders of NVIDIA's CUDA wheels
find_package(Python 3.11 COMPONENTS Interpreter Development.Module)
if(NOT Python_Interpreter_FOUND)
  message(
    FATAL_ERROR
    "torchkiln: found no Python, needed 3.11 or newer: -DPython_EXECUTABLE=/path/to/python3"
  )
elseif(NOT Python_Development.Module_FOUND)
  message(
    FATAL_ERROR
    "torchkiln: found ${Python_EXECUTABLE} ${Python_VERSION} without its C headers (Python.h). Type:\n"
    "  apt-get install python3-dev     (or: dnf install python3-devel)"
  )
endif()

# The torch that Python imports when `folder`, if given, comes first on its path.
macro(torchkiln_ask_python folder)
  set(script "${PROJECT_SOURCE_DIR}/cpp/cmake/tools/torch_requirement.py")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${script}")
  set(path "$ENV{PYTHONPATH}")
  if(NOT "${folder}" STREQUAL "")
    set(path "${folder}:${path}")
  endif()
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -E env "PYTHONPATH=${path}" "${Python_EXECUTABLE}" "${script}"
    OUTPUT_VARIABLE answer
    ERROR_VARIABLE error
    RESULT_VARIABLE failed
    OUTPUT_STRIP_TRAILING_WHITESPACE
  )
  if(failed)
    message(FATAL_ERROR "${error}")
  endif()
  if(NOT answer MATCHES "^([^\n]*)\n([^\n]*)\n([^\n]*)\n?([^\n]*)$")
    message(FATAL_ERROR "torchkiln: ${script} answered '${answer}'")
  endif()
  set(version "${CMAKE_MATCH_1}")
  set(cuda "${CMAKE_MATCH_2}")
  set(root "${CMAKE_MATCH_3}")
  set(TORCHKILN_NVIDIA_ROOTS "${CMAKE_MATCH_4}")
  if(version VERSION_LESS 2.11)
    message(
      FATAL_ERROR
      "torchkiln: found torch ${version} (${root}), needed 2.11 or newer. Type:\n"
      "  ${Python_EXECUTABLE} -m pip install --upgrade torch"
    )
  endif()
  if(NOT EXISTS "${root}/share/cmake/Torch/TorchConfig.cmake" OR NOT EXISTS "${root}/include")
    message(
      FATAL_ERROR
      "torchkiln: found a torch without its headers or its CMake package (${root}), needed both. Type:\n"
      "  ${Python_EXECUTABLE} -m pip install --force-reinstall torch"
    )
  endif()
  message(STATUS "torch ${version} (CUDA: ${cuda}): ${root}")
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" minor "${version}")
  if(minor IN_LIST torchkiln_torches)
    message(
      FATAL_ERROR
      "torchkiln: found torch ${version} (${root}) beside ${torchkiln_torch_FOLDER_${minor}}, needed one of each minor "
      "version in TORCHKILN_TORCHES"
    )
  endif()
  list(APPEND torchkiln_torches "${minor}")
  set(torchkiln_torch_VERSION_${minor} "${version}")
  set(torchkiln_torch_CUDA_${minor} "${cuda}")
  set(torchkiln_torch_FOLDER_${minor} "${root}")
endmacro()

set(torchkiln_torches "")
if(NOT TORCHKILN_TORCHES)
  torchkiln_ask_python("")
endif()
foreach(folder IN LISTS TORCHKILN_TORCHES)
  if(NOT EXISTS "${folder}/torch/version.py")
    message(
      FATAL_ERROR
      "torchkiln: found no torch in ${folder}, which TORCHKILN_TORCHES names. Type, with a version:\n"
      "  ${Python_EXECUTABLE} -m pip install --no-deps --target '${folder}' torch=="
    )
  endif()
  torchkiln_ask_python("${folder}")
endforeach()

list(GET torchkiln_torches 0 oldest)
foreach(minor IN LISTS torchkiln_torches)
  if("${torchkiln_torch_CUDA_${minor}}" VERSION_LESS "${torchkiln_torch_CUDA_${oldest}}")
    set(oldest "${minor}")
  endif()
endforeach()
foreach(fact IN ITEMS VERSION CUDA FOLDER)
  set(TORCHKILN_TORCH_${fact} "${torchkiln_torch_${fact}_${oldest}}")
endforeach()

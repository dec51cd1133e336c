# Finds Python and the torch in it, or the torches in the folders of TORCHKILN_TORCHES:
#   TORCHKILN_TORCHES_FOUND  their minor versions; of each:
#     TORCHKILN_TORCH_VERSION_2.13  2.13.0
#     TORCHKILN_TORCH_CUDA_2.13     13.0, or empty
#     TORCHKILN_TORCH_ROOT_2.13     the folder of the Python package
#   TORCHKILN_TORCH_VERSION, _CUDA, _ROOT  the same of the one with the oldest CUDA: whatever is compiled for an older
#                                          version of CUDA runs with a newer one
#   TORCHKILN_NVIDIA_ROOTS   where the registry's CUDA wheels lie
macro(torchkiln_find_torches)
  torchkiln_find_python()
  set(TORCHKILN_TORCHES_FOUND "")
  if(TORCHKILN_TORCHES)
    foreach(folder IN LISTS TORCHKILN_TORCHES)
      if(NOT EXISTS "${folder}/torch/version.py")
        message(
          FATAL_ERROR
          "torchkiln: found no torch in ${folder}, which TORCHKILN_TORCHES names. Type, with a version:\n"
          "  ${Python_EXECUTABLE} -m pip install --no-deps --target '${folder}' torch=="
        )
      endif()
      torchkiln_find_torch("${folder}")
    endforeach()
  else()
    torchkiln_find_torch("")
  endif()
  list(LENGTH TORCHKILN_TORCHES_FOUND count)
  list(GET TORCHKILN_TORCHES_FOUND 0 oldest)
  foreach(minor IN LISTS TORCHKILN_TORCHES_FOUND)
    if("${TORCHKILN_TORCH_CUDA_${minor}}" VERSION_LESS "${TORCHKILN_TORCH_CUDA_${oldest}}")
      set(oldest "${minor}")
    endif()
  endforeach()
  foreach(fact IN ITEMS VERSION CUDA ROOT)
    set(TORCHKILN_TORCH_${fact} "${TORCHKILN_TORCH_${fact}_${oldest}}")
  endforeach()
endmacro()

macro(torchkiln_find_python)
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
endmacro()

# The torch that Python imports when the folder, if any, comes first on its path.
macro(torchkiln_find_torch folder)
  set(script "${PROJECT_SOURCE_DIR}/cpp/cmake/torch_pin.py")
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
  message(STATUS "torch ${version} (CUDA: ${cuda}): ${root}")
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" minor "${version}")
  if(minor IN_LIST TORCHKILN_TORCHES_FOUND)
    message(
      FATAL_ERROR
      "torchkiln: found torch ${version} (${root}) beside ${TORCHKILN_TORCH_ROOT_${minor}}, needed one of each minor "
      "version in TORCHKILN_TORCHES"
    )
  endif()
  list(APPEND TORCHKILN_TORCHES_FOUND "${minor}")
  set(TORCHKILN_TORCH_VERSION_${minor} "${version}")
  set(TORCHKILN_TORCH_CUDA_${minor} "${cuda}")
  set(TORCHKILN_TORCH_ROOT_${minor} "${root}")
endmacro()

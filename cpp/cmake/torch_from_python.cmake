# Finds Python and the torch in it:
#   TORCHKILN_TORCH_VERSION  2.13.0
#   TORCHKILN_TORCH_CUDA     13.0, or empty
#   TORCHKILN_TORCH_ROOT     the folder of the Python package
#   TORCHKILN_NVIDIA_ROOTS   where the registry's CUDA wheels lie
macro(torchkiln_find_torch)
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

  set(script "${PROJECT_SOURCE_DIR}/cpp/cmake/torch_pin.py")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${script}")
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${script}"
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
  set(TORCHKILN_TORCH_VERSION "${CMAKE_MATCH_1}")
  set(TORCHKILN_TORCH_CUDA "${CMAKE_MATCH_2}")
  set(TORCHKILN_TORCH_ROOT "${CMAKE_MATCH_3}")
  set(TORCHKILN_NVIDIA_ROOTS "${CMAKE_MATCH_4}")
  if(TORCHKILN_TORCH_VERSION VERSION_LESS 2.11)
    message(
      FATAL_ERROR
      "torchkiln: found torch ${TORCHKILN_TORCH_VERSION} (${TORCHKILN_TORCH_ROOT}), needed 2.11 or newer. Type:\n"
      "  ${Python_EXECUTABLE} -m pip install --upgrade torch"
    )
  endif()
  message(
    STATUS
    "torch ${TORCHKILN_TORCH_VERSION} (CUDA: ${TORCHKILN_TORCH_CUDA}): ${TORCHKILN_TORCH_ROOT}"
  )
endmacro()

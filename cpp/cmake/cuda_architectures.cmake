# Turns TORCHKILN_CUDA_ARCHITECTURES into CMAKE_CUDA_ARCHITECTURES, before the language is enabled.
function(torchkiln_cuda_architectures nvcc gpu_visible result)
  set(wanted "${TORCHKILN_CUDA_ARCHITECTURES}")
  if(wanted STREQUAL "")
    set(wanted all)
    if(gpu_visible)
      set(wanted native)
    endif()
  endif()
  if(wanted STREQUAL "native" AND NOT gpu_visible)
    message(
      FATAL_ERROR
      "torchkiln: TORCHKILN_CUDA_ARCHITECTURES=native, but no GPU is visible. Name them instead, as in\n"
      "  -C torchkiln.cuda-architectures='80;90'"
    )
  endif()
  if(wanted STREQUAL "native")
    set(${result} native PARENT_SCOPE)
    return()
  endif()

  execute_process(
    COMMAND "${nvcc}" --list-gpu-arch
    OUTPUT_VARIABLE listed
    COMMAND_ERROR_IS_FATAL ANY
  )
  string(REGEX MATCHALL "[0-9]+" known "${listed}")
  if(wanted STREQUAL "all")
    # GPUs of 8.6 and 8.9 run the code for 8.0. Code built for them has the same size within 0.5 %.
    list(FILTER known INCLUDE REGEX "^(75|80|90|100|120)$")
    list(TRANSFORM known APPEND "-real" OUTPUT_VARIABLE wanted)
    # For GPUs newer than this nvcc, the driver compiles the PTX of the newest architecture at load time.
    list(GET known -1 newest)
    list(APPEND wanted ${newest}-virtual)
  endif()
  foreach(architecture IN LISTS wanted)
    string(REGEX REPLACE "[af]?(-real|-virtual)?$" "" number "${architecture}")
    if(NOT number IN_LIST known)
      list(JOIN known ", " known)
      message(
        FATAL_ERROR
        "torchkiln: found '${architecture}' in TORCHKILN_CUDA_ARCHITECTURES, needed native, all, or a list of what "
        "${nvcc} can compile: ${known}. Type, for example:\n"
        "  -C torchkiln.cuda-architectures='80;90'"
      )
    endif()
  endforeach()
  set(${result} "${wanted}" PARENT_SCOPE)
endfunction()

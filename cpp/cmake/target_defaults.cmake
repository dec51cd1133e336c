# What all our own targets share.
function(torchkiln_target_defaults target)
  set(werror $<$<BOOL:${TORCHKILN_WERROR}>:-Werror>)
  set(nvcc_werror $<$<BOOL:${TORCHKILN_WERROR}>:-Werror=all-warnings>)
  # Machine code shrinks to an eighth, at no cost that can be noticed; for a wheel, which is built once, to a twelfth.
  set(compress -Xfatbin=-compress-all $<$<BOOL:${TORCHKILN_TORCHES}>:--compress-mode=size>)
  target_compile_options(
    ${target}
    PRIVATE
      "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;${werror}>"
      "$<$<COMPILE_LANGUAGE:CUDA>:${nvcc_werror};${compress};-Xcompiler=-Wall,-Wextra>"
  )
  if(TORCHKILN_SANITIZE)
    set(sanitize -fsanitize=${TORCHKILN_SANITIZE} -fno-sanitize-recover=all)
    target_compile_options(
      ${target}
      PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${sanitize};-fno-omit-frame-pointer;-g1>"
    )
    target_link_options(${target} PRIVATE ${sanitize})
  endif()
  # Everything is resolved when a library is linked and again when it is loaded: a symbol that another torch does not
  # have becomes an ImportError, where lazy binding would end the process in the middle of a call.
  target_link_options(${target} PRIVATE LINKER:-z,now LINKER:--as-needed)
  set(exports "${PROJECT_SOURCE_DIR}/cpp/cmake/exports.map")
  target_link_options(${target} PRIVATE "LINKER:--version-script=${exports}")
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS "${exports}")
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "SHARED_LIBRARY") # a Python module finds Python's own symbols in the interpreter
    target_link_options(${target} PRIVATE LINKER:-z,defs)
  endif()
endfunction()

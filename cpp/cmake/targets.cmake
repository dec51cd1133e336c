# Settings of all targets of this project.

find_program(CCACHE ccache)
if(CCACHE)
  # ccache caches files that use a precompiled header only with these two settings.
  set(sloppiness CCACHE_SLOPPINESS=pch_defines,time_macros)
  set(
    CMAKE_CXX_COMPILER_LAUNCHER
    ${CMAKE_COMMAND}
    -E
    env
    ${sloppiness}
    ${CCACHE}
  )
  # Without this setting ccache compares what nvcc preprocesses for a GPU: it would not notice a change
  # of code for the host alone. With it, ccache compares the files that are read.
  set(
    CMAKE_CUDA_COMPILER_LAUNCHER
    ${CMAKE_COMMAND}
    -E
    env
    CCACHE_DEPEND=1
    ${CCACHE}
  )
endif()

# The sources of every family below `folder`: <family>.<extension>, or all such files in <family>/.
function(torchkiln_family_sources result folder extension)
  set(sources "")
  foreach(family IN LISTS torchkiln_families)
    file(
      GLOB found
      CONFIGURE_DEPENDS
      "${folder}/${family}.${extension}"
      "${folder}/${family}/*.${extension}"
    )
    list(APPEND sources ${found})
  endforeach()
  set(${result} "${sources}" PARENT_SCOPE)
endfunction()

function(torchkiln_target_defaults target)
  set(werror $<$<BOOL:${TORCHKILN_WERROR}>:-Werror>)
  set(nvcc_werror $<$<BOOL:${TORCHKILN_WERROR}>:-Werror=all-warnings>)
  # Compression reduces the machine code to an eighth, without a measurable cost at run time. Wheels use the slower mode,
  # which reduces it to a twelfth.
  set(compress -Xfatbin=-compress-all $<$<BOOL:${TORCHKILN_TORCHES}>:--compress-mode=size>)
  # Error messages name files of the source, not folders of the machine that built the wheel.
  set(names "-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=")
  # clang has no pragma ivdep. Where it cannot prove that memory is not shared, it checks at run time.
  set(clang "$<$<CXX_COMPILER_ID:Clang>:-Wno-unknown-pragmas>")
  target_compile_options(
    ${target}
    PRIVATE
      "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;${names};${clang};${werror}>"
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
  # Old tags make the run path come before LD_LIBRARY_PATH, which may have the libraries of another copy.
  target_link_options(${target} PRIVATE LINKER:--disable-new-dtags)
  # Symbols are resolved when a library is loaded, so a symbol that torch lacks becomes an ImportError. With lazy binding
  # the process would be terminated in the middle of a call.
  target_link_options(${target} PRIVATE LINKER:-z,now LINKER:--as-needed)
  set(exports "${PROJECT_SOURCE_DIR}/cpp/cmake/package/exports.map")
  target_link_options(${target} PRIVATE "LINKER:--version-script=${exports}")
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS "${exports}")
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "SHARED_LIBRARY") # a Python module finds Python's own symbols in the interpreter
    target_link_options(${target} PRIVATE LINKER:-z,defs)
  endif()
endfunction()

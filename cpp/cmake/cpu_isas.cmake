# The instruction sets for which each file of CPU kernels is compiled. cpp/include/torchkiln/cpu/isa.h selects one at run
# time. torchkiln_isas lists their names; torchkiln_flags_<name> has the compiler options.
set(torchkiln_isas baseline)
set(torchkiln_flags_baseline "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND torchkiln_isas avx2 avx512)
  set(torchkiln_flags_avx2 -mavx2 -mfma -mf16c -mbmi2)
  set(
    torchkiln_flags_avx512
    ${torchkiln_flags_avx2}
    -mavx512f
    -mavx512bw
    -mavx512vl
    -mavx512dq
    -mprefer-vector-width=512
  )
endif()

# The widest of these instruction sets that this processor has.
function(torchkiln_native_isa result)
  list(LENGTH torchkiln_isas count)
  if(count EQUAL 1 OR CMAKE_CROSSCOMPILING)
    set(${result} ${torchkiln_isas} PARENT_SCOPE)
    return()
  endif()
  execute_process(
    COMMAND "${CMAKE_CXX_COMPILER}" -march=native -dM -E -x c++ /dev/null
    OUTPUT_VARIABLE macros
    COMMAND_ERROR_IS_FATAL ANY
  )
  set(widest baseline)
  foreach(isa IN LISTS torchkiln_isas)
    set(flags ${torchkiln_flags_${isa}})
    list(FILTER flags INCLUDE REGEX "^-m[a-z0-9]+$") # -mavx2 defines __AVX2__
    set(missing FALSE)
    foreach(flag IN LISTS flags)
      string(REPLACE "-m" "__" macro ${flag})
      string(TOUPPER ${macro}__ macro)
      if(NOT macros MATCHES "#define ${macro} 1")
        set(missing TRUE)
      endif()
    endforeach()
    if(NOT missing)
      set(widest ${isa})
    endif()
  endforeach()
  set(${result} ${widest} PARENT_SCOPE)
endfunction()

# An object library for one instruction set; an empty name stands for files that are compiled once.
function(torchkiln_for_instruction_set target isa)
  target_compile_options(
    ${target}
    PRIVATE -fno-math-errno -fno-trapping-math ${torchkiln_flags_${isa}}
  )
  list(LENGTH torchkiln_isas count)
  if(count GREATER 1)
    target_compile_definitions(${target} PRIVATE TORCHKILN_ALL_ISAS=1)
  endif()
  if(isa)
    target_compile_definitions(${target} PRIVATE TORCHKILN_ISA=${isa})
  endif()
  list(GET torchkiln_isas 0 first)
  if(isa STREQUAL first)
    target_compile_definitions(${target} PRIVATE TORCHKILN_CPU_ENTRIES=1)
  endif()
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
endfunction()

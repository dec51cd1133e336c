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

# An object library for one instruction set; an empty name stands for files that are compiled once.
function(torchkiln_for_instruction_set target isa)
  target_compile_options(
    ${target}
    PRIVATE -fno-math-errno -fno-trapping-math ${torchkiln_flags_${isa}}
  )
  if("avx2" IN_LIST torchkiln_isas)
    target_compile_definitions(${target} PRIVATE TORCHKILN_HAS_X86_ISAS=1)
  endif()
  if(isa)
    target_compile_definitions(${target} PRIVATE TORCHKILN_ISA=${isa})
  endif()
  if(isa STREQUAL "baseline")
    target_compile_definitions(${target} PRIVATE TORCHKILN_BASELINE=1)
  endif()
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
endfunction()

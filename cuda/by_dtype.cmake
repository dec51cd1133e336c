# Sources that compile a launcher for one dtype each, to keep the compile time of each below 15 s. The header
# ops/<family>/<name>_by_dtype.cuh defines torchkiln::cuda::<FamilyName>ByDtype<T>, a struct with the launcher.
function(torchkiln_by_dtype_sources result)
  set(types_float32 float double) # few calls have float64
  set(types_float16 __half)
  set(types_bfloat16 __nv_bfloat16)
  set(sources "${${result}}")
  foreach(family IN LISTS torchkiln_families)
    file(
      GLOB headers
      CONFIGURE_DEPENDS
      RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}/ops"
      "ops/${family}/*_by_dtype.cuh"
    )
    foreach(header IN LISTS headers)
      cmake_path(GET header STEM stem)
      set(launcher "")
      string(REPLACE "_" ";" words "${family}_${stem}")
      foreach(word IN LISTS words)
        string(SUBSTRING "${word}" 0 1 first)
        string(SUBSTRING "${word}" 1 -1 rest)
        string(TOUPPER "${first}" first)
        string(APPEND launcher "${first}${rest}")
      endforeach()
      foreach(dtype IN ITEMS float32 float16 bfloat16)
        set(instances "${types_${dtype}}")
        list(TRANSFORM instances REPLACE "(.+)" "template struct torchkiln::cuda::${launcher}<\\1>")
        list(JOIN instances ";\n" instances)
        set(source "${CMAKE_CURRENT_BINARY_DIR}/by_dtype/${family}_${stem}_${dtype}.cu")
        configure_file("${CMAKE_CURRENT_SOURCE_DIR}/by_dtype.cu.in" "${source}" @ONLY)
        list(APPEND sources "${source}")
      endforeach()
    endforeach()
  endforeach()
  set(${result} "${sources}" PARENT_SCOPE)
endfunction()

# Sources with the kernels of elementwise ops that consist of a formula (torchkiln/core/formula.h). The header
# .../<project>/kernels/<name>.h defines the formula <project>::formulas::<Name>.
set(torchkiln_FORMULA_DIR "${CMAKE_CURRENT_LIST_DIR}")

# Writes the source of each formula in one language, cpp or cu, and appends its path to the list `result`.
function(torchkiln_formula_sources result language project)
  set(sources "${${result}}")
  foreach(name IN LISTS ARGN)
    string(REPLACE "_" ";" words "${name}")
    set(type "${project}::formulas::")
    foreach(word IN LISTS words)
      string(SUBSTRING "${word}" 0 1 first)
      string(SUBSTRING "${word}" 1 -1 rest)
      string(TOUPPER "${first}" first)
      string(APPEND type "${first}${rest}")
    endforeach()
    set(header "${project}/kernels/${name}.h")
    set(source "${CMAKE_CURRENT_BINARY_DIR}/formulas/${name}.${language}")
    configure_file("${torchkiln_FORMULA_DIR}/formula.${language}.in" "${source}" @ONLY)
    list(APPEND sources "${source}")
  endforeach()
  set(${result} "${sources}" PARENT_SCOPE)
endfunction()

#pragma once

#include <pybind11/pybind11.h>

/// start_recording() and stop_recording(), for torchkiln.explain.
void define_explain(pybind11::module_& module);

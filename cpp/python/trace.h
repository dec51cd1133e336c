#pragma once

#include <pybind11/pybind11.h>

/// start_recording() and stop_recording(), for torchkiln.explain.
void bind_trace(pybind11::module_& module);

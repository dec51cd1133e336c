#pragma once

#include <pybind11/pybind11.h>

/// Watch and needs_gradient(), for copies of parameters that are kept from call to call.
void bind_watch(pybind11::module_& module);

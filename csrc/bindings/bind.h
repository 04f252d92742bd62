// One function per concept; module.cpp calls them in order.
#pragma once

#include <pybind11/pybind11.h>

#include "base/error.h"
#include "base/seal.h"

namespace farandole {

namespace py = pybind11;

/// For types whose destructors may wait for devices and threads, which may need Python's lock.
inline constexpr py::release_gil_before_calling_cpp_dtor kEndsUnlocked{};

void bind_errors(py::module_& module);
void bind_arrays(py::module_& module);
void bind_group(py::module_& module);
void bind_world(py::module_& module);
void bind_guarded(py::module_& module);
void bind_verbs(py::module_& module);
void bind_mpi_port(py::module_& module);
void bind_named(py::module_& module);
void bind_bucket_step(py::module_& module);
void bind_reducer(py::module_& module);
void bind_update(py::module_& module);
void bind_weights(py::module_& module);
void bind_fold(py::module_& module);
void bind_schedule(py::module_& module);
void bind_tuner(py::module_& module);
void bind_plugins(py::module_& module);
void bind_watch(py::module_& module);
void bind_trace(py::module_& module);
void bind_jax(py::module_& module);
void bind_cuda(py::module_& module);
void bind_devices(py::module_& module);
void bind_device_gradients(py::module_& module);

/// A job's. Throws Error(invalid_argument).
Key secret_from(const py::bytes& secret);

void raise_in_python(const Error& error);
py::object python_error(const Error& error);

}  // namespace farandole

// Arrays of other libraries as engine buffers: anything with the buffer protocol or DLPack, or a
// Buffer that says itself where it lies.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <utility>

#include "stream/operation.h"

namespace farandole {

namespace py = pybind11;

/// A borrowed array: a buffer, and what keeps its memory alive while it is borrowed.
struct Borrowed {
  Buffer buffer;
  py::object owner;
};

/// Throws Error(invalid_argument) naming `what` for arrays that are not contiguous, not on the
/// host, of an unknown dtype, or read-only when they are to be written.
Borrowed borrow(const py::object& array, bool writable, const char* what);

/// Kind and number of the device, as DLPack's owner says; nothing where it does not say.
std::optional<std::pair<int, int>> dlpack_device(const py::object& array);
/// The error for an array on an unsupported kind of device. `kind`: DLPack's number.
Error wrong_kind(const char* what, int kind);

/// Holds Python objects for the engine, whose threads never take Python's lock: released objects
/// are put aside and dropped by the next call that holds it.
std::shared_ptr<const void> keep(const py::object& a, const py::object& b);
void drop_released();

/// Memory that all ranks map, with the buffer protocol: bytes.
struct SharedMemory {
  std::shared_ptr<std::byte> data;
  size_t bytes = 0;
};

void bind_arrays(py::module_& module);

}  // namespace farandole

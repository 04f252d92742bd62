// Arrays that are read without asking Python: an exact numpy.ndarray by its head, our own Buffer,
// and tensors whose type offers DLPack's C functions. Tens of nanoseconds, where the buffer
// protocol takes hundreds and a DLPack capsule thousands.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <span>

#include "bindings/dlpack.h"
#include "stream/operation.h"

namespace farandole {

namespace py = pybind11;

/// The array as a buffer if it is of a known type and fit: contiguous, in host memory, of an
/// element type of ours, writable if it must be. False for any other: bindings/arrays.h knows what
/// it is or what is wrong with it. Raises nothing. Written in place: a copy in wider words than
/// those just written waits for them to reach the cache.
bool look_at(PyObject* array, bool writable, Buffer& to) noexcept;

/// The same, for an exact numpy.ndarray alone.
bool look_at_numpy(PyObject* array, bool writable, Buffer& to) noexcept;

/// The same, for tensors alone, with their shape: it lies in the tensor.
struct LookedAt {
  Buffer buffer;
  std::span<const int64_t> shape;
};
std::optional<LookedAt> look_at_tensor(PyObject* tensor) noexcept;

/// PyTorch's negated views: their memory holds other numbers than they show, and __dlpack__ gives
/// it out all the same.
bool is_negated(PyObject* tensor) noexcept;

/// The stream in which this thread orders its work on a device, of an array whose type offers
/// DLPack's C functions; nothing for others.
std::optional<uint64_t> current_stream_of(PyObject* array, int device_type, int device) noexcept;

/// The first dimension of an array that look_at knows; nothing for one without, and for a Buffer.
std::optional<int64_t> look_at_rows(PyObject* array) noexcept;

/// An uninitialised numpy.ndarray of the shape and dtype of one that look_at_numpy knows; null with
/// a Python error.
PyObject* empty_like(PyObject* array) noexcept;

/// Learns what numpy's arrays look like; to be called by a module that has imported numpy. Where
/// they look otherwise than we expect, none is ever known.
void learn_numpy();

/// Learns the Python type of a Buffer that says itself where it lies; `look` raises nothing.
void learn_pointed(PyTypeObject* type, Buffer (*look)(PyObject*));

std::optional<DType> dtype_of_dlpack(uint8_t code, uint8_t bits);
bool is_contiguous(const DlTensor& tensor);

}  // namespace farandole

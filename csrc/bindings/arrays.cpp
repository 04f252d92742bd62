#include "bindings/arrays.h"

#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "bindings/known_arrays.h"

namespace farandole {
namespace {

Error invalid(const char* what, const std::string& text) {
  return Error(ErrorCode::invalid_argument, std::string(what) + " " + text);
}

constexpr const char* kNoMemory = "has no memory: it was freed, or it only stands in for a tensor";

// ---- the buffer protocol ----

/// Integers go by size and sign, as several of C's types have one size. Signed letters are small.
std::optional<DType> dtype_of_format(const char* format, size_t bytes) {
  if (format == nullptr) return DType::uint8;
  const char code =
      format[0] == '@' || format[0] == '=' || format[0] == '<' ? format[1] : format[0];
  if (code == 'c') return bytes == 1 ? std::optional(DType::uint8) : std::nullopt;
  const bool is_integer = code != 0 && std::strchr("bhilqnBHILQN", code) != nullptr;
  return dtype_where([&](const DTypeRow& r) {
    if (r.bytes != bytes || (r.kind == DTypeKind::integer) != is_integer) return false;
    return is_integer ? (r.codes.buffer >= 'a') == (code >= 'a') : r.codes.buffer == code;
  });
}

Borrowed borrow_buffer(const py::object& array, bool writable, const char* what) {
  Py_buffer view;
  const int flags = PyBUF_FORMAT | PyBUF_STRIDES | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(array.ptr(), &view, flags) != 0) {
    PyErr_Clear();
    throw invalid(what, writable ? "is read-only or cannot be borrowed" : "cannot be borrowed");
  }
  const bool contiguous = PyBuffer_IsContiguous(&view, 'C') != 0;
  const auto dtype = dtype_of_format(view.format, static_cast<size_t>(view.itemsize));
  const std::string format = view.format != nullptr ? view.format : "";
  const Buffer buffer{static_cast<std::byte*>(view.buf),
                      view.itemsize > 0 ? static_cast<size_t>(view.len / view.itemsize) : 0,
                      dtype.value_or(DType::uint8)};
  PyBuffer_Release(&view);  // the caller holds the array itself
  if (!dtype) throw invalid(what, "has an unsupported element type (format '" + format + "')");
  if (!contiguous) throw invalid(what, "is not contiguous; pass a contiguous copy");
  return {buffer, array};
}

// ---- DLPack ----

/// As DLPack numbers kinds of devices, as far as frameworks use them.
const char* name_of_kind(int kind) {
  switch (kind) {
    case 2:
      return "on a CUDA device";
    case 3:
      return "in pinned memory of CUDA";
    case 8:
      return "on a Metal device";
    case 10:
      return "on a ROCm device";
    case 11:
      return "in pinned memory of ROCm";
    case 13:
      return "in managed memory of CUDA";
    case 14:
      return "on a oneAPI device";
    default:
      return "on a device of another kind";
  }
}

Borrowed borrow_dlpack(const py::object& array, const char* what) {
  if (const auto device = dlpack_device(array); device && device->first != kDlHost)
    throw wrong_kind(what, device->first);
  if (is_negated(array.ptr())) throw invalid(what, "is a negated view; pass tensor.resolve_neg()");
  py::object capsule;
  try {
    capsule = array.attr("__dlpack__")();
  } catch (py::error_already_set& error) {
    throw invalid(what, "cannot be borrowed: " + std::string(py::str(error.value())));
  }
  const auto* t = static_cast<const DlTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (t == nullptr) throw py::error_already_set();
  if (t->device.type != kDlHost) throw wrong_kind(what, t->device.type);
  if (!is_contiguous(*t)) throw invalid(what, "is not contiguous; pass a contiguous copy");
  const auto dtype = dtype_of_dlpack(t->dtype.code, t->dtype.bits);
  if (!dtype || t->dtype.lanes != 1) throw invalid(what, "has an unsupported element type");
  size_t count = 1;
  for (int i = 0; i < t->ndim; ++i) count *= static_cast<size_t>(t->shape[i]);
  if (t->data == nullptr && count > 0) throw invalid(what, kNoMemory);
  return {{static_cast<std::byte*>(t->data) + t->byte_offset, count, *dtype}, array};
}

// ---- objects the engine has let go of ----

struct Released {
  std::mutex mutex;
  std::vector<PyObject*> objects;
};
Released& released() {
  static auto* list = new Released;  // outlives every engine thread
  return *list;
}

/// A Buffer made in Python from a pointer: for frameworks' tensors.
struct PointedBuffer {
  Buffer buffer;
  py::object owner;
};

Buffer look_at_pointed(PyObject* array) {
  return py::handle(array).cast<const PointedBuffer&>().buffer;
}

}  // namespace

std::optional<std::pair<int, int>> dlpack_device(const py::object& array) {
  if (!py::hasattr(array, "__dlpack_device__")) return std::nullopt;
  try {
    const py::tuple said = array.attr("__dlpack_device__")();
    return std::pair(py::int_(said[0]).cast<int>(), said[1].cast<int>());
  } catch (py::error_already_set&) {  // borrow() finds the words for what is wrong
    return std::nullopt;
  }
}

Error wrong_kind(const char* what, int kind) {
  return Error(ErrorCode::invalid_argument,
               std::string(what) + " is " + name_of_kind(kind) + " (DLPack's kind " +
                   std::to_string(kind) + "), which is not supported",
               {}, "pass a copy in the host's memory, or in memory of a CUDA device");
}

Borrowed borrow(const py::object& array, bool writable, const char* what) {
  if (Buffer known; look_at(array.ptr(), writable, known)) return {known, array};
  if (PyObject_CheckBuffer(array.ptr()) != 0) return borrow_buffer(array, writable, what);
  if (py::hasattr(array, "__dlpack__")) return borrow_dlpack(array, what);
  throw invalid(what, "is a " + std::string(py::str(py::type::of(array).attr("__name__"))) +
                          ", which has neither the buffer protocol nor __dlpack__");
}

std::shared_ptr<const void> keep(const py::object& a, const py::object& b) {
  drop_released();
  PyObject* both = py::make_tuple(a, b).release().ptr();
  return {both, [](const void* p) {
            Released& list = released();
            const std::lock_guard lock(list.mutex);
            list.objects.push_back(static_cast<PyObject*>(const_cast<void*>(p)));
          }};
}

void drop_released() {
  std::vector<PyObject*> objects;
  {
    const std::lock_guard lock(released().mutex);
    objects.swap(released().objects);
  }
  for (PyObject* object : objects) Py_DECREF(object);
}

void bind_arrays(py::module_& module) {
  py::class_<PointedBuffer> pointed(
      module, "Buffer",
      "Host memory by address, for frameworks' tensors: `count` elements of `dtype` at `pointer`, "
      "alive as long as `owner`.");
  learn_pointed(reinterpret_cast<PyTypeObject*>(pointed.ptr()), look_at_pointed);
  pointed.def(
      py::init([](uintptr_t pointer, size_t count, const std::string& dtype, py::object owner) {
        const auto known = dtype_named(dtype);
        if (!known)
          throw Error(ErrorCode::invalid_argument, "dtype " + dtype + " is not supported");
        if (pointer == 0 && count > 0) throw invalid("tensor", kNoMemory);
        return PointedBuffer{{reinterpret_cast<std::byte*>(pointer), count, *known},
                             std::move(owner)};
      }),
      py::arg("pointer"), py::arg("count"), py::arg("dtype"), py::arg("owner") = py::none());
  py::class_<SharedMemory, std::shared_ptr<SharedMemory>>(
      module, "SharedMemory", py::buffer_protocol(),
      "Bytes that every rank of the host maps. Released with its last view.")
      .def_buffer([](SharedMemory& m) {
        return py::buffer_info(m.data.get(), 1, py::format_descriptor<uint8_t>::format(), 1,
                               {m.bytes}, {1});
      })
      .def_property_readonly(
          "pointer",
          [](const SharedMemory& m) { return reinterpret_cast<uintptr_t>(m.data.get()); })
      .def_readonly("nbytes", &SharedMemory::bytes);
  py::list dtypes;
  for (const DTypeRow& r : kDTypes) dtypes.append(std::string(r.name));
  module.attr("dtypes") = py::tuple(dtypes);
  py::list ops;
  for (const ReduceOpRow& r : kReduceOps) ops.append(std::string(r.name));
  module.attr("reduce_ops") = py::tuple(ops);
}

}  // namespace farandole

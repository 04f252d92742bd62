#include "bindings/known_arrays.h"

#include <pybind11/stl.h>

#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace farandole {
namespace {

using namespace py::literals;

// ---- numpy: the heads of its objects, which are part of its binary interface ----

struct NumpyDtype {
  PyObject_HEAD PyTypeObject* scalar;
  char kind, code, byte_order, flags;
  int number;
};

struct NumpyArray {
  PyObject_HEAD char* data;
  int ndim;
  Py_ssize_t* shape;
  Py_ssize_t* strides;
  PyObject* base;
  NumpyDtype* dtype;
  int flags;
};
constexpr int kContiguous = 0x1, kAligned = 0x100, kWritable = 0x400;

struct Numpy {
  PyTypeObject* type = nullptr;  // null: not learned
  PyObject* empty = nullptr;
  PyObject *shape = nullptr, *dtype = nullptr;  // names
  std::array<signed char, 32> dtypes{};         // by numpy's number; -1: none of ours
};
Numpy numpy;  // of the one interpreter; lives as long as the process

constexpr int kFirstForeignNumber = 256;  // dtypes that other packages bring are numbered from here

std::optional<DType> dtype_of(const NumpyDtype& dtype) {
  if (dtype.byte_order != '=' && dtype.byte_order != '|') return std::nullopt;
  const auto number = static_cast<size_t>(dtype.number);
  if (number < numpy.dtypes.size() && numpy.dtypes[number] >= 0)
    return static_cast<DType>(numpy.dtypes[number]);
  if (dtype.number >= kFirstForeignNumber &&
      std::string_view(dtype.scalar->tp_name) == "ml_dtypes.bfloat16")
    return DType::bfloat16;
  return std::nullopt;
}

const NumpyArray& head_of(const py::handle& array) {
  return *reinterpret_cast<const NumpyArray*>(array.ptr());
}

/// Whether the head says what the array's own attributes say.
bool reads_right(const py::handle& array) {
  const NumpyArray& head = head_of(array);
  const auto shape = array.attr("shape").cast<std::vector<Py_ssize_t>>();
  const auto strides = array.attr("strides").cast<std::vector<Py_ssize_t>>();
  const py::tuple data = array.attr("__array_interface__")["data"];
  const py::handle dtype = array.attr("dtype");
  const py::object flags = array.attr("flags");
  if (head.ndim != static_cast<int>(shape.size())) return false;
  for (size_t i = 0; i < shape.size(); ++i)
    if (head.shape[i] != shape[i] || head.strides[i] != strides[i]) return false;
  const auto has = [&](int flag) { return (head.flags & flag) != 0; };
  return reinterpret_cast<uintptr_t>(head.data) == data[0].cast<uintptr_t>() &&
         reinterpret_cast<PyObject*>(head.dtype) == dtype.ptr() &&
         head.dtype->number == dtype.attr("num").cast<int>() &&
         head.dtype->byte_order == dtype.attr("byteorder").cast<std::string>()[0] &&
         has(kContiguous) == flags.attr("c_contiguous").cast<bool>() &&
         has(kWritable) == flags.attr("writeable").cast<bool>() &&
         has(kAligned) == flags.attr("aligned").cast<bool>();
}

bool all_read_right(const py::module_& np) {
  const py::object table = np.attr("arange")(24, "dtype"_a = "float32").attr("reshape")(2, 3, 4);
  const py::object turned = table.attr("T");
  const py::object other = np.attr("zeros")(py::make_tuple(3, 1), "dtype"_a = ">i8");
  const py::object fixed = np.attr("ones")(5, "dtype"_a = "bool");
  fixed.attr("setflags")("write"_a = false);
  return reads_right(table) && reads_right(turned) && reads_right(other) && reads_right(fixed);
}

void learn_dtypes(const py::module_& np) {
  numpy.dtypes.fill(-1);
  for (const char code : std::string_view("?bBhHiIlLqQefd")) {
    const py::object dtype = np.attr("dtype")(std::string(1, code));
    const auto name = dtype.attr("name").cast<std::string>();
    const auto number = dtype.attr("num").cast<size_t>();
    const auto ours = dtype_named(name);
    if (ours && number < numpy.dtypes.size())
      numpy.dtypes[number] = static_cast<signed char>(*ours);
  }
}

// ---- our own Buffer ----

struct Pointed {
  PyTypeObject* type = nullptr;
  Buffer (*look)(PyObject*) = nullptr;
};
Pointed known_pointed;

// ---- types with DLPack's C functions ----

struct Tensors {
  PyTypeObject* type = nullptr;  // the last one met, kept alive; null: none yet
  int (*look)(void*, DlTensor*) = nullptr;
  int (*current_stream)(int32_t, int32_t, void**) = nullptr;
  bool has_gradients = false;
};
Tensors known_tensors;

/// The functions of exactly this type: a subclass may be something else.
bool offers_look(PyTypeObject* type) {
  if (type == known_tensors.type) return known_tensors.look != nullptr;
  known_tensors.look = nullptr;
  known_tensors.current_stream = nullptr;
  Py_INCREF(type);
  Py_XDECREF(known_tensors.type);
  known_tensors.type = type;
  PyObject* capsule = type->tp_dict == nullptr
                          ? nullptr
                          : PyDict_GetItemString(type->tp_dict, "__dlpack_c_exchange_api__");
  if (capsule == nullptr || PyCapsule_IsValid(capsule, "dlpack_exchange_api") == 0) return false;
  const auto* api =
      static_cast<const DlExchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (api->version.major != 1) return false;
  known_tensors.look = api->look;
  known_tensors.current_stream = api->current_stream;
  known_tensors.has_gradients =
      PyObject_HasAttrString(reinterpret_cast<PyObject*>(type), "requires_grad") != 0;
  return known_tensors.look != nullptr;
}

/// __dlpack__ refuses a tensor that autograd watches; so do we.
bool is_watched(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  PyObject* answer = PyObject_GetAttr(tensor, name);
  const bool watched = answer != Py_False;
  Py_XDECREF(answer);
  if (answer == nullptr) PyErr_Clear();
  return watched;
}

}  // namespace

bool is_negated(PyObject* tensor) noexcept {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  PyObject* answer = PyObject_CallMethodNoArgs(tensor, name);
  const bool negated = answer == Py_True;
  Py_XDECREF(answer);
  if (answer == nullptr) PyErr_Clear();
  return negated;
}

std::optional<LookedAt> look_at_tensor(PyObject* array) noexcept {
  if (!offers_look(Py_TYPE(array))) return std::nullopt;
  if (known_tensors.has_gradients && (is_watched(array) || is_negated(array))) return std::nullopt;
  DlTensor t;
  if (known_tensors.look(array, &t) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  const auto dtype = dtype_of_dlpack(t.dtype.code, t.dtype.bits);
  if (!dtype || t.dtype.lanes != 1 || t.device.type != 1 || !is_contiguous(t)) return std::nullopt;
  size_t count = 1;
  for (int i = 0; i < t.ndim; ++i) count *= static_cast<size_t>(t.shape[i]);
  if (t.data == nullptr && count > 0) return std::nullopt;
  return LookedAt{{static_cast<std::byte*>(t.data) + t.byte_offset, count, *dtype},
                  {t.shape, static_cast<size_t>(t.ndim)}};
}

std::optional<uint64_t> current_stream_of(PyObject* array, int device_type, int device) noexcept {
  offers_look(Py_TYPE(array));
  if (known_tensors.current_stream == nullptr) return std::nullopt;
  void* stream = nullptr;
  if (known_tensors.current_stream(device_type, device, &stream) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  return reinterpret_cast<uint64_t>(stream);
}

void learn_pointed(PyTypeObject* type, Buffer (*look)(PyObject*)) { known_pointed = {type, look}; }

bool look_at_numpy(PyObject* array, bool writable, Buffer& to) noexcept {
  if (Py_TYPE(array) != numpy.type) return false;
  const NumpyArray& head = head_of(array);
  const int needed = writable ? kContiguous | kWritable : kContiguous;
  if ((head.flags & needed) != needed) return false;
  const auto dtype = dtype_of(*head.dtype);
  if (!dtype) return false;
  size_t count = 1;
  for (int i = 0; i < head.ndim; ++i) count *= static_cast<size_t>(head.shape[i]);
  to.data = reinterpret_cast<std::byte*>(head.data);
  to.count = count;
  to.dtype = *dtype;
  return true;
}

bool look_at(PyObject* array, bool writable, Buffer& to) noexcept {
  if (Py_TYPE(array) == numpy.type) return look_at_numpy(array, writable, to);
  if (known_pointed.type != nullptr && PyType_IsSubtype(Py_TYPE(array), known_pointed.type) != 0) {
    to = known_pointed.look(array);
    return true;
  }
  const auto looked = look_at_tensor(array);
  if (looked) to = looked->buffer;
  return looked.has_value();
}

std::optional<int64_t> look_at_rows(PyObject* array) noexcept {
  if (Py_TYPE(array) == numpy.type) {
    const NumpyArray& head = head_of(array);
    return head.ndim > 0 ? std::optional<int64_t>(head.shape[0]) : std::nullopt;
  }
  const auto looked = look_at_tensor(array);
  return looked && !looked->shape.empty() ? std::optional(looked->shape[0]) : std::nullopt;
}

PyObject* empty_like(PyObject* array) noexcept {
  const NumpyArray& head = head_of(array);
  PyObject* shape =
      head.ndim == 1 ? PyLong_FromSsize_t(head.shape[0]) : PyObject_GetAttr(array, numpy.shape);
  if (shape == nullptr) return nullptr;
  PyObject* arguments[] = {shape, reinterpret_cast<PyObject*>(head.dtype)};
  PyObject* made = PyObject_Vectorcall(numpy.empty, arguments, 2, nullptr);
  Py_DECREF(shape);
  return made;
}

void learn_numpy() {
  if (numpy.type != nullptr) return;
  const py::module_ np = py::module_::import("numpy");
  if (!all_read_right(np)) return;
  learn_dtypes(np);
  numpy.empty = py::object(np.attr("empty")).release().ptr();
  numpy.shape = PyUnicode_InternFromString("shape");
  numpy.type = reinterpret_cast<PyTypeObject*>(py::object(np.attr("ndarray")).release().ptr());
}

std::optional<DType> dtype_of_dlpack(uint8_t code, uint8_t bits) {
  return dtype_where(
      [&](const DTypeRow& r) { return r.codes.dlpack == code && 8 * r.bytes == bits; });
}

bool is_contiguous(const DlTensor& t) {
  if (t.strides == nullptr) return true;
  int64_t expected = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    if (t.shape[i] == 0) return true;
    if (t.shape[i] != 1 && t.strides[i] != expected) return false;
    expected *= t.shape[i];
  }
  return true;
}

}  // namespace farandole

#include "bindings/device_arrays.h"

#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "bindings/known_arrays.h"
#include "devices/library.h"

namespace farandole {
namespace {

constexpr int kNoStream = -1;  // in DLPack: no stream is to wait

Error unfit(const char* what, const std::string& text, const std::string& advice = {}) {
  return Error(ErrorCode::invalid_argument, std::string(what) + " " + text, {}, advice);
}

/// Calls into an array's owner; an exception becomes an error about this argument.
template <typename Ask>
auto asked(const char* what, const Ask& ask) {
  try {
    return ask();
  } catch (py::error_already_set& error) {
    throw unfit(what, "cannot be borrowed: " + std::string(py::str(error.value())));
  } catch (const py::cast_error&) {
    throw unfit(what, "cannot be borrowed: it does not say of itself what it should");
  }
}

/// An array as a framework describes it that is asked for its stream in its own way.
struct PointedOnDevice {
  Buffer buffer;
  int device = 0;
  py::object current_stream;  // () -> int
  py::object owner;
};

const PointedOnDevice* pointed(const py::object& array) {
  return py::isinstance<PointedOnDevice>(array) ? &array.cast<const PointedOnDevice&>() : nullptr;
}

bool has_interface(const py::object& array) {
  return py::hasattr(array, "__cuda_array_interface__");
}

// ---- __cuda_array_interface__ ----

bool is_contiguous(const std::vector<int64_t>& shape, const py::object& strides, size_t width) {
  if (strides.is_none()) return true;
  const auto given = strides.cast<std::vector<int64_t>>();
  auto expected = static_cast<int64_t>(width);
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] == 0) return true;
    if (shape[i] != 1 && given[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

std::optional<DType> dtype_of_typestr(const std::string& text) {
  if (text.empty() || text[0] == '>') return std::nullopt;
  const py::object dtype = py::module_::import("numpy").attr("dtype")(text);
  return dtype_named(dtype.attr("name").cast<std::string>());
}

/// An array's __cuda_array_interface__.
struct Interface {
  py::dict said;
  std::vector<int64_t> shape;
  uint64_t address = 0;
  bool read_only = false;
  std::optional<uint64_t> stream;

  explicit Interface(const py::object& array)
      : said(array.attr("__cuda_array_interface__")),
        shape(said["shape"].cast<std::vector<int64_t>>()) {
    const py::tuple data = said["data"];
    address = data[0].cast<uint64_t>();
    read_only = data[1].cast<bool>();
    if (const py::object given = optional("stream"); !given.is_none())
      stream = given.cast<uint64_t>();
  }
  py::object optional(const char* name) const {
    return said.contains(name) ? py::object(said[name]) : py::none();
  }
  size_t count() const {
    size_t elements = 1;
    for (const int64_t n : shape) elements *= static_cast<size_t>(n);
    return elements;
  }
};

Buffer buffer_of(const Interface& from, bool writable, const char* what) {
  const auto dtype = asked(what, [&] { return dtype_of_typestr(py::str(from.said["typestr"])); });
  if (!dtype) throw unfit(what, "has an unsupported element type");
  if (!is_contiguous(from.shape, from.optional("strides"), size_of(*dtype)))
    throw unfit(what, "is not contiguous; pass a contiguous copy");
  if (!from.optional("mask").is_none()) throw unfit(what, "has a mask");
  if (writable && from.read_only) throw unfit(what, "is read-only or cannot be borrowed");
  return {reinterpret_cast<std::byte*>(from.address), from.count(), *dtype};
}

// ---- DLPack ----

/// Its owner lets the queue's stream wait for what it does to the array; no stream, where that
/// would become part of a graph.
py::object capsule_for(const py::object& array, const DeviceSpan& span, const char* what) {
  const py::object give = array.attr("__dlpack__");
  const py::object stream = span.graph ? py::int_(kNoStream) : py::int_(span.queue->stream());
  const py::kwargs wishes(py::dict(py::arg("stream") = stream));
  return asked(what, [&]() -> py::object {
    try {
      return give(**wishes, py::arg("max_version") = py::make_tuple(1, 0));
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_TypeError)) throw;
      return give(**wishes);  // an owner of version 0
    }
  });
}

const DlTensor& tensor_in(const py::object& capsule, bool writable, const char* what) {
  void* found = nullptr;
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0) {
    found = PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned");
    const auto& versioned = *static_cast<const DlVersioned*>(found);
    if (versioned.version.major != 1) throw unfit(what, "is of a version of DLPack after 1");
    if (writable && (versioned.flags & kDlReadOnly) != 0)
      throw unfit(what, "is read-only or cannot be borrowed");
    return versioned.tensor;
  }
  found = PyCapsule_GetPointer(capsule.ptr(), "dltensor");
  if (found == nullptr) throw py::error_already_set();
  return *static_cast<const DlTensor*>(found);
}

Buffer buffer_of(const DlTensor& t, const char* what) {
  if (t.device.type != kDlCuda) throw wrong_kind(what, t.device.type);
  const auto dtype = dtype_of_dlpack(t.dtype.code, t.dtype.bits);
  if (!dtype || t.dtype.lanes != 1) throw unfit(what, "has an unsupported element type");
  if (!is_contiguous(t)) throw unfit(what, "is not contiguous; pass a contiguous copy");
  size_t count = 1;
  for (int i = 0; i < t.ndim; ++i) count *= static_cast<size_t>(t.shape[i]);
  return {static_cast<std::byte*>(t.data) + t.byte_offset, count, *dtype};
}

/// The stream in which the array is being used now, as far as its owner says.
std::optional<uint64_t> current_stream(const py::object& array) {
  if (const auto* known = pointed(array)) return known->current_stream().cast<uint64_t>();
  if (const auto device = dlpack_device(array))
    if (const auto stream = current_stream_of(array.ptr(), kDlCuda, device->second)) return stream;
  return has_interface(array) ? Interface(array).stream : std::nullopt;
}

/// `outputs`: by the numbers that the call gives.
template <typename Call>
void hand_over_all(Call& call, const std::vector<py::object>& outputs) {
  for (const auto& [device, output] : call.outputs()) {
    const auto stream = current_stream(outputs[output]);
    const py::gil_scoped_release unlocked;
    call.hand_over(device, stream);
  }
}

// ---- either ----

/// Copies of the array come after what is in its owner's stream, where that is known; a collective
/// may become part of the graph that it is being captured into.
void follow(Group& group, DeviceSpan& span, const std::optional<uint64_t>& stream) {
  if (!stream) return;
  or_fail_group(group, [&] {
    span.stream = stream;
    if (span.queue->is_captured(*stream))
      span.graph = stream;
    else
      span.queue->follow(*stream);
    return true;
  });
}

/// Throws if the owner, without naming its stream, has drawn the queue's stream into a capture.
void refuse_spoilt_capture(Group& group, const DeviceSpan& span) {
  const bool spoilt =
      or_fail_group(group, [&] { return span.queue->is_captured(span.queue->stream()); });
  if (spoilt)
    throw Error(ErrorCode::invalid_argument,
                "an array's stream is being captured into a CUDA graph, and its owner does not say "
                "which one it is: that capture is spoilt",
                {},
                "for PyTorch capture torch.distributed's collectives, or take a version that has "
                "DLPack's exchange functions");
}

/// The number of the device that has an array, as the driver knows it.
int where_it_lies(Group& group, const Buffer& buffer, const char* what) {
  try {
    return or_fail_group(group, [&] {
      return cuda::device_of(*cuda::Driver::of_process(), reinterpret_cast<uint64_t>(buffer.data));
    });
  } catch (const Error& error) {
    if (error.code() != ErrorCode::invalid_argument) throw;
    throw unfit(what, "is not on a CUDA device: " + error.verdict(), error.advice());
  }
}

/// Its owner may be mistaken.
void refuse_elsewhere(Group& group, const PlacedArray& placed, const char* what) {
  if (placed.buffer.count == 0) return;
  const int lies = where_it_lies(group, placed.buffer, what);
  const int said = placed.device->queue->device();
  if (lies == said) return;
  throw unfit(what,
              "is on device " + std::to_string(said) +
                  " as its owner says (__dlpack_device__), "
                  "and lies on device " +
                  std::to_string(lies),
              "let its owner say where it lies");
}

PlacedArray place(Group& group, const py::object& array, bool writable, const char* what) {
  if (!is_on_device(array)) return {borrow(array, writable, what).buffer, std::nullopt};
  require_cuda(what);
  const auto open = [&](int device) {
    return or_fail_group(group, [&] { return Staging::of(*group.engine())->queue(device); });
  };
  PlacedArray placed;
  DeviceSpan& span = placed.device.emplace();
  if (const auto* known = pointed(array)) {
    placed.buffer = known->buffer;
    span.queue = open(known->device);
    follow(group, span, current_stream(array));
  } else if (const auto device = dlpack_device(array)) {
    if (is_negated(array.ptr())) throw unfit(what, "is a negated view; pass tensor.resolve_neg()");
    span.queue = open(device->second);
    const auto stream = current_stream(array);
    follow(group, span, stream);
    const py::object capsule = capsule_for(array, span, what);
    if (!stream) refuse_spoilt_capture(group, span);
    placed.buffer = buffer_of(tensor_in(capsule, writable, what), what);
    refuse_elsewhere(group, placed, what);
  } else {
    const Interface described = asked(what, [&] { return Interface(array); });
    placed.buffer = buffer_of(described, writable, what);
    span.queue = open(described.address != 0 ? where_it_lies(group, placed.buffer, what) : 0);
    follow(group, span, described.stream);
  }
  span.address = reinterpret_cast<uint64_t>(placed.buffer.data);
  span.bytes = placed.buffer.bytes();
  return placed;
}

PlacedOperand place_both(Group& group, const py::object& input, const py::object& output) {
  PlacedOperand both;
  auto& [from, to] = both;
  if (!input.is_none()) from = place(group, input, input.is(output), "input");
  if (input.is(output))
    to = from;
  else if (!output.is_none())
    to = place(group, output, true, "output");
  if (input.is_none()) from.buffer.dtype = to.buffer.dtype;
  if (output.is_none()) to.buffer.dtype = from.buffer.dtype;
  return both;
}

}  // namespace

void require_cuda(const char* what) {
  try {
    const py::gil_scoped_release unlocked;  // finding it runs Python
    require_devices();
  } catch (const Error& why) {
    if (why.code() == ErrorCode::forked) throw;
    throw unfit(what, "is on a CUDA device, which cannot be used here: " + why.verdict(),
                why.advice());
  }
}

bool is_on_device(const py::object& array) {
  if (array.is_none()) return false;
  if (Buffer known; look_at(array.ptr(), false, known)) return false;
  if (PyObject_CheckBuffer(array.ptr()) != 0) return false;
  if (pointed(array) != nullptr) return true;
  if (const auto device = dlpack_device(array)) return device->first == kDlCuda;
  return has_interface(array);
}

StagedCall submit_staged(Group& group, const py::object& input, const py::object& output,
                         Options options, bool caller_waits) {
  const auto [from, to] = place_both(group, input, output);
  options.keepalive = keep(input, output);
  const py::gil_scoped_release unlocked;  // memory may be registered, which takes long
  return StagedCall::submit(group, from, to, std::move(options), caller_waits);
}

StagedCall prepare_staged(Group& group, const py::object& input, const py::object& output,
                          Options options, CollectiveCall& to_submit) {
  const auto [from, to] = place_both(group, input, output);
  options.keepalive = keep(input, output);
  const py::gil_scoped_release unlocked;
  return StagedCall::prepare(group, from, to, std::move(options), to_submit);
}

StagedCall submit_staged_between(Group& group, const py::object& array, int peer, int tag,
                                 Options options, bool caller_waits) {
  const PlacedArray placed = place(group, array, options.kind == Collective::recv, "array");
  options.keepalive = keep(array, py::none());
  const py::gil_scoped_release unlocked;
  return StagedCall::submit_between(group, peer, tag, placed, std::move(options), caller_waits);
}

std::pair<StagedCall, std::shared_ptr<const int>> submit_staged_from_any(Group& group,
                                                                         const py::object& array,
                                                                         int tag, Options options) {
  const PlacedArray placed = place(group, array, true, "array");
  options.keepalive = keep(array, py::none());
  const py::gil_scoped_release unlocked;
  return StagedCall::submit_from_any(group, tag, placed, std::move(options));
}

std::shared_ptr<StagedGrouped> submit_staged_grouped(Group& group,
                                                     const std::vector<py::object>& inputs,
                                                     const std::vector<py::object>& outputs,
                                                     Options options, const PackLimits& limits,
                                                     bool caller_waits) {
  std::vector<PlacedOperand> operands;
  for (size_t i = 0; i < inputs.size(); ++i)
    operands.push_back(place_both(group, inputs[i], outputs[i]));
  options.keepalive = keep(py::cast(inputs), py::cast(outputs));
  const py::gil_scoped_release unlocked;
  return std::make_shared<StagedGrouped>(group, operands, std::move(options), limits, caller_waits);
}

std::shared_ptr<StagedNamed> submit_staged_named(Group& world, Named& named, const NamedCall& call,
                                                 const std::vector<py::object>& inputs,
                                                 const std::vector<py::object>& outputs,
                                                 const std::vector<std::vector<int64_t>>& shapes) {
  std::vector<PlacedTensor> tensors;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto [input, output] = place_both(world, inputs[i], outputs[i]);
    tensors.push_back({input, std::nullopt, shapes[i]});
    if (!outputs[i].is_none()) tensors.back().output = output;
  }
  std::shared_ptr<const void> kept = keep(py::cast(inputs), py::cast(outputs));
  const py::gil_scoped_release unlocked;
  return StagedNamed::submit(world, named, call, tensors, std::move(kept));
}

const py::object& handed_over(const py::object& input, const py::object& output) {
  return is_on_device(output) ? output : input;
}

void hand_over(StagedCall& call, const py::object& array) {
  if (!is_on_device(array)) return;
  const auto stream = current_stream(array);
  const py::gil_scoped_release unlocked;
  call.hand_over(stream);
}

void hand_over(StagedGrouped& call, const std::vector<py::object>& outputs) {
  hand_over_all(call, outputs);
}

void hand_over(StagedNamed& call, const std::vector<py::object>& outputs) {
  hand_over_all(call, outputs);
}

void deliver(Group& world, StagedNamed& call, size_t tensor, const py::object& array) {
  const PlacedArray placed = place(world, array, true, "result");
  if (!placed.device) throw unfit("result", "is not on the device where it belongs");
  const auto stream = current_stream(array);
  const py::gil_scoped_release unlocked;
  call.deliver(world, tensor, *placed.device, stream);
}

PyHandle handle_of(std::shared_ptr<Group> group, StagedCall call, const py::object& array,
                   py::object result) {
  const auto shared = std::make_shared<StagedCall>(std::move(call));
  return {std::move(group), [shared](Deadline d) { return shared->wait(d); },
          [shared] { return shared->done(); }, std::move(result),
          [shared, array] { hand_over(*shared, array); }};
}

void bind_devices(py::module_& module) {
  py::class_<PointedOnDevice>(
      module, "DeviceBuffer",
      "A device's memory by address, for frameworks' tensors: `count` elements of `dtype` at "
      "`pointer`, alive as long as `owner`. `current_stream()` gives the CUstream in which this "
      "thread works on them now.")
      .def(py::init([](uintptr_t pointer, size_t count, const std::string& dtype, int device,
                       py::object current_stream, py::object owner) {
             const auto known = dtype_named(dtype);
             if (!known)
               throw Error(ErrorCode::invalid_argument, "dtype " + dtype + " is not supported");
             return PointedOnDevice{{reinterpret_cast<std::byte*>(pointer), count, *known},
                                    device,
                                    std::move(current_stream),
                                    std::move(owner)};
           }),
           py::arg("pointer"), py::arg("count"), py::arg("dtype"), py::arg("device"),
           py::arg("current_stream"), py::arg("owner") = py::none());
}

}  // namespace farandole

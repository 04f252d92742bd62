// JAX's programs: what XLA calls, and the world that it is called in.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "engine/fork.h"
#include "jax/finite.h"
#include "jax/handlers.h"

namespace farandole {
namespace {

py::capsule capsule_of(ffi::Handler* handler) {
  return py::capsule(reinterpret_cast<void*>(handler));
}

/// {target: {platform: handler}}
py::dict targets() {
  struct Target {
    const char* name;
    ffi::Handler *cpu, *cuda;
  };
  py::dict all;
  for (const Target& target :
       {Target{"farandole_collective", &jax_collective, &jax_collective_on_cuda},
        Target{"farandole_checksums", &jax_checksums, &jax_checksums_on_cuda},
        Target{"farandole_weights", &jax_weights, &jax_weights_on_cuda},
        Target{"farandole_gradients", &jax_gradients, &jax_gradients_on_cuda}}) {
    py::dict by_platform;
    by_platform["cpu"] = capsule_of(target.cpu);
    by_platform["CUDA"] = capsule_of(target.cuda);
    by_platform["ROCM"] = capsule_of(&jax_refusal);
    all[target.name] = by_platform;
  }
  return all;
}

void attach(const std::shared_ptr<Group>& world, const JaxChannel::Sets& sets) {
  refuse_in_child();
  world->engine()->driver().require_progress("a program of JAX");
  auto channel = jax_channel();
  if (!channel || channel->world() != world) channel = std::make_shared<JaxChannel>(world);
  channel->know(sets);
  set_jax_channel(std::move(channel));
}

/// An error of ours that Python has made or raised.
Error error_from(const py::object& error) {
  const std::string kind = py::str(py::type::of(error).attr("__name__"));
  ErrorCode code = ErrorCode::internal;
  for (const ErrorRow& r : kErrors)
    if (r.python_class == kind) code = r.code;
  const auto text = [&](const char* name) -> std::string { return py::str(error.attr(name)); };
  Context where;
  where.evidence = text("evidence");
  where.tensor = text("tensor");
  if (const py::object rank = error.attr("rank"); !rank.is_none()) where.rank = rank.cast<int>();
  return Error(code, text("verdict"), std::move(where), text("advice"));
}

void judge_by(const py::object& judge) {
  set_gradient_judge(
      // Programs may run as the interpreter ends.
      [kept = new py::object(judge)](const GradientSums& told) -> std::optional<Error> {
        const py::gil_scoped_acquire locked;
        try {
          const py::object error = (*kept)(told.label, told.names, told.ranks, told.sums);
          if (error.is_none()) return std::nullopt;
          return error_from(error);
        } catch (const py::error_already_set& error) {
          return Error(ErrorCode::internal, error.what());
        }
      });
}

/// (size, offsets of the members) of a struct of ours.
template <typename... Offsets>
py::tuple layout(size_t size, Offsets... offsets) {
  return py::make_tuple(size, py::make_tuple(offsets...));
}

py::dict layouts() {
  using namespace ffi;
  py::dict d;
  d["XLA_FFI_Extension_Base"] =
      layout(sizeof(Extension), offsetof(Extension, type), offsetof(Extension, next));
  d["XLA_FFI_Api_Version"] = layout(sizeof(Version), offsetof(Version, extensions),
                                    offsetof(Version, major), offsetof(Version, minor));
  d["XLA_FFI_Metadata"] =
      layout(0, offsetof(Metadata, version), offsetof(Metadata, traits));  // theirs may be longer
  d["XLA_FFI_Metadata_Extension"] =
      layout(sizeof(MetadataExtension), offsetof(MetadataExtension, metadata));
  d["XLA_FFI_Buffer"] =
      layout(sizeof(ffi::Buffer), offsetof(ffi::Buffer, dtype), offsetof(ffi::Buffer, data),
             offsetof(ffi::Buffer, rank), offsetof(ffi::Buffer, dims));
  d["XLA_FFI_ByteSpan"] = layout(sizeof(Text), offsetof(Text, data), offsetof(Text, size));
  d["XLA_FFI_Scalar"] = layout(sizeof(Scalar), offsetof(Scalar, dtype), offsetof(Scalar, value));
  d["XLA_FFI_Args"] = layout(sizeof(Values), offsetof(Values, size), offsetof(Values, types),
                             offsetof(Values, values));
  d["XLA_FFI_Rets"] = d["XLA_FFI_Args"];
  d["XLA_FFI_Attrs"] =
      layout(sizeof(Attributes), offsetof(Attributes, size), offsetof(Attributes, types),
             offsetof(Attributes, names), offsetof(Attributes, values));
  d["XLA_FFI_CallFrame"] = layout(sizeof(CallFrame), offsetof(CallFrame, api),
                                  offsetof(CallFrame, context), offsetof(CallFrame, stage),
                                  offsetof(CallFrame, arguments), offsetof(CallFrame, results),
                                  offsetof(CallFrame, attributes), offsetof(CallFrame, future));
  d["XLA_FFI_Error_Create_Args"] =
      layout(sizeof(ErrorCreate), offsetof(ErrorCreate, message), offsetof(ErrorCreate, code));
  d["XLA_FFI_Error_Destroy_Args"] = layout(sizeof(ErrorDestroy), offsetof(ErrorDestroy, error));
  d["XLA_FFI_Stream_Get_Args"] =
      layout(sizeof(StreamGet), offsetof(StreamGet, context), offsetof(StreamGet, stream));
  d["XLA_FFI_Future_Create_Args"] = layout(sizeof(FutureCreate), offsetof(FutureCreate, future));
  d["XLA_FFI_Future_SetAvailable_Args"] =
      layout(sizeof(FutureSetAvailable), offsetof(FutureSetAvailable, future));
  d["XLA_FFI_Future_SetError_Args"] = layout(
      sizeof(FutureSetError), offsetof(FutureSetError, future), offsetof(FutureSetError, error));
  d["XLA_FFI_Api"] =
      layout(0, offsetof(Api, version), offsetof(Api, error_create), offsetof(Api, error_destroy),
             offsetof(Api, stream_get), offsetof(Api, future_create),
             offsetof(Api, future_set_available), offsetof(Api, future_set_error));
  return d;
}

}  // namespace

void bind_jax(py::module_& module) {
  py::module_ jax = module.def_submodule("jax", "What XLA calls in JAX's programs.");
  jax.def("targets", &targets, "The handlers by target and platform.");
  jax.def("attach", &attach, py::arg("world"), py::arg("sets"),
          "Calls belong to this world from now on, or to one of these process sets by their ranks. "
          "Waits for nobody.");
  jax.def("judge_by", &judge_by, py::arg("judge"),
          "Where gradients of a program are not finite, judge(label, names, ranks, sums) returns "
          "the error that ends it, or None.");
  jax.def(
      "begin_anew",
      [] {
        if (const auto channel = jax_channel()) channel->begin_anew();
      },
      "The next call is the first of a new order.");
  jax.def(
      "last_error",
      [] {
        const auto channel = jax_channel();
        const auto error = channel ? channel->last_error() : std::nullopt;
        return error ? python_error(*error) : py::none();
      },
      "What the last call that failed on this rank failed with; None when none has.");
  jax.def(
      "failure",
      [] {
        const auto channel = jax_channel();
        const auto error = channel ? channel->failure() : std::nullopt;
        return error ? python_error(*error) : py::none();
      },
      "The same, unless calls have begun anew since.");
  jax.def("layouts", &layouts,
          "XLA's structs as we declare them: size (0: theirs may be longer) and offsets.");
}

}  // namespace farandole

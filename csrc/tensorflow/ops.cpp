// The ops: what they are called, take and give. Registered when tf.load_op_library opens us.
#include <string>
#include <vector>

#include "tensorflow/kernels.h"
#include "tensorflow/types.h"

namespace farandole::tf {
namespace {

void keep_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeHandle* const shape = api.NewShapeHandle();
  const auto inputs = static_cast<int>(api.ShapeInferenceContextNumInputs(context));
  for (int i = 0; i < inputs; ++i) {
    api.ShapeInferenceContextGetInput(context, i, shape, status);
    api.ShapeInferenceContextSetOutput(context, i, shape, status);
  }
  api.DeleteShapeHandle(shape);
}

/// Python says what is known: it has the process set, too.
void forget_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  api.ShapeInferenceContextSetUnknownShape(context, status);
}

enum class Tensors : uint8_t { none, one, many, many_read };  // the last have no results

struct OpRow {
  const char* name;
  Tensors tensors;
  const char* input;   // besides the tensors; may be null
  const char* output;  // likewise
  InferShapes shapes;
  enum class Way : uint8_t { async, start, finish } way = Way::async;
};

constexpr OpRow kOps[] = {
    {"FarandoleAllReduce", Tensors::many, nullptr, nullptr, keep_shapes},
    {"FarandoleAllGather", Tensors::many, nullptr, nullptr, forget_shapes},
    {"FarandoleBroadcast", Tensors::many, nullptr, nullptr, keep_shapes},
    {"FarandoleReduceScatter", Tensors::many, nullptr, nullptr, forget_shapes},
    {"FarandoleAllToAll", Tensors::one, "splits: int64", "received: int32", forget_shapes},
    {"FarandoleBarrier", Tensors::none, nullptr, nullptr, forget_shapes},
    {"FarandoleJoin", Tensors::none, nullptr, "last: int32", forget_shapes},
    {"FarandoleStep", Tensors::none, nullptr, "due: int32", forget_shapes},
    {"FarandoleWeights", Tensors::many_read, nullptr, nullptr, forget_shapes},
    {"FarandoleStart", Tensors::many, nullptr, "handle: int64", forget_shapes, OpRow::Way::start},
    {"FarandoleFinish", Tensors::none, "handles: N * int64", "results: R", forget_shapes,
     OpRow::Way::finish},
};

// How an operation is described: the same for all ops, so that there is one kernel for all.
constexpr const char* kAttributes[] = {
    "kind: string",
    "tensor_name: string = ''",
    "note: string = ''",
    "set: int = 0",
    "reduction: string = 'sum'",
    "prescale: int = 4607182418800017408",   // the bits of 1.0
    "postscale: int = 4607182418800017408",  // the same
    "root: int = 0",
    "waits: int = 0",
};

std::string add_op(const OpRow& row) {
  const Status status;
  TF_OpDefinitionBuilder* const op = api.NewOpDefinitionBuilder(row.name);
  const std::string types = "list(" + type_words() + ") >= 0";
  if (row.tensors == Tensors::many || row.tensors == Tensors::many_read) {
    api.OpDefinitionBuilderAddInput(op, "tensors: T");
    api.OpDefinitionBuilderAddAttr(op, ("T: " + types).c_str());
    if (row.tensors == Tensors::many && row.way == OpRow::Way::async)
      api.OpDefinitionBuilderAddOutput(op, "results: T");
  } else if (row.tensors == Tensors::one) {
    api.OpDefinitionBuilderAddInput(op, "tensor: T");
    api.OpDefinitionBuilderAddAttr(op, ("T: " + type_words()).c_str());
    api.OpDefinitionBuilderAddOutput(op, "result: T");
  }
  if (row.input != nullptr) api.OpDefinitionBuilderAddInput(op, row.input);
  if (row.output != nullptr) api.OpDefinitionBuilderAddOutput(op, row.output);
  if (row.way == OpRow::Way::finish) {
    api.OpDefinitionBuilderAddAttr(op, "N: int >= 1");
    api.OpDefinitionBuilderAddAttr(op, ("R: " + types).c_str());
  } else {
    for (const char* attribute : kAttributes) api.OpDefinitionBuilderAddAttr(op, attribute);
  }
  api.OpDefinitionBuilderSetIsStateful(op, true);  // never merged, never folded
  api.OpDefinitionBuilderSetShapeInferenceFunction(op, row.shapes);
  api.RegisterOpDefinition(op, status);
  return status.ok() ? "" : status.message();
}

/// "name: type" without the type.
std::string name_of(const char* argument) {
  const std::string text = argument;
  return text.substr(0, text.find(':'));
}

/// The names of the op's inputs and outputs.
std::vector<std::string> arguments_of(const OpRow& row) {
  std::vector<std::string> names;
  if (row.tensors != Tensors::none) {
    const bool many = row.tensors != Tensors::one;
    names.emplace_back(many ? "tensors" : "tensor");
    if (row.tensors != Tensors::many_read && row.way == OpRow::Way::async)
      names.emplace_back(many ? "results" : "result");
  }
  for (const char* const more : {row.input, row.output})
    if (more != nullptr) names.push_back(name_of(more));
  return names;
}

/// On a GPU all tensors are the host's, and TensorFlow copies what lies there: its C API gives no
/// stream of a GPU that is built into it.
std::string add_kernel(const OpRow& row, bool on_gpu) {
  const Status status;
  const char* const device = on_gpu ? "GPU" : "CPU";
  TF_KernelBuilder* const kernel =
      row.way == OpRow::Way::async
          ? api.NewAsyncKernelBuilder(row.name, device, create_kernel, compute_async, delete_kernel)
      : row.way == OpRow::Way::start
          ? api.NewKernelBuilder(row.name, device, create_kernel, compute_start, delete_kernel)
          : api.NewKernelBuilder(row.name, device, nullptr, compute_finish, nullptr);
  if (on_gpu)
    for (const std::string& name : arguments_of(row))
      api.KernelBuilder_HostMemory(kernel, name.c_str());
  api.RegisterKernelBuilder(row.name, kernel, status);
  return status.ok() ? "" : status.message();
}

std::string add_all() {
  if (std::string missing = bind(); !missing.empty()) return missing;
  std::string problem;
  for (const OpRow& row : kOps)
    problem += add_op(row) + add_kernel(row, false) + add_kernel(row, true);
  return problem;
}

/// TensorFlow collects the ops that are registered while it opens a library.
// NOLINTNEXTLINE(bugprone-throwing-static-initialization): without memory nothing goes on
const std::string problem = add_all();

}  // namespace
}  // namespace farandole::tf

extern "C" {

/// Hands the plug-in the engine's functions. What is wrong, or null.
__attribute__((visibility("default"))) const char* farandole_tf_attach(const void* table) {
  using namespace farandole;
  if (!tf::problem.empty()) return tf::problem.c_str();
  const auto* const given = static_cast<const PluginTable*>(table);
  if (given->version != kPluginVersion || given->bytes != sizeof(PluginTable))
    return "farandole's core and its TensorFlow plug-in are of different versions";
  tf::engine = given;
  return nullptr;
}

}  // extern "C"

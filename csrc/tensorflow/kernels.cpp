#include "tensorflow/kernels.h"

#include <bit>
#include <functional>
#include <memory>

#include "tensorflow/call.h"
#include "tensorflow/started.h"
#include "tensorflow/types.h"

namespace farandole::tf {

const PluginTable* engine = nullptr;

namespace {

constexpr const char* kNotAttached =
    "farandole's operations were loaded without farandole; import farandole.tensorflow first";

// ---- attributes ----

struct Attributes {
  TF_OpKernelConstruction* from;
  const Status status{};

  std::string text(const char* name) const {
    int32_t entries = 0, bytes = 0;
    api.OpKernelConstruction_GetAttrSize(from, name, &entries, &bytes, status);
    if (!status.ok() || bytes <= 0) return {};
    std::string value(static_cast<size_t>(bytes), '\0');
    api.OpKernelConstruction_GetAttrString(from, name, value.data(), value.size(), status);
    return value;
  }
  int64_t number(const char* name) const {
    int64_t value = 0;
    api.OpKernelConstruction_GetAttrInt64(from, name, &value, status);
    return value;
  }
  /// Attributes of TensorFlow have 32-bit floats: these are the bits of a double.
  double factor(const char* name) const { return std::bit_cast<double>(number(name)); }
};

// ---- the done callback ----

// Up to TensorFlow 2.21 what is called TF_AsyncOpKernelDoneCallback is the address of a
// std::function in TensorFlow's frame, gone once compute returns: it is copied. Versions where that
// is not known to hold use the pair (python/farandole/tensorflow/_plugin.py has the list).
using DoneFunction = std::function<void()>;

DoneFunction copy_of(TF_AsyncOpKernelDoneCallback* done) {
  return *reinterpret_cast<DoneFunction*>(done);
}

void refuse(TF_OpKernelContext* context, Code code, const char* message) {
  const Status status(code, message);
  api.OpKernelContext_Failure(context, status);
}

}  // namespace

void* create_kernel(TF_OpKernelConstruction* construction) {
  const Attributes attributes{construction};
  auto kernel = std::make_unique<Kernel>();
  kernel->kind = attributes.text("kind");
  kernel->name = attributes.text("tensor_name");
  kernel->note = attributes.text("note");
  kernel->set = static_cast<uint32_t>(attributes.number("set"));
  kernel->op = reduce_op_named(attributes.text("reduction")).value_or(ReduceOp::sum);
  kernel->prescale = attributes.factor("prescale");
  kernel->postscale = attributes.factor("postscale");
  kernel->root = static_cast<int>(attributes.number("root"));
  kernel->waits = attributes.number("waits") != 0;
  if (attributes.status.ok()) return kernel.release();
  api.OpKernelConstruction_Failure(construction, attributes.status);
  return nullptr;
}

void delete_kernel(void* kernel) { delete static_cast<Kernel*>(kernel); }

void compute_async(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  const auto& ours = *static_cast<const Kernel*>(kernel);
  if (engine == nullptr) {
    refuse(context, kFailedPrecondition, kNotAttached);
    return api.RunAsyncOpKernelDoneCallback(done);
  }
  auto call = std::make_unique<Call>(ours);
  call->prepare(context, true);
  Call* const flying = call.release();
  flying->start(*engine, ours.waits, [context, done = copy_of(done)](Call& ended) {
    ended.report(context);
    delete &ended;
    done();
  });
}

void compute_start(void* kernel, TF_OpKernelContext* context) {
  if (engine == nullptr) return refuse(context, kFailedPrecondition, kNotAttached);
  const Status status;
  TF_Tensor* const number =
      api.AllocateOutput(context, 0, kInt64, nullptr, 0, sizeof(int64_t), status);
  if (!status.ok()) return refuse(context, kResourceExhausted, status.message());
  auto call = std::make_unique<Call>(*static_cast<const Kernel*>(kernel));
  call->prepare(context, false);
  *static_cast<int64_t*>(api.TensorData(number)) =
      Started::all().start(*engine, std::move(call), api.StepId(context));
  api.DeleteTensor(number);
}

void compute_finish(void*, TF_OpKernelContext* context) {
  int at = 0;
  std::unique_ptr<Call> failed;
  for (int i = 0; i < api.NumInputs(context); ++i) {
    const Status status;
    TF_Tensor* number = nullptr;
    api.GetInput(context, i, &number, status);
    if (!status.ok()) return refuse(context, kInternal, status.message());
    std::unique_ptr<Call> call =
        Started::all().finish(*static_cast<const int64_t*>(api.TensorData(number)));
    api.DeleteTensor(number);
    if (!call) {
      refuse(context, kInternal, "this operation was finished already");
      continue;
    }
    if (call->failure().code == kOk) at += call->give_outputs(context, at);
    if (call->failure().code != kOk && !failed) failed = std::move(call);  // all are waited for
  }
  if (failed) failed->report(context);
}

}  // namespace farandole::tf

#include "tensorflow/call.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tensorflow/types.h"

namespace farandole::tf {
namespace {

// Iterations of a loop run at once, so each has a name of its own; far more than TensorFlow ever
// runs at once (parallel_iterations) would be a new name for ever.
constexpr int64_t kIterationNames = 1024;

size_t elements(std::span<const int64_t> shape) {
  size_t count = 1;
  for (const int64_t n : shape) count *= static_cast<size_t>(n);
  return count;
}

std::vector<int64_t> shape_of(const TF_Tensor* tensor) {
  std::vector<int64_t> shape(static_cast<size_t>(api.NumDims(tensor)));
  for (size_t i = 0; i < shape.size(); ++i) shape[i] = api.Dim(tensor, static_cast<int>(i));
  return shape;
}

}  // namespace

Call::~Call() {
  for (const Shaped& tensor : tensors_) {
    if (tensor.input != nullptr) api.DeleteTensor(tensor.input);
    if (tensor.output != nullptr) api.DeleteTensor(tensor.output);
  }
  if (extra_ != nullptr) api.DeleteTensor(extra_);
}

void Call::fail(Code code, std::string message) {
  if (failure_.code == kOk) failure_ = {code, std::move(message)};
}

// ---- before ----

void Call::prepare(TF_OpKernelContext* context, bool in_place) {
  context_ = in_place ? context : nullptr;
  name_ = kernel_->name;
  if (const int64_t iteration = api.GetIterId(context); iteration > 0)
    name_ += "@" + std::to_string(iteration % kIterationNames);
  key_ = kernel_->kind + ' ' + std::to_string(kernel_->set) + ' ' + name_;
  const bool exchanges = kernel_->kind == "all_to_all";
  const bool numbered = kernel_->kind == "join" || kernel_->kind == "step";
  extra_is_ = exchanges ? Extra::received : numbered ? Extra::number : Extra::none;
  const int tensors = api.NumInputs(context) - (exchanges ? 1 : 0);
  for (int i = 0; i < tensors; ++i) take_tensor(context, i);
  if (exchanges && failure_.code == kOk) take_splits(context, tensors);
}

void Call::take_tensor(TF_OpKernelContext* context, int i) {
  const Status status;
  TF_Tensor* input = nullptr;
  api.GetInput(context, i, &input, status);
  if (!status.ok()) return fail(kInternal, status.message());
  tensors_.push_back({.input = input,
                      .data = api.TensorData(input),
                      .shape = shape_of(input),
                      .type = api.TensorType(input)});
  if (context_ == nullptr) return;
  // The context keeps it. Another reference to the memory would forbid to reuse it.
  api.DeleteTensor(std::exchange(tensors_.back().input, nullptr));
}

void Call::take_splits(TF_OpKernelContext* context, int i) {
  const Status status;
  TF_Tensor* given = nullptr;
  api.GetInput(context, i, &given, status);
  if (!status.ok()) return fail(kInternal, status.message());
  const auto* numbers = static_cast<const int64_t*>(api.TensorData(given));
  splits_.assign(numbers, numbers + api.TensorElementCount(given));
  api.DeleteTensor(given);
}

/// Without splits every member gets equally many rows.
void Call::split_evenly() {
  int32_t place = 0;
  const int members = table_->members(kernel_->set, &place);
  const std::vector<int64_t>& shape = tensors_[0].shape;
  if (members == 0 || shape.empty()) return;  // it is refused for that
  if (shape[0] % members != 0)
    return fail(kInvalidArgument, "tensor has " + std::to_string(shape[0]) + " rows, which " +
                                      std::to_string(members) +
                                      " ranks do not divide; pass splits (all_to_all '" + name_ +
                                      "')");
  splits_.assign(static_cast<size_t>(members), shape[0] / members);
}

/// Room for the results whose shape this rank knows by itself.
void Call::make_outputs() {
  const bool same = kernel_->kind == "all_reduce" || kernel_->kind == "broadcast";
  const bool scattered = kernel_->kind == "reduce_scatter";
  if (!same && !scattered) return;
  int32_t place = 0;
  const int members = scattered ? table_->members(kernel_->set, &place) : 0;
  for (size_t i = 0; i < tensors_.size() && failure_.code == kOk; ++i) {
    Shaped& tensor = tensors_[i];
    std::vector<int64_t> shape = tensor.shape;
    if (scattered) {
      if (members == 0 || shape.empty()) return;  // it is refused for that
      // The first ranks get one row more where it does not divide.
      shape[0] = shape[0] / members + (place < shape[0] % members ? 1 : 0);
    }
    tensor.output = make_output(static_cast<int>(i), shape, tensor.type, same);
  }
}

TF_Tensor* Call::make_output(int i, std::span<const int64_t> shape, int type, bool forward) {
  const auto dtype = dtype_of(type);
  if (!dtype) {
    fail(kInvalidArgument, "dtype " + std::to_string(type) + " of TensorFlow is not supported");
    return nullptr;
  }
  const int dimensions = static_cast<int>(shape.size());
  const size_t bytes = elements(shape) * size_of(*dtype);
  TF_Tensor* made = nullptr;
  if (context_ == nullptr) {
    made = api.AllocateTensor(type, shape.data(), dimensions, bytes);
  } else {
    const Status status;
    int forwarded = -1;
    made = forward ? api.ForwardInputOrAllocateOutput(context_, &i, 1, i, shape.data(), dimensions,
                                                      &forwarded, status)
                   : api.AllocateOutput(context_, i, type, shape.data(), dimensions, bytes, status);
    if (!status.ok()) {
      fail(kResourceExhausted, status.message());
      return nullptr;
    }
  }
  if (made == nullptr)
    fail(kResourceExhausted,
         "no memory for " + std::to_string(bytes) + " bytes of '" + name_ + "'");
  return made;
}

// ---- under way ----

void Call::start(const PluginTable& table, bool wait, Done done) {
  table_ = &table;
  done_ = std::move(done);
  if (failure_.code == kOk && kernel_->kind == "all_to_all" && splits_.empty()) split_evenly();
  if (failure_.code == kOk) make_outputs();
  if (failure_.code != kOk) return end();
  std::vector<PluginTensor> tensors;
  tensors.reserve(tensors_.size());
  for (const Shaped& t : tensors_)
    tensors.push_back({.input = t.data,
                       .output = t.output != nullptr ? api.TensorData(t.output) : nullptr,
                       .dtype = static_cast<int32_t>(*dtype_of(t.type)),
                       .dimensions = static_cast<int32_t>(t.shape.size()),
                       .shape = t.shape.data()});
  const PluginAsk ask{
      .kind = kernel_->kind == "join" ? nullptr : kernel_->kind.c_str(),
      .name = name_.data(),
      .name_bytes = name_.size(),
      .note = kernel_->note.data(),
      .note_bytes = kernel_->note.size(),
      .set = kernel_->set,
      .op = static_cast<int32_t>(kernel_->op),
      .prescale = kernel_->prescale,
      .postscale = kernel_->postscale,
      .root = kernel_->root,
      .tensors = tensors.data(),
      .tensor_count = tensors.size(),
      .splits = splits_.data(),
      .split_count = splits_.size(),
      .user = this,
      .make_room = &Call::room_made,
      .finished = &Call::ended,
  };
  table.submit(&ask, wait ? 1 : 0);
}

void* Call::room_made(void* call, size_t i, const int64_t* shape, size_t dimensions) {
  auto* const self = static_cast<Call*>(call);
  Shaped& tensor = self->tensors_[i];
  tensor.output = self->make_output(static_cast<int>(i), {shape, dimensions}, tensor.type);
  return tensor.output == nullptr ? nullptr : api.TensorData(tensor.output);
}

void Call::ended(void* call, const PluginResult* result) {
  static_cast<Call*>(call)->finish(*result);
}

void Call::finish(const PluginResult& result) {
  if (result.failed != 0)
    fail(code_of(static_cast<ErrorCode>(result.failed - 1)), result.error);
  else
    make_extra(result);
  end();
}

void Call::end() {
  const Done done = std::move(done_);  // which may delete this call
  done(*this);
}

void Call::make_extra(const PluginResult& result) {
  if (extra_is_ == Extra::none) return;
  std::vector<int32_t> numbers(result.received, result.received + result.received_count);
  std::vector<int64_t> shape{static_cast<int64_t>(numbers.size())};
  if (extra_is_ == Extra::number) {
    numbers = {result.number};
    shape.clear();
  }
  extra_ = make_output(static_cast<int>(tensors_.size()), shape, kInt32);
  if (extra_ != nullptr && !numbers.empty())
    std::memcpy(api.TensorData(extra_), numbers.data(), numbers.size() * sizeof(int32_t));
}

// ---- after ----

int Call::give_outputs(TF_OpKernelContext* context, int first) {
  const Status status;
  int at = first;
  for (const Shaped& tensor : tensors_)
    if (tensor.output != nullptr) api.SetOutput(context, at++, tensor.output, status);
  if (extra_ != nullptr) api.SetOutput(context, at++, extra_, status);
  if (!status.ok()) fail(kInternal, status.message());
  return at - first;
}

void Call::report(TF_OpKernelContext* context) const {
  if (failure_.code == kOk) return;
  const Status status(failure_.code, failure_.message.c_str());
  api.OpKernelContext_Failure(context, status);
}

}  // namespace farandole::tf

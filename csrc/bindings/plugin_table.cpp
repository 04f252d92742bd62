// The table for plug-ins (base/plugin.h): operations by name of the world this process is in.
#include <mutex>
#include <sstream>
#include <string>
#include <utility>

#include "base/checksum.h"
#include "base/plugin.h"
#include "bindings/bind.h"
#include "bindings/named_handles.h"
#include "engine/fork.h"

namespace farandole {
namespace {

struct PluginWorld {
  std::mutex mutex;  // guards names
  std::shared_ptr<PyNames> names;
};
PluginWorld& world_of_plugins() {
  static auto* const world = new PluginWorld;  // threads of a framework may outlive everything else
  return *world;
}

/// With its kind before it: frameworks have fewer classes of errors, and put words of their own
/// around ours, in which ours are found by this (python/farandole/tensorflow/_verdicts.py).
void tell(const PluginAsk& ask, const Error& error) {
  const std::string said =
      "farandole." + std::string(row(error.code()).python_class) + ": " + error.what();
  const PluginResult result{1 + static_cast<int32_t>(error.code()), said.c_str(), nullptr, 0, -1};
  ask.finished(ask.user, &result);
}

size_t elements_of(const PluginTensor& tensor) {
  size_t count = 1;
  for (const int64_t n : std::span(tensor.shape, static_cast<size_t>(tensor.dimensions)))
    count *= static_cast<size_t>(n);
  return count;
}

/// One operation of a plug-in on its way. Owns itself; it does not own the engine, whose last owner
/// must not be the thread that polls.
class PluginCall : public NamedListener {
 public:
  PluginCall(const PyNames& world, const PluginAsk& ask)
      : ask_(ask), weights_(world.weights), named_(*world.named) {}

  /// The request that is submitted for it.
  virtual PluginAsk sent() const { return ask_; }

  std::byte* make_room(size_t part, std::span<const int64_t> shape) override {
    return static_cast<std::byte*>(ask_.make_room(ask_.user, part, shape.data(), shape.size()));
  }

  void finished(NamedRequest& request) override {
    std::optional<Error> error = std::move(request.error);
    const std::vector<int64_t> received = std::move(request.received);
    int32_t number = request.last_joined;
    named_.release(&request);
    if (!error) error = judge(number);
    const PluginAsk ask = ask_;
    delete this;
    if (error) return tell(ask, *error);
    const PluginResult result{0, nullptr, received.data(), received.size(), number};
    ask.finished(ask.user, &result);
  }

 protected:
  /// It has run on all ranks. `number`: of its result.
  virtual std::optional<Error> judge(int32_t& /*number*/) { return std::nullopt; }

  const PluginAsk ask_;  // of it the callbacks and numbers alone, once it is on its way
  const std::shared_ptr<PluginWeights> weights_;

 private:
  Named& named_;
};

class StepCall : public PluginCall {
 public:
  using PluginCall::PluginCall;

  PluginAsk sent() const override {
    PluginAsk barrier = ask_;
    barrier.kind = "barrier";
    barrier.prescale = 1;
    barrier.root = 0;
    return barrier;
  }

 private:
  std::optional<Error> judge(int32_t& number) override {
    number = weights_->begin_step(ask_.root, ask_.prescale) ? 1 : 0;
    return std::nullopt;
  }
};

/// A gather of checksums, each rank's behind its number.
class WeightsCall : public PluginCall {
 public:
  WeightsCall(const PyNames& world, const PluginAsk& ask) : PluginCall(world, ask) {
    std::istringstream lines(std::string(ask.note, ask.note_bytes));
    std::getline(lines, begun_by_);
    std::getline(lines, line_);
    for (std::string name; std::getline(lines, name);) names_.push_back(std::move(name));
    if (names_.size() != ask.tensor_count)
      throw Error(ErrorCode::internal, "a name for each weight");
    mine_.push_back(static_cast<uint64_t>(world.world->rank()));
    for (const PluginTensor& tensor : std::span(ask.tensors, ask.tensor_count)) {
      const size_t bytes = elements_of(tensor) * size_of(static_cast<DType>(tensor.dtype));
      mine_.push_back(checksum({static_cast<const std::byte*>(tensor.input), bytes}));
    }
    shape_ = static_cast<int64_t>(mine_.size());
    tensor_ = {mine_.data(), nullptr, static_cast<int32_t>(DType::uint64), 1, &shape_};
  }

  PluginAsk sent() const override {
    PluginAsk gather = ask_;
    gather.kind = "all_gather";
    gather.note = begun_by_.data();
    gather.note_bytes = begun_by_.size();
    gather.root = 0;
    gather.tensors = &tensor_;
    gather.tensor_count = 1;
    return gather;
  }

  std::byte* make_room(size_t, std::span<const int64_t> shape) override {
    all_.resize(static_cast<size_t>(shape[0]));
    return reinterpret_cast<std::byte*>(all_.data());
  }

 private:
  std::optional<Error> judge(int32_t&) override {
    // Ranks whose models differ have been told so by the barrier that begins a step.
    if (all_.size() % static_cast<size_t>(shape_) != 0) return std::nullopt;
    std::vector<WeightsRow> rows;
    for (auto row = all_.begin(); row != all_.end(); row += shape_)
      rows.push_back({static_cast<int>(*row), {row + 1, row + shape_}});
    return weights_->judge(ask_.root, names_, std::move(rows), line_);
  }

  std::string begun_by_, line_;
  std::vector<std::string> names_;
  std::vector<uint64_t> mine_, all_;
  int64_t shape_;
  PluginTensor tensor_;
};

std::unique_ptr<PluginCall> call_for(const PyNames& world, const PluginAsk& ask) {
  const std::string_view kind = ask.kind == nullptr ? "join" : ask.kind;
  if (kind == "join") world.weights->give_up();
  if (kind == "step") return std::make_unique<StepCall>(world, ask);
  if (kind == "weights") return std::make_unique<WeightsCall>(world, ask);
  return std::make_unique<PluginCall>(world, ask);
}

NamedRequest* put_on_its_way(Named& named, const PluginAsk& given, NamedListener& listener,
                             bool waits) {
  if (given.kind == nullptr) return named.join(&listener, waits);
  const auto kind = collective_named(given.kind);
  if (!kind) throw Error(ErrorCode::internal, std::string("no collective is a ") + given.kind);
  NamedCall call{
      {*kind, static_cast<ReduceOp>(given.op), given.prescale, given.postscale, given.root}};
  call.name = {given.name, given.name_bytes};
  call.note = {given.note, given.note_bytes};
  call.set = given.set;
  std::vector<NamedTensor> tensors;
  for (const PluginTensor& tensor : std::span(given.tensors, given.tensor_count)) {
    const std::span<const int64_t> shape(tensor.shape, static_cast<size_t>(tensor.dimensions));
    const size_t count = elements_of(tensor);
    const auto dtype = static_cast<DType>(tensor.dtype);
    tensors.push_back({{{static_cast<std::byte*>(tensor.input), count, dtype},
                        {static_cast<std::byte*>(tensor.output), count, dtype}},
                       shape});
  }
  call.tensors = tensors;
  call.splits = {given.splits, given.split_count};
  call.listener = &listener;
  call.waits = waits;
  return named.submit(call);
}

void submit(const PluginAsk* ask, int32_t wait) {
  std::shared_ptr<PyNames> world;  // held while this thread waits
  std::unique_ptr<PluginCall> call;
  try {
    refuse_in_child();
    world = names_for_plugins();
    if (!world)
      throw Error(ErrorCode::not_initialized,
                  "farandole has not been initialized; call init() first");
    call = call_for(*world, *ask);
    NamedRequest* const request = put_on_its_way(*world->named, call->sent(), *call, wait != 0);
    PluginCall* const flying = call.release();
    if (wait == 0) return;
    world->named->wait(*request, Deadline::never());
    flying->finished(*request);
  } catch (const Error& error) {
    tell(*ask, error);
  } catch (const std::exception& error) {
    tell(*ask, Error(ErrorCode::internal, error.what()));
  }
}

int32_t members(uint32_t set, int32_t* rank) {
  try {
    const std::shared_ptr<PyNames> world = names_for_plugins();
    if (!world) return 0;
    const auto [size, mine] = world->named->size_and_rank(set);
    *rank = mine;
    return size;
  } catch (const std::exception&) {
    return 0;  // what is wrong is said when something is submitted
  }
}

constexpr PluginTable kTable{kPluginVersion, sizeof(PluginTable), submit, members};

}  // namespace

std::shared_ptr<PyNames> names_for_plugins() {
  const std::lock_guard lock(world_of_plugins().mutex);
  return world_of_plugins().names;
}

void set_names_for_plugins(std::shared_ptr<PyNames> current) {
  const std::lock_guard lock(world_of_plugins().mutex);
  world_of_plugins().names.swap(current);
}

void bind_plugins(py::module_& module) {
  module.def(
      "plugin_table", [] { return reinterpret_cast<uintptr_t>(&kTable); },
      "The address of the functions that a plug-in works with (csrc/base/plugin.h).");
}

}  // namespace farandole

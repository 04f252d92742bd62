#include "group/grouped.h"

#include <algorithm>
#include <string>
#include <utility>

namespace farandole {
namespace {

constexpr size_t kAll = ~size_t{0};

/// By what all ranks share: parts of a reduce_scatter differ by one element between ranks.
Packable packable(const Options& call, const Operand& operand, int size) {
  Packable array{.spec = call, .dtype = operand.input.dtype, .bytes = operand.input.bytes()};
  if (call.kind == Collective::all_gather) array.bytes *= static_cast<size_t>(size);
  array.alone = !Grouped::has(call.kind);
  return array;
}

}  // namespace

std::shared_ptr<Bundle> bundle_of(const Options& call, const std::vector<Operand>& operands) {
  if (operands.size() == 1 || call.kind == Collective::barrier) return nullptr;
  std::vector<BundledArray> arrays;
  arrays.reserve(operands.size());
  for (const Operand& o : operands)
    arrays.push_back({o.input.count, 0, 0, o.input.dtype, call.kind});
  return std::make_shared<Bundle>(call.name, std::move(arrays));
}

std::vector<std::vector<size_t>> plan_grouped(const Options& call,
                                              const std::vector<Operand>& operands, int size,
                                              const PackLimits& limits) {
  std::vector<Packable> arrays;
  arrays.reserve(operands.size());
  for (const Operand& o : operands) arrays.push_back(packable(call, o, size));
  std::vector<std::vector<size_t>> planned = plan_packs(arrays, limits);
  if (operands.empty()) planned.emplace_back();  // compared with what others give
  return planned;
}

std::string name_of_part(const Options& call, const std::vector<size_t>& members, size_t arrays) {
  if (arrays < 2) return call.name;
  std::string name = call.name + "[" + std::to_string(members.front());
  if (members.size() > 1) name += " … " + std::to_string(members.back());
  return name + ']';
}

bool Grouped::has(Collective kind) {
  return kind == Collective::all_reduce || kind == Collective::broadcast ||
         kind == Collective::reduce_scatter || kind == Collective::all_gather;
}

Grouped::Grouped(Group& group, std::vector<Operand> operands, Options options,
                 const PackLimits& limits)
    : group_(group), operands_(std::move(operands)), options_(std::move(options)) {
  for (const Operand& o : operands_)
    checked_shape(o.input, o.output, options_, group_.rank(), group_.size());
  options_.bundle = bundle_of(options_, operands_);
  for (std::vector<size_t>& members : plan_grouped(options_, operands_, group_.size(), limits)) {
    Planned& planned = planned_.emplace_back();
    planned.members = std::move(members);
    if (planned.members.size() < 2) continue;
    std::vector<Operand> packed;
    packed.reserve(planned.members.size());
    for (const size_t i : planned.members) packed.push_back(operands_[i]);
    planned.pack = std::make_shared<Pack>(options_.kind, group_.size(), std::move(packed));
  }
}

/// The operation, with its inputs in their place.
CollectiveCall Grouped::filled(Planned& planned) {
  CollectiveCall call;
  call.options = options_;
  const std::vector<size_t>& members = planned.members;
  call.options.name = name_of_part(options_, members, operands_.size());
  if (members.size() == 1) call.operand = operands_[members.front()];
  if (!planned.pack) return call;
  planned.pack->reserve(group_.pool());
  if (options_.gate) {
    call.options.gate = std::make_shared<PackGate>(options_.gate, planned.pack);
  } else {
    size_t budget = kAll;
    planned.pack->fill(budget);
  }
  call.operand = planned.pack->operand();
  call.options.counts = planned.pack->counts();
  call.options.keepalive = planned.pack->kept_with(std::move(call.options.keepalive));
  return call;
}

void Grouped::submit(bool caller_waits) {
  std::vector<CollectiveCall> calls;
  for (Planned& planned : planned_) calls.push_back(filled(planned));
  handles_ = group_.submit_all(std::move(calls), caller_waits);
}

void Grouped::begin_on(const std::shared_ptr<Stream>& stream, int looks) {
  for (Planned& planned : planned_)
    handles_.push_back(group_.begin_on(stream, filled(planned), looks));
}

size_t Grouped::bytes() const {
  size_t bytes = 0;
  for (const Operand& o : operands_) bytes += o.input.bytes();
  return bytes;
}

bool Grouped::done() const { return std::ranges::all_of(handles_, &Handle::done); }

bool Grouped::wait(Deadline until) {
  std::optional<Error> first;
  if (!wait_for_all(handles_, until, first)) return false;
  if (first) throw Error(*first);
  for (Planned& planned : planned_)
    if (planned.pack) planned.pack->unpack_all();
  return true;
}

}  // namespace farandole

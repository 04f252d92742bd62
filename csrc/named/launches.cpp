#include "named/launches.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "stream/gates.h"

namespace farandole {
namespace {

constexpr size_t kBytesPerTurn = 128 << 10;  // copied before the streams are polled again
constexpr size_t kMostRunning = 16;          // bounds packs in use; operations run one at a time

bool travels_together(Collective kind) {  // what needs no memory that others decide the size of
  return kind == Collective::all_reduce || kind == Collective::broadcast;
}

Packable packable(const Signature& t, size_t part, const NamedRequest& request) {
  Packable array{.set = t.set, .spec = t, .alone = !travels_together(t.kind)};
  if (part < request.parts.size()) {
    array.dtype = request.parts[part].input.dtype;
    array.bytes = request.parts[part].input.bytes();
  }
  return array;
}

}  // namespace

// ---- the order ----

void Launches::add(NamedRequest& request, const NamedSet& set, std::span<const int64_t> extents) {
  complete_parts(request, set, extents);
  const Signature& signature = request.described();
  request.parts_left = std::max<size_t>(request.parts.size(), 1);  // a barrier has no tensors
  std::vector<OrderedPart> parts;
  for (size_t p = 0; p < request.parts_left; ++p) {
    parts.push_back({&request, p, &set, nullptr});
    if (travels_together(signature.kind)) continue;
    parts.back().alone = std::make_shared<Request>();
    parts.back().alone->operation = operation_of(request, p, set, extents);
  }
  round_arrays_.reserve(round_arrays_.size() + parts.size());
  round_.reserve(round_.size() + parts.size());
  for (OrderedPart& part : parts) {
    round_arrays_.push_back(packable(signature, part.part, request));
    round_.push_back(std::move(part));
  }
}

void Launches::add_proxy(std::unique_ptr<NamedRequest> request, const NamedSet& set,
                         std::span<const int64_t> extents) {
  proxies_.reserve(proxies_.size() + 1);  // nothing may throw once it is added
  add(*request, set, extents);
  proxies_.push_back(std::move(request));
}

/// A launch that cannot begin here fails everywhere: other ranks wait for it.
void Launches::fail(Launch& launch, const Error& error) {
  launch.set->membership.detector->report(error);
  launch.request->error = launch.set->membership.detector->verdict().value_or(error);
  launch.request->finished.store(true, std::memory_order_release);
}

void Launches::end_round() {
  if (round_.empty()) return;
  std::vector<std::unique_ptr<Launch>> made;
  for (const std::vector<size_t>& tensors : plan_packs(round_arrays_, limits_))
    made.push_back(make(tensors));
  waiting_.insert(waiting_.end(), std::move_iterator(made.begin()), std::move_iterator(made.end()));
  round_.clear();
  round_arrays_.clear();
}

std::vector<NamedRequest*> Launches::drop_round() {
  std::vector<NamedRequest*> dropped;
  for (const OrderedPart& part : std::exchange(round_, {})) {
    if (part.part > 0) continue;
    if (part.request->signature)
      end_stand_in(part.request);
    else
      dropped.push_back(part.request);
  }
  round_arrays_.clear();
  return dropped;
}

std::unique_ptr<Launches::Launch> Launches::make(const std::vector<size_t>& tensors) const {
  auto launch = std::make_unique<Launch>();
  const OrderedPart& first = round_[tensors.front()];
  launch->set = first.set;
  for (const size_t i : tensors) launch->owners.push_back(round_[i].request);
  if (first.alone) {
    launch->request = first.alone;
    return launch;
  }
  launch->request = std::make_shared<Request>();
  Operation& o = launch->request->operation;
  o = operation_of(*first.request, first.part, *first.set, {});
  if (tensors.size() == 1) return launch;
  std::vector<Operand> operands;
  std::vector<std::shared_ptr<Gate>> gates;
  for (const size_t i : tensors) {
    operands.push_back(round_[i].request->parts[round_[i].part]);
    if (const auto& gate = round_[i].request->gate) gates.push_back(gate);
  }
  launch->pack = std::make_shared<Pack>(o.kind, first.set->size(), std::move(operands));
  o.gate.reset();
  if (auto gate = all_of(std::move(gates)))
    o.gate = std::make_shared<PackGate>(std::move(gate), launch->pack);
  o.name += " and " + std::to_string(tensors.size() - 1) + " more";
  return launch;
}

// ---- on their way ----

bool Launches::poll(std::vector<NamedRequest*>& finished) {
  bool moved = false;
  size_t budget = kBytesPerTurn;
  for (size_t i = 0; i < running_.size();) {
    Launch& launch = *running_[i];
    if (!launch.request->finished.load(std::memory_order_acquire)) {
      ++i;
      continue;
    }
    moved = true;
    if (!unpack(launch, budget)) return true;
    end(launch, finished);
    running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  while (!waiting_.empty() && running_.size() < kMostRunning) {
    moved = true;
    Launch& launch = *waiting_.front();
    try {
      if (!prepare(launch, budget)) return true;
      start(launch);
    } catch (const Error& error) {
      fail(launch, error);
    } catch (const std::exception& error) {
      fail(launch, Error(ErrorCode::resource,
                         "cannot begin " + launch.request->operation.name + ": " + error.what()));
    }
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
  return moved;
}

/// True when the pack is full or will be when its gate opens, or there is none.
bool Launches::prepare(Launch& launch, size_t& budget) {
  if (!launch.pack) return true;
  launch.pack->reserve(packs_);
  Operation& o = launch.request->operation;
  if (!o.gate && !launch.pack->fill(budget)) return false;
  o.input = launch.pack->operand().input;
  o.output = launch.pack->operand().output;
  o.count = o.input.count;
  return true;
}

void Launches::start(Launch& launch) {
  const Operation& o = launch.request->operation;
  try {
    if (!o.algorithm.empty()) launch.set->stream->require_backend(o);
  } catch (const Error& refusal) {  // the same on every rank
    launch.request->error = refusal;
    launch.request->finished.store(true, std::memory_order_release);
    return;
  }
  engine_.launch(launch.set->stream, launch.request);
}

/// True when all owners have their results.
bool Launches::unpack(Launch& launch, size_t& budget) {
  return !launch.pack || launch.request->error || launch.pack->unpack(budget);
}

void Launches::end(Launch& launch, std::vector<NamedRequest*>& finished) {
  for (NamedRequest* const request : launch.owners) {
    if (launch.request->error && !request->error) request->error = launch.request->error;
    if (--request->parts_left > 0) continue;
    if (request->signature)
      end_stand_in(request);
    else
      finished.push_back(request);
  }
}

void Launches::end_stand_in(const NamedRequest* request) {
  std::erase_if(proxies_, [&](const auto& mine) { return mine.get() == request; });
}

}  // namespace farandole

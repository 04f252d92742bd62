#include "named/launches.h"
#include "base/copy.h"

#include <algorithm>
#include <cstring>

namespace farandole {
namespace {

constexpr size_t kBytesPerTurn = 128 << 10;  // copied before the streams are polled again
constexpr size_t kMostRunning = 16;          // bounds packs in use; operations run one at a time

/// Of a request whose parts all travel alike.
CutItem cut_item(const Signature& t, size_t part, const NamedRequest& request) {
  CutItem item{.set = t.set, .spec = t};
  if (part < request.parts.size()) {
    item.dtype = request.parts[part].input.dtype;
    item.bytes = request.parts[part].input.bytes();
  }
  return item;
}

}  // namespace

// ---- the order ----

void Launches::add(NamedRequest& request, const NamedSet& set, std::span<const int64_t> extents) {
  complete_parts(request, set, extents);
  const Signature& signature = request.described();
  request.parts_left = std::max<size_t>(request.parts.size(), 1);  // a barrier has no tensors
  for (size_t p = 0; p < request.parts_left; ++p) {
    to_cut_.push_back(cut_item(signature, p, request));
    round_.push_back({&request, p, &set, nullptr});
    const Collective kind = signature.kind;
    if (kind == Collective::all_reduce || kind == Collective::broadcast) continue;
    round_.back().alone = std::make_shared<Request>();
    round_.back().alone->operation = operation_of(request, p, set, extents);
  }
}

void Launches::add_proxy(std::unique_ptr<NamedRequest> request, const NamedSet& set,
                         std::span<const int64_t> extents) {
  add(*request, set, extents);
  proxies_.push_back(std::move(request));
}

void Launches::end_round() {
  if (round_.empty()) return;
  for (const std::vector<size_t>& items : cut(to_cut_, limits_)) waiting_.push_back(make(items));
  round_.clear();
  to_cut_.clear();
}

std::unique_ptr<Launches::Launch> Launches::make(const std::vector<size_t>& items) {
  auto launch = std::make_unique<Launch>();
  Ordered& first = round_[items.front()];
  launch->set = first.set;
  for (const size_t i : items) launch->items.push_back({round_[i].request, round_[i].part});
  if (first.alone) {
    launch->request = std::move(first.alone);
    return launch;
  }
  launch->request = std::make_shared<Request>();
  Operation& o = launch->request->operation;
  o = operation_of(*first.request, first.part, *first.set, {});
  if (items.size() == 1) return launch;
  size_t bytes = 0;
  for (const size_t i : items) bytes += to_cut_[i].bytes;
  o.name += " and " + std::to_string(items.size() - 1) + " more";
  o.count = bytes / size_of(o.input.dtype);
  o.input = o.output = {nullptr, o.count, o.input.dtype};
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
    if (!prepare(*waiting_.front(), budget)) return true;
    start(*waiting_.front());
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
  return moved;
}

/// Copies items into the pack; true when all are there. At least one item a turn.
bool Launches::prepare(Launch& launch, size_t& budget) {
  if (launch.items.size() == 1) return true;
  Operation& o = launch.request->operation;
  if (!launch.pack) {
    launch.pack = packs_.borrow(o.input.bytes());
    o.input.data = o.output.data = launch.pack.get();
  }
  for (; launch.copied < launch.items.size() && budget > 0; ++launch.copied) {
    const Item& item = launch.items[launch.copied];
    const Buffer& from = item.request->parts[item.part].input;
    copy_bytes(launch.pack.get() + launch.at, from.data, from.bytes());
    launch.at += from.bytes();
    budget -= std::min(budget, from.bytes());
  }
  return launch.copied == launch.items.size();
}

void Launches::start(Launch& launch) {
  launch.copied = launch.at = 0;
  Operation& o = launch.request->operation;
  try {
    if (!o.algorithm.empty()) launch.set->stream->require_backend(o);
  } catch (const Error& refusal) {  // the same on every rank
    launch.request->error = refusal;
    launch.request->finished.store(true, std::memory_order_release);
    return;
  }
  engine_.launch(launch.set->stream, launch.request);
}

/// Copies results to their owners; true when all have theirs.
bool Launches::unpack(Launch& launch, size_t& budget) {
  if (!launch.pack || launch.request->error) return true;
  for (; launch.copied < launch.items.size() && budget > 0; ++launch.copied) {
    const Item& item = launch.items[launch.copied];
    const Buffer& to = item.request->parts[item.part].output;
    copy_bytes(to.data, launch.pack.get() + launch.at, to.bytes());
    launch.at += to.bytes();
    budget -= std::min(budget, to.bytes());
  }
  return launch.copied == launch.items.size();
}

void Launches::end(Launch& launch, std::vector<NamedRequest*>& finished) {
  for (const Item& item : launch.items) {
    NamedRequest& request = *item.request;
    if (launch.request->error && !request.error) request.error = launch.request->error;
    if (--request.parts_left > 0) continue;
    if (request.signature)
      std::erase_if(proxies_, [&](const auto& mine) { return mine.get() == &request; });
    else
      finished.push_back(&request);
  }
}

}  // namespace farandole

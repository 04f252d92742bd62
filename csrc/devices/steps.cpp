#include "devices/steps.h"

#include <algorithm>
#include <bit>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.h"
#include "control/absence.h"
#include "devices/staged_copies.h"
#include "engine/fork.h"
#include "stream/stream.h"

namespace farandole {
namespace {

constexpr uint64_t kGraphsNumber = kStepsNumber + 1;  // of no stream either
constexpr int kMostRanksOfSteps = 64;                 // that the kernels take
constexpr size_t kMostFailed = 1024;                  // calls that are remembered
constexpr auto kPartingPatience = std::chrono::seconds(3);
constexpr auto kBetweenCompletionLooks = std::chrono::microseconds(50);
constexpr auto kBetweenInterruptions = std::chrono::milliseconds(100);
constexpr auto kBetweenPartingLooks = std::chrono::milliseconds(1);

struct KnownSteps {
  std::mutex mutex;                                                             // guards all
  std::vector<std::pair<std::weak_ptr<const void>, std::weak_ptr<Steps>>> all;  // by owner
};

KnownSteps& known_steps() {
  static auto* const one = new KnownSteps;
  return *one;
}

/// Exchanges of worlds that have ended, whose memory other ranks may still have open.
struct KeptForOthers {
  struct One {
    std::shared_ptr<DeviceExchange> exchange;
    PeerParting parting;
  };
  std::mutex mutex;  // guards all
  std::vector<One> all;

  void add(One one) {
    const std::lock_guard lock(mutex);
    all.push_back(std::move(one));
  }
  void sweep() {
    const std::lock_guard lock(mutex);
    std::erase_if(all, [](One& one) { return one.parting.is_over([](int) { return false; }); });
  }
};

KeptForOthers& kept_for_others() {
  static auto* const one = new KeptForOthers;
  return *one;
}

void keep_for_others(std::shared_ptr<DeviceExchange> exchange, PeerParting parting) {
  log(LogLevel::info, "other ranks have not let go of this one's memory of device " +
                          std::to_string(exchange->ordinal()) +
                          " yet: it stays until they do, or until this process ends");
  kept_for_others().add({std::move(exchange), std::move(parting)});
}

}  // namespace

std::string Steps::why_no_buckets(const Group& group) {
  if (!group.engine()->host().are_here(group.members())) return "its ranks are on several hosts";
  if (group.size() > kMostRanksOfSteps)
    return "it has more than " + std::to_string(kMostRanksOfSteps) + " ranks";
  return "";
}

std::shared_ptr<Steps> Steps::of(Group& group, int device) {
  return of_owner(group, group.membership().key, group.shared_from_this(), device);
}

std::shared_ptr<Steps> Steps::of(Group& group, const std::shared_ptr<Stream>& stream, int device) {
  return of_owner(group, stream->key(), stream, device);
}

std::shared_ptr<Steps> Steps::of_owner(Group& group, uint64_t key,
                                       const std::shared_ptr<const void>& owner, int device) {
  KnownSteps& one = known_steps();
  const std::lock_guard lock(one.mutex);
  std::erase_if(one.all, [](const auto& entry) { return entry.first.expired(); });
  for (const auto& [known, steps] : one.all)
    if (known.lock() == owner) {
      auto found = steps.lock();
      return found && found->device() == device ? found : nullptr;
    }
  auto made = std::make_shared<Steps>(group, key, owner, device);
  group.engine()->add_task(made);  // which keeps it
  one.all.emplace_back(owner, made);
  return made;
}

Steps::Steps(Group& group, uint64_t key, std::weak_ptr<const void> owner, int device)
    : engine_(*group.engine()),
      key_(key),
      owner_(std::move(owner)),
      interrupted_(group.defaults().interrupted),
      device_(device) {
  kept_for_others().sweep();
  PeerOffer bucket = open_exchange(group, exchange_, InGraphs::no);
  watch_.emplace(engine_, group.membership(), exchange_);
  backend_.emplace(engine_, group.membership(), key_, exchange_, std::move(bucket),
                   why_no_buckets(group), *watch_);
}

/// Opens an exchange. Returns this rank's bucket, where ranks share buckets, or why it has none.
PeerOffer Steps::open_exchange(const Group& group, std::shared_ptr<DeviceExchange>& exchange,
                               InGraphs in_graphs) const {
  const Host& host = engine_.host();
  PeerOffer bucket;
  try {
    exchange = DeviceExchange::open(
        CudaExchangeShape{.device = device_,
                          .rank = group.rank(),
                          .size = group.size(),
                          .doorbell = host.peers[static_cast<size_t>(host.rank)].doorbell.get(),
                          .spins = in_graphs == InGraphs::no,
                          .captured = in_graphs == InGraphs::yes,
                          .link_blocks = engine_.options().device_link_blocks,
                          .bucket_bytes = engine_.options().device_bucket_bytes});
    if (why_no_buckets(group).empty()) bucket = exchange->offer_bucket();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::forked) throw;
    bucket.refusal = error.verdict();
  } catch (const std::exception& error) {  // no memory, say; the others wait for an answer
    bucket.refusal = error.what();
  }
  return bucket;
}

GraphBackend& Steps::graphs(Group& group) {
  const std::lock_guard lock(mutex_);
  if (!graphs_) {
    std::shared_ptr<DeviceExchange> exchange;
    PeerOffer bucket = open_exchange(group, exchange, InGraphs::yes);
    graphs_ = std::make_unique<GraphBackend>(
        engine_, group.membership(), stream_key(key_, kGraphsNumber), std::move(exchange),
        std::move(bucket), engine_.options().device_bucket_bytes, group.defaults().timeout);
    made_graphs_.store(graphs_.get(), std::memory_order_release);  // partner: poll, look_around
  }
  return *graphs_;
}

Steps::~Steps() {
  if (!in_child()) leave();
}

/// Waits for operations in flight. Handles may still have them handed over.
void Steps::leave() {
  if (std::exchange(left_, true)) return;
  if (GraphBackend* const graphs = made_graphs_.load(std::memory_order_acquire)) graphs->leave();
  watch_->end();
  backend_->leave();
  if (!exchange_) return;
  exchange_->let_go_of_peers();  // drains what did not come to its end
  PeerParting* const parting = backend_->parting();
  if (parting == nullptr) return;
  part();
  const Deadline patience = Deadline::after(kPartingPatience);
  const auto dead = [this](int member) { return is_dead(member); };
  while (!parting->is_over(dead)) {
    if (patience.passed(now())) {
      keep_for_others(exchange_, std::move(*parting));
      return;
    }
    std::this_thread::sleep_for(kBetweenPartingLooks);
  }
}

/// `member`: by place.
bool Steps::is_dead(int member) const {
  const int rank = backend_->membership().members[static_cast<size_t>(member)];
  const auto gone = absence_of(engine_.host(), rank, "");
  return gone && gone->code() == ErrorCode::peer_lost;
}

/// This rank uses nothing of the others' any more.
void Steps::part() {
  if (backend_->parting()->told()) return;
  exchange_->let_go_of_peers();
  backend_->parting()->tell();
}

void Steps::check(const StepArrays& arrays) const {
  const FailureDetector& detector = *backend_->membership().detector;
  if (!detector.failed() || exchange_->is_complete(arrays.number)) return;
  if (const auto verdict = detector.verdict()) throw Error(*verdict);
}

void Steps::await(const StepArrays& arrays) const {
  TimePoint next_interruption = now() + kBetweenInterruptions;
  while (!exchange_->is_complete(arrays.number)) {
    check(arrays);
    if (const TimePoint when = now(); when >= next_interruption) {
      interrupted_();
      next_interruption = when + kBetweenInterruptions;
    }
    std::this_thread::sleep_for(kBetweenCompletionLooks);
  }
}

void Steps::hand_over(const StepArrays& arrays, std::optional<uint64_t> stream) {
  try {
    if (stream)
      exchange_->complete_before(*arrays.moments, std::bit_cast<cuda::StreamHandle>(*stream));
    else
      await(arrays);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::invalid_argument) throw;  // that stream is being captured
    FailureDetector& detector = *backend_->membership().detector;
    if (!detector.failed()) detector.report(on_rank(error, engine_.host().rank));
    if (const auto verdict = detector.verdict()) throw Error(*verdict);
    throw;
  }
  check(arrays);
}

bool Steps::worth_trying(uint64_t call) const {
  const std::lock_guard lock(mutex_);
  return !failed_.contains(call);
}

void Steps::note_failed(uint64_t call) {
  const std::lock_guard lock(mutex_);
  if (failed_.size() < kMostFailed) failed_.insert(call);
}

bool Steps::poll(TimePoint) {
  watch_->poll();
  if (GraphBackend* const graphs = made_graphs_.load(std::memory_order_acquire))
    graphs->poll_replays();
  return false;
}

void Steps::look_around(TimePoint when) {
  watch_->look_around(when);
  GraphBackend* const graphs = made_graphs_.load(std::memory_order_acquire);
  if (graphs != nullptr) graphs->look_around(when);
  if (!watch_->idle() || (graphs != nullptr && graphs->has_graphs())) return;
  // The engine alone has it: no call of this rank's is on its way.
  const bool ends = owner_.expired() && weak_from_this().use_count() == 1;
  if (ends) backend_->stop_meeting();
  PeerParting* const parting = backend_->parting();
  const auto dead = [this](int member) { return is_dead(member); };
  if (parting != nullptr && backend_->rests() && (ends || parting->has_begun(dead))) part();
  if (owner_.expired() && (parting == nullptr || (parting->told() && parting->is_over(dead))))
    engine_.drop_task(shared_from_this());
}

}  // namespace farandole

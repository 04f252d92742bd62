#include "devices/steps.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "stream/stream.h"

namespace farandole {
namespace {

constexpr uint64_t kStepsNumber = (uint64_t{1} << 62) + 16;  // of no stream
constexpr int kMostRanksOfSteps = 64;                        // that the kernels take
constexpr size_t kMostFailed = 1024;                         // calls that are remembered

struct KnownSteps {
  std::mutex mutex;  // guards all
  std::vector<std::pair<std::weak_ptr<Group>, std::weak_ptr<Steps>>> all;
};

KnownSteps& known_steps() {
  static auto* const one = new KnownSteps;
  return *one;
}

}  // namespace

std::shared_ptr<Steps> Steps::of(Group& group, int device) {
  if (group.size() > kMostRanksOfSteps || !group.engine()->host().are_here(group.members()))
    return nullptr;
  KnownSteps& one = known_steps();
  const std::lock_guard lock(one.mutex);
  std::erase_if(one.all, [](const auto& entry) { return entry.first.expired(); });
  for (const auto& [owner, steps] : one.all)
    if (owner.lock().get() == &group) {
      auto found = steps.lock();
      return found && found->device() == device ? found : nullptr;
    }
  auto made = std::make_shared<Steps>(group, device);
  group.engine()->add_task(made);  // which keeps it
  one.all.emplace_back(group.weak_from_this(), made);
  return made;
}

Steps::Steps(Group& group, int device)
    : engine_(*group.engine()), group_(group.weak_from_this()), device_(device) {
  const Host& host = engine_.host();
  const size_t piece_bytes = engine_.options().device_bucket_bytes;
  PeerOffer bucket;
  try {
    exchange_ = std::make_shared<DeviceExchange>(
        CudaExchangeShape{.device = device,
                          .rank = group.rank(),
                          .size = group.size(),
                          .doorbell = host.peers[static_cast<size_t>(host.rank)].doorbell.get(),
                          .spins = 1,
                          .bucket_bytes = piece_bytes});
    bucket = exchange_->open_bucket();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::forked) throw;
    bucket.refusal = error.verdict();
  }
  watch_.emplace(engine_, group.membership(), exchange_);
  backend_.emplace(host, group.membership(), stream_key(group.membership().key, kStepsNumber),
                   exchange_, std::move(bucket), piece_bytes, engine_.options().device_path,
                   *watch_);
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
  return false;
}

void Steps::look_around(TimePoint when) {
  watch_->look_around(when);
  if (group_.expired() && watch_->idle()) engine_.drop_task(shared_from_this());
}

}  // namespace farandole

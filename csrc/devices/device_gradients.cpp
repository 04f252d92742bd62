#include "devices/device_gradients.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "devices/staged_arrays.h"
#include "engine/fork.h"
#include "fold/fold.h"

namespace farandole {
namespace {

size_t bytes_of(const Parameter& p) { return p.count * size_of(p.dtype); }

size_t whole_pages(size_t bytes) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

}  // namespace

/// Of one bucket in one step.
class DeviceGradients::Arrival : public Gate {
 public:
  Arrival(std::shared_ptr<Staging> staging, std::shared_ptr<DeviceQueue> queue, int rank,
          DType dtype, double prescale)
      : staging_(std::move(staging)),
        queue_(std::move(queue)),
        rank_(rank),
        dtype_(dtype),
        prescale_(prescale) {}
  ~Arrival() override {
    if (is_open_) return;  // else of a group that has failed
    for (auto& owner : owners_) staging_->keep(std::move(owner), queue_, until_);
  }

  void add(std::byte* place, size_t count, bool brought, std::shared_ptr<const void> owner) {
    slots_.push_back({place, count, brought});
    if (owner) owners_.push_back(std::move(owner));
  }
  void open_after(const CopiesUntil& until) { until_ = until; }

  bool is_open() override {
    if (is_open_) return true;
    if (!until_.reached(*queue_)) {
      if (watch_.due()) look_for_loss();
      return false;
    }
    for (const Slot& slot : slots_) fill(slot);
    owners_.clear();
    return is_open_ = true;
  }
  std::string awaited() const override {
    return "its gradients on device " + std::to_string(queue_->device());
  }

 private:
  struct Slot {
    std::byte* place;
    size_t count;
    bool brought;
  };
  /// What the copy of a gradient on the host does.
  void fill(const Slot& slot) const {
    if (!slot.brought)
      std::memset(slot.place, 0, slot.count * size_of(dtype_));
    else if (prescale_ != 1)
      scale(slot.place, slot.place, slot.count, dtype_, {prescale_, 1});
  }
  void look_for_loss() {
    try {
      queue_->look_for_loss();
    } catch (const Error& error) {
      throw on_rank(error, rank_);
    }
  }

  std::shared_ptr<Staging> staging_;
  std::shared_ptr<DeviceQueue> queue_;
  int rank_;
  DType dtype_;
  double prescale_;
  std::vector<Slot> slots_;
  std::vector<std::shared_ptr<const void>> owners_;
  CopiesUntil until_{.lost = true};
  LossWatch watch_;
  bool is_open_ = false;
};

DeviceGradients::DeviceGradients(Reducer& reducer, int device, std::vector<bool> carried)
    : reducer_(reducer),
      carried_(std::move(carried)),
      staging_(Staging::of(*reducer.group().engine())),
      queue_(or_fail_group(reducer.group(), [&] { return staging_->queue(device); })),
      pages_(reducer.buckets().size()),
      homes_(carried_.size()) {}

DeviceGradients::~DeviceGradients() { wait_for_copies(); }

void DeviceGradients::bring(int parameter, uint64_t address, uint64_t stream,
                            std::shared_ptr<const void> owner, int sparse_dims) {
  const auto i = static_cast<size_t>(parameter);
  const auto begin_copy = [&] {
    const BucketPlace place = reducer_.places()[i];
    const std::lock_guard lock(mutex_);
    const DevicePages& pages = pages_of(place.bucket);
    queue_->follow(stream);
    homes_[i] = {address, std::move(owner), true};
    queue_->copy_to_host(pages, address, bytes_of(reducer_.parameters()[i]), place.offset);
  };
  reducer_.mark_carried(
      parameter, [&] { or_fail_group(reducer_.group(), begin_copy); }, sparse_dims);
}

const DevicePages& DeviceGradients::pages_of(size_t bucket) {
  DevicePages& pages = pages_[bucket];
  if (!pages)
    pages = queue_->register_pages(reducer_.memory(bucket).get(),
                                   whole_pages(reducer_.buckets()[bucket].bytes()));
  return pages;
}

std::shared_ptr<Gate> DeviceGradients::launch(size_t b) {
  const Bucket& bucket = reducer_.buckets()[b];
  const auto is_carried = [&](const Placement& p) {
    return carries(static_cast<size_t>(p.parameter));
  };
  if (std::ranges::none_of(bucket.placements, is_carried)) return nullptr;
  Group& group = reducer_.group();
  auto gate = std::make_shared<Arrival>(staging_, queue_, group.engine()->host().rank, bucket.dtype,
                                        reducer_.copied_prescale(b));
  std::byte* const memory = reducer_.memory(b).get();
  const std::lock_guard lock(mutex_);
  CopiesUntil until;
  for (const Placement& p : bucket.placements) {
    if (!is_carried(p)) continue;
    Home& home = homes_[static_cast<size_t>(p.parameter)];
    until.has_to_host |= home.brought;
    gate->add(memory + p.offset * size_of(bucket.dtype), p.count, home.brought,
              std::move(home.owner));
    home.brought = false;
  }
  if (until.has_to_host)
    until.to_host = or_fail_group(group, [&] { return queue_->mark(kToHost); });
  until.has_to_device = returned_.has_value();
  until.to_device = returned_.value_or(0);
  gate->open_after(until);
  return gate;
}

void DeviceGradients::take_back(std::span<const int> parameters, uint64_t stream) {
  if (parameters.empty()) return;
  or_fail_group(reducer_.group(), [&] {
    const std::lock_guard lock(mutex_);
    for (const int parameter : parameters) {
      const auto i = static_cast<size_t>(parameter);
      const BucketPlace place = reducer_.places()[i];
      queue_->copy_to_device(homes_[i].address, pages_[place.bucket],
                             bytes_of(reducer_.parameters()[i]), place.offset);
    }
    returned_ = queue_->mark(kToDevice);
    queue_->precede(stream);
  });
}

void DeviceGradients::let_go() {
  const std::lock_guard lock(mutex_);
  wait_for_copies();
  pages_.clear();
  pages_.resize(reducer_.buckets().size());
  returned_.reset();
}

void DeviceGradients::wait_for_copies() noexcept {
  if (in_child()) return;
  try {
    for (const CudaWay way : {kToHost, kToDevice}) queue_->synchronize(way);
  } catch (const Error&) {  // NOLINT: of a device that is lost none is under way
  }
}

}  // namespace farandole

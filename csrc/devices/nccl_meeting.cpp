#include "devices/nccl_meeting.h"

#include <string_view>
#include <utility>

#include "base/fixed_text.h"
#include "base/log.h"

namespace farandole {
namespace {

/// Of NCCL, to make a communicator. It takes seconds where many ranks do; what takes longer is
/// stuck, and arrays go another way.
constexpr auto kMeetingPatience = std::chrono::seconds(60);

PeerOffer offer_of(DeviceExchange* exchange, bool makes_id) {
  if (exchange != nullptr) return exchange->offer_nccl(makes_id);
  PeerOffer none;
  none.refusal = "its device cannot be used";
  return none;
}

}  // namespace

NcclMeeting::NcclMeeting(const Host& host, const Membership& membership, uint64_t key,
                         std::shared_ptr<DeviceExchange> exchange, bool wanted)
    : membership_(membership), exchange_(std::move(exchange)), wanted_(wanted) {
  meeting_.emplace(host, membership_, key, offer_of(exchange_.get(), membership.rank == 0),
                   [this](std::span<const PeerOffered> all) { return open(all); });
}

/// Whether this rank's end is there. Throws Error where it cannot be.
bool NcclMeeting::open(std::span<const PeerOffered> all) {
  if (!std::exchange(opened_, true)) {
    for (size_t r = 0; r < all.size(); ++r)
      for (size_t other = 0; other < r; ++other)
        if (text_in(all[r].get<NcclOffer>().bus_id) == text_in(all[other].get<NcclOffer>().bus_id))
          throw Error(ErrorCode::device,
                      "NCCL takes one rank on a device, and " +
                          name_ranks({membership_.members[other], membership_.members[r]}) +
                          " share one");
    until_ = Deadline::after(kMeetingPatience);
    exchange_->open_nccl(all.front().get<NcclOffer>().id);
  }
  if (exchange_->nccl_ready()) return true;
  if (until_.passed(now()))
    throw Error(ErrorCode::device, "NCCL has not come up within a minute (NCCL_DEBUG=INFO)");
  return false;
}

bool NcclMeeting::poll() {
  if (!meeting_) return true;
  meeting_->poll();
  if (!meeting_->done()) return false;
  refusal_ = meeting_->refusal();
  meeting_.reset();
  if (!refusal_.empty()) {
    if (exchange_) exchange_->abort_nccl();
    log(wanted_ ? LogLevel::warning : LogLevel::info,
        "collectives on devices do without NCCL: " + refusal_);
  }
  return true;
}

std::vector<int> NcclMeeting::silent() const {
  return meeting_ ? meeting_->silent() : std::vector<int>();
}

}  // namespace farandole

#include "devices/nvls_meeting.h"

#include <iterator>
#include <map>
#include <utility>

#include "base/log.h"

namespace farandole {
namespace {

/// The offer that `make` returns, or the error that it throws as a refusal.
template <typename Make>
PeerOffer offered_by(const Make& make) {
  PeerOffer mine;
  try {
    mine = make();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::forked) throw;
    mine.refusal = error.verdict();
  }
  return mine;
}

}  // namespace

NvlsMeeting::NvlsMeeting(const Host& host, const Membership& membership, uint64_t key,
                         std::shared_ptr<DeviceExchange> exchange, bool wanted)
    : host_(host),
      membership_(membership),
      key_(key),
      exchange_(std::move(exchange)),
      wanted_(wanted) {
  meeting_.emplace(host_, membership_, key_, offer(), [this](std::span<const PeerOffered> all) {
    refuse_shared_devices(all);
    exchange_->join_nvls(all.front());
  });
}

PeerOffer NvlsMeeting::offer() const {
  return offered_by([this] { return exchange_->offer_nvls(); });
}

PeerOffer NvlsMeeting::bound() const {
  return offered_by([this] {
    exchange_->bind_nvls();
    return PeerOffer();
  });
}

void NvlsMeeting::refuse_shared_devices(std::span<const PeerOffered> all) const {
  std::map<std::string, int> owners;
  for (size_t r = 0; r < all.size(); ++r) {
    const auto offered = all[r].get<CudaNvls>();
    const int rank = membership_.members[r];
    const auto [owner, alone] =
        owners.try_emplace(std::string(std::begin(offered.device), std::end(offered.device)), rank);
    if (!alone)
      throw Error(ErrorCode::device, "NVLS takes one rank on a device, and " +
                                         name_ranks({owner->second, rank}) + " share one");
  }
}

bool NvlsMeeting::poll() {
  if (done()) return false;
  const bool moved = meeting_->poll();
  if (!meeting_->done()) return moved;
  if (!meeting_->refusal().empty() || binding_) {
    end(meeting_->refusal());
    return true;
  }
  binding_ = true;
  meeting_.emplace(host_, membership_, key_ + 1, bound(), [](std::span<const PeerOffered>) {});
  return true;
}

void NvlsMeeting::end(std::string refusal) {
  refusal_ = std::move(refusal);
  if (refusal_.empty()) parting_ = meeting_->parting();
  meeting_.reset();
  if (refusal_.empty()) return;
  exchange_->close_nvls();
  log(wanted_ ? LogLevel::warning : LogLevel::info,
      "collectives on devices do without NVLS: " + refusal_);
}

}  // namespace farandole

// The messages by which ranks set up an NCCL communicator (devices/nccl_meeting.h), field by field
// (base/message.h). An empty refusal is none.
#pragma once

#include <vector>

#include "base/message.h"
#include "cuda/work.h"

namespace farandole {

inline constexpr size_t kNcclRefusalBytes = 512;

/// A member's device, or why the member cannot take part.
struct NcclOffer {
  bool scales = false;   // its kernels apply factors to results
  bool shares = false;   // its NCCL takes several ranks on a device
  char bus_id[32] = {};  // its device's, on its host
  char refusal[kNcclRefusalBytes] = {};
};
template <>
inline constexpr auto fields_of<NcclOffer> =
    Fields<Sent<&NcclOffer::scales>, Sent<&NcclOffer::shares>, Sent<&NcclOffer::bus_id>,
           Sent<&NcclOffer::refusal>>{};

/// The id by which members find each other in NCCL, or why they do not try.
struct NcclStart {
  bool scales = false;   // all members' kernels do so
  std::vector<char> id;  // a CudaNcclId
  char refusal[kNcclRefusalBytes] = {};
};
template <>
inline constexpr auto fields_of<NcclStart> =
    Fields<Sent<&NcclStart::scales>, Sent<&NcclStart::id, sizeof(CudaNcclId)>,
           Sent<&NcclStart::refusal>>{};

/// Whether a member's end of the communicator is there, or everybody's; or why not.
struct NcclOutcome {
  char refusal[kNcclRefusalBytes] = {};
};
template <>
inline constexpr auto fields_of<NcclOutcome> = Fields<Sent<&NcclOutcome::refusal>>{};

}  // namespace farandole

#include "cuda/exchange/arrivals.h"

#include <cstddef>

namespace farandole::cuda {
namespace {

bool is_before(uint32_t one, uint32_t other) { return static_cast<int32_t>(one - other) < 0; }

/// The state of one channel, as Arrivals::late() explains it.
struct Standing {
  RankBits late = 0;
  bool next = false;  // all stand before a meeting to which they will come
};

Standing standing_of(uint32_t rank, uint32_t size, uint32_t own, const uint32_t* arrived,
                     uint32_t target) {
  const auto of = [&](uint32_t r) { return r == rank ? own : arrived[r]; };
  uint32_t farthest = own;
  for (uint32_t r = 0; r < size; ++r)
    if (is_before(farthest, of(r))) farthest = of(r);
  Standing found{.next = is_before(farthest, target)};
  for (uint32_t r = 0; r < size; ++r)
    if (is_before(of(r), farthest)) found.late |= RankBits{1} << r;
  return found;
}

}  // namespace

Arrivals::Arrivals(const std::shared_ptr<const DeviceContext>& context)
    : copied_(context, 2 * sizeof(Copied)) {
  static_assert(offsetof(Copied, arrived) == offsetof(Flags, arrived));
  static_assert(sizeof(Copied::arrived[0]) == sizeof(Flags::arrived[0]));
}

void Arrivals::ask(const StreamRef& stream, const Flags* steps, const Flags* spins) {
  DevicePointer to = copied_.address();
  for (const Flags* flags : {steps, spins}) {
    stream.copy(to, address_of(flags), sizeof(Copied));
    to += sizeof(Copied);
  }
  asked_ = true;
}

RankBits Arrivals::late(uint32_t rank, uint32_t size, const std::array<uint32_t, kCudaStrands>& met,
                        uint32_t spun) {
  asked_ = false;
  const auto* const copied = reinterpret_cast<const Copied*>(copied_.host());
  Standing all;
  const auto add = [&](const Copied& of, size_t channel, uint32_t target) {
    const Standing found = standing_of(rank, size, of.epoch[channel], of.arrived[channel], target);
    all.late |= found.late;
    all.next |= found.next;
  };
  for (size_t strand = 0; strand < met.size(); ++strand) add(copied[0], strand, met[strand]);
  add(copied[1], 0, spun);
  if (all.late == 0 && all.next) return ~RankBits{0} >> (64 - size);
  return all.late;
}

}  // namespace farandole::cuda

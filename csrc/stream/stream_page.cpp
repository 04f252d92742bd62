#include "stream/stream_page.h"

namespace farandole {

Posts compare_posts(const StreamMemory& memory) {
  bool all = true;
  for (int r = 0; r < memory.size(); ++r) {
    const uint64_t posted = memory.page(r).entry.posted.load(std::memory_order_acquire);
    const auto ahead =
        static_cast<int32_t>(static_cast<uint32_t>(posted >> 32) - memory.sequence());
    if (ahead < 0) all = false;
    // A peer that is ahead has compared my descriptor with its own and found them equal.
    if (ahead == 0 && posted != memory.ticket) return Posts::different;
  }
  return all ? Posts::same : Posts::waiting;
}

}  // namespace farandole

#include "backends/fetch.h"

#include <algorithm>

namespace farandole {
namespace {

constexpr size_t kTemporary = 256 << 10;  // bytes fetched from all other ranks together
constexpr size_t kLeastPiece = 16 << 10;  // below it the calls cost more than their bytes
constexpr size_t kLineBytes = 64;

}  // namespace

Fetch::Fetch(const StreamMemory& memory)
    : memory_(memory), inputs_(static_cast<size_t>(memory.size())) {
  const auto others = static_cast<size_t>(std::max(1, memory.size() - 1));
  piece_bytes_ = std::max(kLeastPiece, kTemporary / others / kLineBytes * kLineBytes);
}

bool Fetch::fetch(const DirectOperation& what, size_t at, size_t bytes) {
  temporary_.resize(piece_bytes_ * inputs_.size());  // the first time
  for (int r = 0; r < memory_.size(); ++r) {
    const auto index = static_cast<size_t>(r);
    const std::byte* whole = r == memory_.rank ? what.operation().input.data : what.input_of(r);
    std::byte* copy = temporary_.data() + index * piece_bytes_;
    inputs_[index] = whole != nullptr ? whole + at : copy;
    if (whole == nullptr && !what.read(r, copy, what.foreign_input_of(r) + at, bytes)) return false;
  }
  return true;
}

}  // namespace farandole

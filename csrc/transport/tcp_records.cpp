#include "transport/tcp_records.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/wire.h"

namespace farandole {
namespace {

constexpr size_t kLength = sizeof(uint32_t);
constexpr size_t kRoom = 2 * (kLength + TcpRecords::kMost + Seals::kBytes);

}  // namespace

size_t TcpRecords::put(std::span<const std::byte> bytes) {
  const size_t count = std::min(bytes.size(), kMost);
  const auto length = static_cast<uint32_t>(count);
  out_.resize(kLength + count + Seals::kBytes);
  std::memcpy(out_.data(), &length, kLength);
  const Mark mark = seals_.out.close(bytes.first(count), out_.data() + kLength);
  std::ranges::copy(mark, out_.data() + kLength + count);
  sent_ = 0;
  return count;
}

std::span<std::byte> TcpRecords::room() {
  if (in_.empty()) in_.resize(kRoom);
  std::memmove(in_.data(), in_.data() + begin_, end_ - begin_);
  end_ -= begin_;
  begin_ = 0;
  return std::span(in_).subspan(end_);
}

size_t TcpRecords::next() const {
  uint32_t length = 0;
  if (end_ - begin_ < kLength) return 0;
  std::memcpy(&length, in_.data() + begin_, kLength);
  if (length == 0 || length > kMost)
    WireReader::malformed("a record of " + std::to_string(length) + " bytes");
  return end_ - begin_ < kLength + length + Seals::kBytes ? 0 : length;
}

void TcpRecords::take(std::byte* into) {
  const size_t count = next();
  const auto sealed = std::span<const std::byte>(in_).subspan(begin_ + kLength);
  if (!seals_.in.opens(sealed.first(count), sealed.subspan(count).first<Seals::kBytes>(), into))
    WireReader::malformed(kBrokenSeal);
  begin_ += kLength + count + Seals::kBytes;
}

}  // namespace farandole

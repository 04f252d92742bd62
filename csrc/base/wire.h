// Bounded messages of fixed layout: what is read never exceeds what was sent. Numbers and texts
// alone, one by one: no struct is copied. Ranks of one version on hosts of one byte order talk like
// this, which the handshake has checked.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/error.h"

namespace farandole {

template <typename T>
inline constexpr bool is_wire_number = std::is_arithmetic_v<T> || std::is_enum_v<T>;

/// Bytes of another rank that mean nothing. A caller that knows their source adds it: see taken().
class Malformed : public Error {
 public:
  explicit Malformed(const std::string& why)
      : Error(ErrorCode::link, "a message of another rank is malformed: " + why, {}, kAdvice),
        why_(why) {}
  const std::string& why() const { return why_; }

  static constexpr const char* kAdvice =
      "run the same version on every rank; where it is the same, something on the way changes "
      "bytes";

 private:
  std::string why_;
};

/// Calls `take`, which reads `what` (a kind of message) that `rank` has sent to rank `me`. Throws
/// Error(link) that names all three where it is malformed.
template <typename Take>
decltype(auto) taken(std::string_view what, int rank, int me, Take take) {
  try {
    return take();
  } catch (const Malformed& error) {
    Context where;
    where.rank = where.peer = rank;
    where.evidence = "seen by rank " + std::to_string(me) + ", which has checked every field";
    throw Error(
        ErrorCode::link,
        std::string(what) + " from rank " + std::to_string(rank) + " is malformed: " + error.why(),
        std::move(where), Malformed::kAdvice);
  }
}

/// Why a message whose seal (base/seal.h) does not hold is malformed.
inline constexpr const char* kBrokenSeal =
    "its seal is broken, so it was changed, repeated, held back or made up on its way";

class WireWriter {
 public:
  explicit WireWriter(size_t room = 0) { bytes_.reserve(room); }
  template <typename T>
  void put(T value) {
    static_assert(is_wire_number<T>);
    append(&value, sizeof value);
  }
  template <typename T>
  void put_list(std::span<const T> list) {
    static_assert(is_wire_number<T>);
    put(static_cast<uint32_t>(list.size()));
    append(list.data(), list.size_bytes());
  }
  /// Without their number.
  void put_bytes(std::span<const std::byte> bytes) { append(bytes.data(), bytes.size()); }
  void put_text(std::string_view text) { put_list(std::span<const char>(text)); }

  size_t size() const { return bytes_.size(); }
  /// The bytes so far; the writer is empty afterwards.
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  void append(const void* from, size_t bytes) {
    const auto* first = static_cast<const std::byte*>(from);
    bytes_.insert(bytes_.end(), first, first + bytes);
  }

  std::vector<std::byte> bytes_;
};

/// A message that is written behind its length, and so needs no copy to be framed().
class FrameWriter : public WireWriter {
 public:
  /// `more`: bytes than most have.
  explicit FrameWriter(size_t more = 0) : WireWriter(kUsual + more) { put(uint32_t{0}); }
  std::vector<std::byte> take_frame() {
    std::vector<std::byte> frame = take();
    const auto length = static_cast<uint32_t>(frame.size() - sizeof(uint32_t));
    std::memcpy(frame.data(), &length, sizeof length);
    return frame;
  }

 private:
  static constexpr size_t kUsual = 192;  // bytes of one, with its seal
};

/// Throws Malformed when the bytes end before what is asked for does.
class WireReader {
 public:
  explicit WireReader(std::span<const std::byte> bytes) : left_(bytes) {}

  template <typename T>
  T get() {
    static_assert(is_wire_number<T>);
    T value;
    std::memcpy(&value, next(sizeof value), sizeof value);
    return value;
  }
  template <typename T>
  std::vector<T> get_list(size_t at_most) {
    const auto count = get<uint32_t>();
    if (count > at_most) malformed("a list of " + std::to_string(count) + " entries");
    const std::byte* from = next(count * sizeof(T));  // they are there, so the list may be made
    std::vector<T> list(count);
    if (count > 0) std::memcpy(list.data(), from, count * sizeof(T));
    return list;
  }
  /// So many bytes, where they lie.
  std::span<const std::byte> get_bytes(size_t count) { return {next(count), count}; }
  std::string get_text(size_t at_most) {
    const std::vector<char> text = get_list<char>(at_most);
    return {text.begin(), text.end()};
  }
  /// One of an enumeration's values below `end`.
  template <typename Enum>
  Enum get_enum(Enum last) {
    const auto value = get<uint8_t>();
    if (value > static_cast<uint8_t>(last)) malformed("the number " + std::to_string(value));
    return static_cast<Enum>(value);
  }
  bool done() const { return left_.empty(); }
  /// Behind the last field.
  void end() const {
    if (!done()) malformed(std::to_string(left_.size()) + " bytes behind its end");
  }

  [[noreturn]] static void malformed(const std::string& why) { throw Malformed(why); }

 private:
  const std::byte* next(size_t bytes) {
    if (bytes > left_.size())
      malformed(std::to_string(bytes) + " bytes announced, " + std::to_string(left_.size()) +
                " there");
    const std::byte* at = left_.data();
    left_ = left_.subspan(bytes);
    return at;
  }

  std::span<const std::byte> left_;
};

/// A message with its length in front, as it travels over a stream of bytes.
inline std::vector<std::byte> framed(std::span<const std::byte> message) {
  const auto length = static_cast<uint32_t>(message.size());
  std::vector<std::byte> frame(sizeof length + message.size());
  std::memcpy(frame.data(), &length, sizeof length);
  if (length > 0) std::memcpy(frame.data() + sizeof length, message.data(), message.size());
  return frame;
}

}  // namespace farandole

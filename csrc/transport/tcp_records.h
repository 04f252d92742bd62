// Bytes of a TCP connection in records, where FARANDOLE_WIRE asks for it: each behind its length,
// in front of its seal (base/seal.h), and encrypted if so. A record is opened as it has come whole,
// so nobody reads a byte that its peer has not sent.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/seal.h"

namespace farandole {

class TcpRecords {
 public:
  static constexpr size_t kMost = 32 * 1024;  // bytes in a record

  explicit TcpRecords(const ConnectionKeys& keys, bool hides) : seals_(keys, hides) {}

  // ---- to the peer ----

  /// Makes a record of a prefix of `bytes` and returns its length. Call it with nothing to send.
  size_t put(std::span<const std::byte> bytes);
  std::span<const std::byte> to_send() const { return std::span(out_).subspan(sent_); }
  void sent(size_t count) { sent_ += count; }

  // ---- from the peer ----

  /// Memory for the next bytes, while no record is here whole.
  std::span<std::byte> room();
  void arrived(size_t count) { end_ += count; }
  /// How many bytes the next record has, if it is here whole; else 0. Throws Malformed.
  size_t next() const;
  /// Takes the next record. Throws Malformed where it is not as it was sent.
  void take(std::byte* into);

 private:
  Seals seals_;
  std::vector<std::byte> out_;
  size_t sent_ = 0;  // of it
  std::vector<std::byte> in_;
  size_t begin_ = 0, end_ = 0;  // what of it has arrived and is not taken
};

}  // namespace farandole

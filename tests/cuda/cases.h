// Data for kernels, and the processor's answer to compare theirs with.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "cuda/kernels/device.h"
#include "cuda/plans.h"
#include "executor.h"
#include "fold/fold.h"

namespace farandole::cuda {

using Bytes = std::vector<std::byte>;

/// Elements that begin `offset` elements behind a multiple of 64 bytes. Around them lie bytes that
/// stay what they are.
class Array {
 public:
  Array(DType dtype, size_t count, size_t offset = 0);
  Array(DType dtype, const Bytes& bytes, size_t offset = 0);

  std::byte* data() const { return begin_; }
  Bytes bytes() const { return {begin_, begin_ + bytes_}; }
  void fill(const Bytes& bytes) { std::copy_n(bytes.begin(), bytes_, begin_); }
  void fill(std::byte value) { std::memset(begin_, static_cast<int>(value), bytes_); }
  bool surroundings_are_intact() const;

 private:
  static constexpr size_t kMargin = 64;
  static constexpr std::byte kMark{0xa5};

  size_t bytes_;
  std::unique_ptr<std::byte[]> memory_;
  size_t memory_bytes_;
  std::byte* begin_;
};

/// Random bits, small numbers and special values, by turns.
Bytes some_elements(DType dtype, size_t count, uint64_t seed);
/// Zeros, subnormals, the extremes, infinities and NaNs; of integers the ends and the middle.
Bytes specials(DType dtype);

/// The result of the fold on the CPU.
Bytes folded(std::span<const Bytes> leaves, const Folding& folding);
Bytes scaled(const Bytes& elements, DType dtype, const Scale& scale);

std::vector<const void*> addresses(std::span<const Array> arrays);
std::vector<void*> writable(std::span<const Array> arrays);

/// Ranks in one memory: their flags, mailboxes and abort word.
class Ranks {
 public:
  explicit Ranks(uint32_t size, uint32_t first_epoch = 0);

  uint32_t size() const { return size_; }
  Peers peers(uint32_t rank);
  std::vector<void*> mailboxes();
  void abort(uint32_t value) { abort_ = value; }

 private:
  uint32_t size_;
  uint32_t abort_ = 0;
  std::vector<std::unique_ptr<Flags>> flags_;
  std::vector<std::unique_ptr<Pack[]>> mailboxes_;
};

}  // namespace farandole::cuda

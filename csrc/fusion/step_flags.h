// What ranks tell each other in every step of buckets, by one maximum over all of them.
//
// Note [Equal everywhere]
//
// A maximum tells whether all gave the same byte, when each gives it once as it is and once
// complemented: largest and smallest are equal where all are. So one small all-reduce carries both
// what is or-ed (used, gave up) and what is compared.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace farandole {

class StepFlags {
 public:
  static constexpr uint8_t kAll = 255, kAbandoned = 1;

  StepFlags(size_t parameters, int ranks)
      : bytes_(std::make_shared<std::vector<uint8_t>>(2 * (parameters + sizeof(uint64_t)) +
                                                      static_cast<size_t>(ranks))),
        parameters_(parameters) {}

  /// Shared with the operation in flight.
  const std::shared_ptr<std::vector<uint8_t>>& bytes() const { return bytes_; }

  /// This rank's mark of a parameter; 0 where it has none, and no say in what others have.
  void mark(size_t parameter, uint8_t mark) { put(parameter, parameters_, mark, mark != 0); }
  /// A number that is compared, unless this rank has none.
  void show(uint64_t number, bool is_there) {
    for (size_t i = 0; i < sizeof number; ++i)
      put(2 * parameters_ + i, sizeof number, static_cast<uint8_t>(number >> (8 * i)), is_there);
  }
  /// How a rank takes part; each rank sets its own.
  uint8_t& fare(int rank) { return (*bytes_)[first_fare() + static_cast<size_t>(rank)]; }
  void clear_fares() {
    std::fill(bytes_->begin() + static_cast<ptrdiff_t>(first_fare()), bytes_->end(), uint8_t{0});
  }

  // Of all ranks, once they are reduced.

  /// The largest and the smallest mark of a parameter.
  int most(size_t parameter) const { return (*bytes_)[parameter]; }
  int least(size_t parameter) const { return kAll - (*bytes_)[parameters_ + parameter]; }
  /// Whether ranks have shown one number.
  bool are_alike() const {
    for (size_t i = 2 * parameters_; i < 2 * parameters_ + sizeof(uint64_t); ++i)
      if ((*bytes_)[i] + (*bytes_)[i + sizeof(uint64_t)] > kAll) return false;
    return true;
  }

 private:
  size_t first_fare() const { return 2 * (parameters_ + sizeof(uint64_t)); }
  void put(size_t at, size_t apart, uint8_t byte, bool is_there) {
    (*bytes_)[at] = is_there ? byte : 0;
    (*bytes_)[at + apart] = is_there ? static_cast<uint8_t>(kAll - byte) : 0;
  }

  // By parameter, the marks and their complements; the same of the number's bytes; by rank, fares.
  std::shared_ptr<std::vector<uint8_t>> bytes_;
  size_t parameters_;
};

}  // namespace farandole

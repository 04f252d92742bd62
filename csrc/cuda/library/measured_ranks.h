// All-reduces on one device by ranks that are threads of this process, while they are measured.
#pragma once

#include <atomic>
#include <deque>
#include <functional>

#include "base/cuda_table.h"
#include "cuda/library/exchange.h"
#include "cuda/library/measured_device.h"

namespace farandole::cuda {

class MeasuredRanks {
 public:
  MeasuredRanks(MeasuredDevice& device, const CudaMeasurement& asked);

  /// Time of one all-reduce, by the device's clock: all are in the streams before the first begins.
  double device_seconds();
  /// From a rank's call to where its host sees that it is complete; the median of the first rank's.
  double host_seconds();
  /// Whether the outputs are sums.
  bool are_right() const;

 private:
  struct Rank {
    Rank(const MeasuredDevice& device, const CudaMeasurement& asked,
         const CudaExchangeShape& shape);
    ~Rank();
    Rank(const Rank&) = delete;
    Rank& operator=(const Rank&) = delete;

    MeasuredArray input, output;
    Exchange exchange;
    std::unique_ptr<Moments> moments;  // of the newest
    uint32_t number = 0;
  };

  /// One kernel does all of it.
  bool spins() const { return asked_.what == kMeasuredOneShot; }
  void launch(uint32_t at);
  uint64_t piece_bytes() const;
  void run(uint32_t at, uint64_t begin, uint64_t bytes, int32_t strand, CudaPiece piece);
  int rounds_behind_gate() const;
  double batch();
  double try_batch(int rounds);
  std::string whom_others_wait_for();
  void all_ranks(const std::function<void(uint32_t)>& act);
  void open_gate();

  MeasuredDevice& device_;
  CudaMeasurement asked_;
  DType dtype_;
  Fd doorbell_ = make_event_fd();
  PinnedMemory gate_;  // a word for which the device waits
  uint32_t closed_at_ = 0;
  bool has_gate_;
  std::atomic<uint32_t> launched_{0};  // ranks all of whose all-reduces are in their streams
  std::deque<Rank> ranks_;
};

}  // namespace farandole::cuda

// How a group learns that it has failed, and agrees on why: the first error that any rank reports
// becomes everybody's verdict.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "base/error.h"
#include "transport/segment.h"

namespace farandole {

class FailureDetector {
 public:
  virtual ~FailureDetector() = default;
  /// Cheap enough for every turn of the engine.
  virtual bool failed() const = 0;
  /// Reports an error that this rank saw; the first report of all ranks wins.
  virtual void report(const Error& error) = 0;
  /// Equal on every rank once present.
  virtual std::optional<Error> verdict() const = 0;
};

/// Reports made in this process: the engine wakes sleeping ranks after each.
inline std::atomic<uint64_t> reports_made{0};

/// The error as a fixed layout that another process may read; texts are cut to fit.
struct ErrorRecord {
  int32_t code, rank, peer, pid, signal, lane, step;
  uint64_t sequence, bytes_done, bytes_total;
  char verdict[512], evidence[512], advice[256], operation[64], tensor[192], field[32], host[64];
  char values[1024];
};
ErrorRecord encode(const Error& error);
Error decode(const ErrorRecord& record);

/// One cell in memory that all members map.
struct FailureRecord {
  Word state;  // 0: alive; 1: somebody is writing the record; 2: failed, the record stands
  ErrorRecord record;
};

/// The failure detector of a group whose members share a host.
class HostFailureDetector : public FailureDetector {
 public:
  explicit HostFailureDetector(FailureRecord& cell) : cell_(cell) {}
  bool failed() const override {
    return cell_.state.value.load(std::memory_order_seq_cst) != 0;  // partner: report
  }
  void report(const Error& error) override;
  std::optional<Error> verdict() const override;

 private:
  FailureRecord& cell_;
};

}  // namespace farandole

// The backend for ranks that map each other's memory: no messages, canonical order.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/paths.h"

namespace farandole {

class ShmDirect : public Backend {
 public:
  /// `tuning` is the same on all ranks.
  ShmDirect(const StreamMemory& memory, const TuningTable& tuning, std::string why_not_foreign)
      : memory_(memory), tuning_(tuning), why_not_foreign_(std::move(why_not_foreign)) {}

  std::string_view name() const override { return "shm_direct"; }
  bool can_run(const Operation& operation) const override;
  void refuse(const Operation& operation) const override;
  std::string ways_for(const Operation& operation) const override;
  void start(const Operation& operation, uint32_t sequence) override;
  bool agrees_in_data() const override;
  void agreed() override;
  Progress poll(TimePoint until) override;
  std::vector<int> lacking() const override;
  void abort() noexcept override { path_ = nullptr; }
  std::string_view way() const override;

 private:
  DirectPath& path(const PathRow& row);
  PathQuestion question(const Operation& operation, bool shared) const;
  void choose_by_places();

  const StreamMemory& memory_;
  const TuningTable& tuning_;
  const std::string why_not_foreign_;  // other ranks' memory is not reached by address
  // By path_table(); made when first used, kept.
  std::vector<std::unique_ptr<DirectPath>> paths_{path_table().size()};
  const Operation* operation_ = nullptr;
  DirectPath* path_ = nullptr;
  const PathRow* forced_ = nullptr;  // by the operation's `algorithm`
  const PathRow* row_ = nullptr;     // of path_; null: a barrier
  bool agreed_ = false;              // posts have been compared, by the stream or here
};

}  // namespace farandole

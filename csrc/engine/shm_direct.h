// The backend for ranks that map each other's memory: no messages, canonical order.
#pragma once

#include <array>
#include <memory>
#include <string_view>
#include <vector>

#include "engine/direct_choice.h"
#include "engine/direct_path.h"

namespace farandole {

class ShmDirect : public Backend {
 public:
  /// `tuning` is the same on all ranks.
  ShmDirect(const StreamMemory& memory, const TuningTable& tuning)
      : memory_(memory), tuning_(tuning) {}

  std::string_view name() const override { return "shm_direct"; }
  bool can_run(const Operation& operation) const override;
  void start(const Operation& operation, uint32_t sequence) override;
  bool agrees_in_data() const override;
  void agreed() override;
  Progress poll(TimePoint until) override;
  std::vector<int> lacking() const override;
  void abort() noexcept override { path_ = nullptr; }

  static bool is_path(std::string_view name);
  /// Whether the path of this name needs to reach other ranks' memory by address.
  static bool is_by_address(std::string_view name);
  static std::vector<std::string_view> path_names();
  /// The paths that can run this operation.
  std::vector<std::string_view> paths_for(const Operation& operation) const;
  /// The path of the last operation, as `algorithm` would name it.
  std::string_view path_name() const;

 private:
  DirectPath& path(PathKind which);
  PathQuestion question(const Operation& operation, bool shared) const;
  void choose_by_places();

  const StreamMemory& memory_;
  const TuningTable& tuning_;
  std::array<std::unique_ptr<DirectPath>, 6> paths_;  // made when first used, kept
  const Operation* operation_ = nullptr;
  DirectPath* path_ = nullptr;
  PathKind which_ = PathKind::barrier;
  bool agreed_ = false;  // posts have been compared, by the stream or here
};

}  // namespace farandole

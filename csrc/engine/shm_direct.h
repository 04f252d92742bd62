// The backend for ranks that map each other's memory: no messages, canonical order.
#pragma once

#include <array>
#include <memory>
#include <string_view>
#include <vector>

#include "engine/direct_path.h"

namespace farandole {

class ShmDirect : public Backend {
 public:
  explicit ShmDirect(const StreamMemory& memory) : memory_(memory) {}

  std::string_view name() const override { return "shm_direct"; }
  bool can_run(const Operation& operation) const override;
  void start(const Operation& operation, uint32_t sequence) override;
  bool agrees_in_data() const override;
  void agreed() override;
  Progress poll(TimePoint until) override;
  void abort() noexcept override { path_ = nullptr; }

  static bool is_path(std::string_view name);
  /// Whether the path of this name needs to reach other ranks' memory by address.
  static bool is_by_address(std::string_view name);
  static std::vector<std::string_view> path_names();
  /// The paths that can run this operation.
  std::vector<std::string_view> paths_for(const Operation& operation) const;
  /// The path of the last operation, as `algorithm` would name it.
  std::string_view path_name() const;

  enum class Path : uint8_t { lines, one_shot, window, push, pull, staged, barrier };

 private:
  DirectPath& path(Path which);
  Path choose(const Operation& operation) const;
  void choose_by_places();

  const StreamMemory& memory_;
  std::array<std::unique_ptr<DirectPath>, 6> paths_;  // made when first used, kept
  const Operation* operation_ = nullptr;
  DirectPath* path_ = nullptr;
  Path which_ = Path::barrier;
  bool agreed_ = false;  // posts have been compared, by the stream or here
};

}  // namespace farandole

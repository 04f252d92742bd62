// Small operations among several hosts. Every rank's data go to all others with the messages by
// which ranks agree, and each rank works out its result alone: the eager protocol of MPIs, in which
// data travel with the envelope.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backends/direct_path.h"
#include "backends/schedule_backend.h"
#include "fold/fold.h"

namespace farandole {

class EagerBackend : public Backend {
 public:
  /// `memory` is the stream's; `costs` are the same on all ranks.
  EagerBackend(const ScheduleGroup& group, const ChannelCosts& costs, const StreamMemory& memory);

  static constexpr std::string_view kName = "eager";
  std::string_view name() const override { return kName; }
  bool can_run(const Operation& operation) const override;
  void refuse(const Operation& operation) const override;
  std::string ways_for(const Operation& operation) const override;
  void start(const Operation& operation, uint32_t sequence) override;
  std::span<const std::byte> eager_data() const override;
  void arrived(std::span<const std::span<const std::byte>> data) override;
  Progress poll(TimePoint until) override;
  std::vector<int> lacking() const override { return {}; }  // all has come with the agreement
  void abort() noexcept override {}
  std::string_view way() const override { return kName; }

 private:
  const StreamMemory& memory_;
  size_t ranks_of_a_host_;      // of the host with most ranks
  size_t bytes_of_its_rounds_;  // that a link takes during the rounds of the agreement
  DirectOperation what_;
  std::vector<const std::byte*> inputs_;
};

}  // namespace farandole

// MPI's own all-reduce, if it is asked for by name or was measured to be quicker, in front of the
// schedules, which run everything else. MPI folds in an order of its own, so it is of level fast
// alone. It knows networks that fold themselves (SHARP and the like). Ranks call it in the order of
// the stream, and no rank does before all have agreed on the operation.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/schedule_backend.h"
#include "backends/tuning.h"
#include "fold/fold.h"
#include "transport/mpi_port.h"

namespace farandole {

/// Why MPI's all-reduce does not run this, whatever the MPI; empty: it may. `count`: elements.
std::string why_not_by_mpi(const CollectiveSpec& spec, DType dtype, Determinism level,
                           size_t count);

/// A stream's access to MPI.
struct MpiOfStream {
  std::shared_ptr<MpiPort> port{};
  size_t communicator = 0;          // of the port's, the stream's own
  std::string why_not{};            // it has none
  std::optional<MpiCosts> costs{};  // to choose it by; none: it is taken by name alone
};

class MpiAllReduce : public Backend {
 public:
  MpiAllReduce(MpiOfStream mpi, int size, std::unique_ptr<ScheduleBackend> schedules)
      : mpi_(std::move(mpi)), size_(size), schedules_(std::move(schedules)) {}

  static constexpr std::string_view kName = "mpi";
  std::string_view name() const override { return kName; }
  bool can_run(const Operation& operation) const override;
  void refuse(const Operation& operation) const override;
  std::string ways_for(const Operation& operation) const override;
  void start(const Operation& operation, uint32_t sequence) override;
  Progress poll(TimePoint until) override;
  std::vector<int> lacking() const override;
  void abort() noexcept override;
  Held let_go() noexcept override;
  std::string_view way() const override { return by_mpi_ ? kName : schedules_->way(); }

 private:
  enum class Stage : uint8_t { leaves, folding, finishing };

  std::string why_not(const Operation& operation) const;
  bool is_quicker(const Operation& operation);
  Progress advance();
  bool scale_piece(const std::byte* from, const Scale& by);

  MpiOfStream mpi_;
  int size_;
  std::unique_ptr<ScheduleBackend> schedules_;
  std::map<std::pair<size_t, size_t>, bool> quicker_;  // by elements and their bytes
  bool by_mpi_ = false;                                // the last operation

  // The operation in flight by MPI.
  const Operation* operation_ = nullptr;
  Scales scales_;
  Stage stage_ = Stage::leaves;
  size_t scaled_ = 0;  // elements, of this stage
  MpiReduction reduction_;
  bool aborted_ = false;  // it was in flight when its group failed
};

}  // namespace farandole

// The failure detector of a group whose members are on several hosts.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "control/control_mesh.h"
#include "control/failure_detector.h"

namespace farandole {

class MeshFailureDetector : public FailureDetector {
 public:
  MeshFailureDetector(std::shared_ptr<ControlMesh> mesh, uint64_t key, std::vector<int> members);
  ~MeshFailureDetector() override { mesh_->drop(key_); }
  bool failed() const override {
    return cell_->state.value.load(std::memory_order_seq_cst) != 0;  // partner: report
  }
  void report(const Error& error) override;
  std::optional<Error> verdict() const override;
  const std::atomic<uint64_t>& state() const { return cell_->state.value; }

 private:
  std::shared_ptr<ControlMesh> mesh_;
  uint64_t key_;
  std::vector<int> members_;
  // 1: this rank has stopped, and the verdict is awaited; 2: the verdict stands.
  std::shared_ptr<FailureRecord> cell_ = std::make_shared<FailureRecord>();
};

}  // namespace farandole

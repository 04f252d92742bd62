#include "control/mesh_failure_detector.h"

#include <utility>

namespace farandole {

MeshFailureDetector::MeshFailureDetector(std::shared_ptr<ControlMesh> mesh, uint64_t key,
                                         std::vector<int> members)
    : mesh_(std::move(mesh)), key_(key), members_(std::move(members)) {
  mesh_->adopt(key_, cell_);
}

void MeshFailureDetector::report(const Error& error) {
  uint64_t alive = 0;
  if (!cell_->state.value.compare_exchange_strong(alive, 1)) return;
  mesh_->report(key_, members_, encode(error));
  reports_made.fetch_add(1);
}

std::optional<Error> MeshFailureDetector::verdict() const {
  if (cell_->state.value.load(std::memory_order_acquire) != 2) return std::nullopt;
  return decode(cell_->record);
}

}  // namespace farandole

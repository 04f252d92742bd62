// The order in which the gradients of a step became ready: recorded on each rank, made one order
// for all ranks by a single all-reduce.
//
// A bucket can be launched once all ranks have filled it, so a gradient counts as late as on the
// rank where it came last. One that some rank did not use is counted at the end.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace farandole {

class ReadyOrder {
 public:
  explicit ReadyOrder(size_t parameters)
      : positions_(std::make_shared<std::vector<int32_t>>(parameters)) {
    begin();
  }

  /// A step begins: what was recorded of the one before is forgotten, unless it was agreed.
  void begin();
  void note(size_t parameter) {
    if (!agreed_) (*positions_)[parameter] = next_++;
  }
  /// This rank has no say in the present step: the others' positions are later than all of its.
  void yield();
  bool agreed() const { return agreed_; }
  /// By parameter. Every rank's are to be reduced with max before agree(); shared with that
  /// operation.
  const std::shared_ptr<std::vector<int32_t>>& positions() const { return positions_; }
  /// The positions are all ranks' now. Returns the parameters in that order.
  std::vector<int> agree();

 private:
  std::shared_ptr<std::vector<int32_t>> positions_;
  int32_t next_ = 0;
  bool agreed_ = false;
};

}  // namespace farandole

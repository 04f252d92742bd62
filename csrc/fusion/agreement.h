// The options that all ranks must share before they reduce together. Each rank names a difference.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "fusion/bucket_plan.h"
#include "group/group.h"

namespace farandole {

/// Collective, all of it: every rank asks the same questions in the same order.
class OptionsAgreement {
 public:
  /// `label`: what is agreed about. `interrupted` is that of Group::wait_for.
  OptionsAgreement(Group& group, std::string label, std::function<void()> interrupted)
      : group_(group), label_(std::move(label)), interrupted_(std::move(interrupted)) {}

  /// Throws Error(mismatch) on every rank, naming each rank's text, unless all gave the same one.
  void require_same(const std::string& field, const std::string& text, const std::string& verdict,
                    const std::string& advice) const;
  /// The same for plans; names the first parameter that differs.
  void require_same_plan(std::span<const Parameter> in_ready_order,
                         std::span<const Bucket> buckets) const;

 private:
  /// Every rank's bytes, in rank order.
  std::vector<std::byte> gather(const std::string& name, const void* mine, size_t bytes) const;

  Group& group_;
  std::string label_;
  std::function<void()> interrupted_;
};

}  // namespace farandole

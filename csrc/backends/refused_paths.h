// Takes the place of paths over shared memory when another transport is set: runs nothing, and says
// why a path that is asked for by name does not run.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "backends/paths.h"

namespace farandole {

class RefusedPaths : public Backend {
 public:
  /// `transport` is the one that was chosen.
  explicit RefusedPaths(std::string transport) : transport_(std::move(transport)) {}

  std::string_view name() const override { return "refused_paths"; }
  bool can_run(const Operation&) const override { return false; }
  void refuse(const Operation& operation) const override {
    if (path_named(operation.algorithm) == nullptr) return;
    throw Error(ErrorCode::invalid_argument,
                "path '" + operation.algorithm + "' " + why_not_paths(transport_), {},
                "use another algorithm, or no FARANDOLE_TRANSPORT");
  }
  std::string ways_for(const Operation&) const override { return "no path"; }
  void start(const Operation&, uint32_t) override {}
  Progress poll(TimePoint) override { return Progress::idle; }
  std::vector<int> lacking() const override { return {}; }
  void abort() noexcept override {}
  std::string_view way() const override { return "none"; }

  /// The words after the name of a path, for people.
  static std::string why_not_paths(const std::string& transport) {
    return "goes over shared memory, and data go over " + transport +
           " (FARANDOLE_TRANSPORT=" + transport + ")";
  }

 private:
  std::string transport_;
};

}  // namespace farandole

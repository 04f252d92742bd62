// A rank that has joined answers for itself in the steps of its reducers.
//
//   peer                                   this rank, in join()
//     begins a step of a reducer  ──post──►  the watch sees an operation that it has not begun
//                                            step_by_proxy(): the same buckets, as zeros
//     ◄────────────── the step runs, as any other ──────────────►
//
// A step is answered when some rank begins it, never before: when all ranks have joined, no step is
// open on any of them. The polling thread sees, the waiting thread acts.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "fusion/reducer.h"

namespace farandole {

class JoinedRankProxy {
 public:
  /// `joined`: set when all ranks of the world have joined, or will never. A rank that
  /// begins an operation in one of the `others` (or in the program order of the world) while this
  /// rank has joined waits in vain: that fails the group, with an error which says so.
  JoinedRankProxy(Group& world, const std::atomic<bool>& joined,
                  std::vector<std::shared_ptr<Reducer>> reducers,
                  std::vector<std::shared_ptr<Stream>> others);
  ~JoinedRankProxy();
  JoinedRankProxy(const JoinedRankProxy&) = delete;
  JoinedRankProxy& operator=(const JoinedRankProxy&) = delete;

  /// Drives and answers until all ranks have joined; false when `until` passes first. Throws the
  /// verdict when a reducer's group fails. A step that goes wrong without that (a rank abandoned
  /// its backward, or gradients of one parameter differ in layout) concerns the ranks that train.
  bool wait(Deadline until);
  /// Steps in which this rank stood in, by reducer.
  const std::vector<int>& steps() const { return steps_; }

 private:
  class Watch;
  bool answer(Deadline until);

  Engine& engine_;
  const std::atomic<bool>& joined_;
  std::vector<std::shared_ptr<Reducer>> reducers_;
  std::vector<int> steps_;
  std::shared_ptr<Watch> watch_;
};

}  // namespace farandole

// Many arrays in one call: small ones of one dtype travel as one operation, large ones by
// themselves. The bits are those of separate calls: folds are elementwise.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "group/group.h"

namespace farandole {

/// Arrays of one rank; outputs that are inputs are in place.
struct Member {
  Buffer input, output;
};

/// What the ranks agree on before the first operation of these arrays; none for one array.
std::shared_ptr<Bundle> bundle_of(const std::string& name, Collective kind,
                                  std::span<const Member> members);

/// The operations of one call, refused together where ranks give other arrays (engine/bundle.h); of
/// no arrays, one that moves nothing. Results of small arrays reach their outputs in wait().
class Grouped {
 public:
  /// Submits all of them, or throws Error(invalid_argument) and submits none. `options` holds for
  /// each; its name is part of theirs. For all_reduce, reduce_scatter, all_gather and broadcast.
  Grouped(Group& group, std::vector<Member> members, const Options& options,
          bool caller_waits = false);

  bool done() const;
  /// Drives the engine until all are complete; false when `until` passed first. Throws the first
  /// error. One thread at a time.
  bool wait(Deadline until = {});

  static bool has(Collective kind);

 private:
  struct Pack {
    DType dtype;
    std::vector<size_t> members;
    size_t input = 0, output = 0;              // elements
    std::shared_ptr<std::byte> sent, arrived;  // in memory that all ranks map
  };
  std::vector<Pack> plan(Group& group) const;
  Group::Item fill(const Pack& pack, const Options& options) const;
  void place(const Pack& pack) const;
  Shape shape_of(const Member& member) const;

  Collective kind_;
  int rank_, size_;
  std::vector<Member> members_;
  std::vector<Pack> packs_;
  std::vector<Handle> handles_;
  bool placed_ = false;
};

}  // namespace farandole

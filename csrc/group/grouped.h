// Many arrays in one call: small ones of one dtype travel as one operation, large ones by
// themselves.
#pragma once

#include <memory>
#include <vector>

#include "group/group.h"
#include "group/pack.h"

namespace farandole {

/// The arrays of each operation, by index. A call of no arrays is one operation without any.
std::vector<std::vector<size_t>> plan_grouped(const Options& call,
                                              const std::vector<Operand>& operands, int size,
                                              const PackLimits& limits);
/// The facts that ranks agree on before the first of them; null for one array.
std::shared_ptr<Bundle> bundle_of(const Options& call, const std::vector<Operand>& operands);
/// The name of one of these operations. `arrays`: of the whole call.
std::string name_of_part(const Options& call, const std::vector<size_t>& members, size_t arrays);

/// The operations of one call, refused together where ranks give other arrays (stream/bundle.h); of
/// no arrays, one that moves nothing. Results of small arrays reach their outputs in wait(). Refers
/// to the group, which outlives it.
class Grouped {
 public:
  /// `options` holds for each; its name is part of theirs, and its gate is that of all arrays.
  /// Throws Error(invalid_argument) for what this rank can know to be wrong.
  Grouped(Group& group, std::vector<Operand> operands, Options options, const PackLimits& limits);

  /// One of these two, once. Submits all of them in program order, or throws and submits none.
  void submit(bool caller_waits);
  /// Submits them to a stream, one by one: while the first is under way the next is filled. Looks
  /// for a result so many times at once. Throws with some of them under way.
  void begin_on(const std::shared_ptr<Stream>& stream, int looks);

  bool done() const;
  /// Drives the engine until all are complete; false when `until` passed first. Throws the first
  /// error. One thread at a time.
  bool wait(Deadline until = {});

  size_t operations() const { return planned_.size(); }
  size_t bytes() const;  // of all inputs

  static bool has(Collective kind);

 private:
  struct Planned {
    std::vector<size_t> members;  // none: of no arrays
    std::shared_ptr<Pack> pack;   // of more than one
  };
  CollectiveCall filled(Planned& planned);

  Group& group_;
  std::vector<Operand> operands_;
  Options options_;
  std::vector<Planned> planned_;
  std::vector<Handle> handles_;
};

}  // namespace farandole

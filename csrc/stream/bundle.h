// One call that becomes several operations of a stream.
//
// The ranks agree on all of its arrays with the first operation, whose hash has the bundle's in it:
// no exchange is added. Where they disagree, that operation is refused, and with it all others of
// the bundle, which no rank begins: a rank that gave more arrays has no operations left over, which
// the next call of the others would meet.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "schedule/schedule.h"

namespace farandole {

/// Facts of an array that must be equal on all ranks. Ranks show each other this struct as it is.
struct BundledArray {
  uint64_t count = 0;
  uint64_t counts = 0;   // hash of uneven shares; 0: they are equal
  uint64_t options = 0;  // hash of what else differs within the bundle
  DType dtype = DType::float32;
  Collective kind = Collective::barrier;

  bool operator==(const BundledArray&) const = default;
};

class Bundle {
 public:
  /// Takes any number of arrays but one: a call of one is an operation like any other.
  Bundle(std::string name, std::vector<BundledArray> arrays);

  const std::string& name() const { return name_; }
  const std::vector<BundledArray>& arrays() const { return arrays_; }
  uint64_t hash() const { return hash_; }

  // ---- by the thread that polls ----
  const std::optional<Error>& refused() const { return refused_; }
  void refuse(const Error& error) { refused_ = error; }

 private:
  std::string name_;
  std::vector<BundledArray> arrays_;
  uint64_t hash_;
  std::optional<Error> refused_;
};

}  // namespace farandole

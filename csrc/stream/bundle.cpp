#include "stream/bundle.h"

#include "base/hash.h"

namespace farandole {

Bundle::Bundle(std::string name, std::vector<BundledArray> arrays)
    : name_(std::move(name)), arrays_(std::move(arrays)) {
  Hash hash;
  hash.add(arrays_.size());
  for (const BundledArray& array : arrays_) {
    hash.add(array.count);
    hash.add(array.counts);
    hash.add(array.options);
    hash.add(static_cast<uint64_t>(array.dtype) | static_cast<uint64_t>(array.kind) << 8);
  }
  hash_ = hash.value();
}

}  // namespace farandole

#include "named/cut.h"

namespace farandole {
namespace {

bool packs(Collective kind) {
  return kind == Collective::all_reduce || kind == Collective::broadcast;
}

bool alike(const CutItem& a, const CutItem& b) {
  return a.set == b.set && a.spec == b.spec && a.dtype == b.dtype;
}

struct Pack {
  size_t operation;  // its index
  CutItem like;
  size_t bytes;
};

}  // namespace

std::vector<std::vector<size_t>> cut(std::span<const CutItem> order, const CutLimits& limits) {
  std::vector<std::vector<size_t>> operations;
  std::vector<Pack> open;  // the newest of each likeness; few
  for (size_t i = 0; i < order.size(); ++i) {
    const CutItem& item = order[i];
    if (!packs(item.spec.kind) || item.bytes >= limits.alone || item.bytes > limits.together) {
      operations.push_back({i});
      continue;
    }
    Pack* pack = nullptr;
    for (Pack& p : open)
      if (alike(p.like, item)) pack = &p;
    if (pack == nullptr) pack = &open.emplace_back(Pack{operations.size(), item, 0});
    if (pack->bytes > 0 && pack->bytes + item.bytes > limits.together) {
      pack->operation = operations.size();
      pack->bytes = 0;
    }
    if (pack->operation == operations.size()) operations.emplace_back();
    operations[pack->operation].push_back(i);
    pack->bytes += item.bytes;
  }
  return operations;
}

}  // namespace farandole

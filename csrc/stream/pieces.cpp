#include "stream/pieces.h"

#include <algorithm>
#include <utility>

namespace farandole {
namespace {

Buffer part_of(const Buffer& whole, size_t first, size_t count) {
  if (whole.count == 0) return whole;  // of a rank that gets nothing
  return {whole.data + first * size_of(whole.dtype), count, whole.dtype};
}

}  // namespace

Pieces::Pieces(const Operation& whole, size_t elements, std::shared_ptr<PiecesOnDevices> lie)
    : whole_(whole), elements_(elements), lie_(std::move(lie)) {
  static_cast<CollectiveSpec&>(piece_) = whole;
  piece_.name = whole.name;
  piece_.level = whole.level;
  piece_.keepalive = lie_ ? lie_ : whole.keepalive;
  begin();
}

void Pieces::begin() {
  piece_.count = std::min(elements_, whole_.count - first_);
  piece_.input = part_of(whole_.input, first_, piece_.count);
  piece_.output = part_of(whole_.output, first_, piece_.count);
  if (lie_) lie_->begin(piece_);
}

bool Pieces::next() {
  if (lie_) lie_->end();
  if (whole_.count - first_ <= elements_) return false;
  first_ += elements_;
  begin();
  return true;
}

}  // namespace farandole

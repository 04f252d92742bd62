#include "stream/pieces.h"

#include <utility>

namespace farandole {
namespace {

/// Where it begins; all of it, where it lies together.
Buffer part_of(const Buffer& whole, const std::vector<CutPiece::Stretch>& stretches) {
  if (whole.count == 0) return whole;  // of a rank that gets nothing
  return {whole.data + stretches.front().at * size_of(whole.dtype), count_of(stretches),
          whole.dtype};
}

}  // namespace

Pieces::Pieces(const Operation& whole, Cut cut, std::shared_ptr<PiecesOnDevices> lie)
    : whole_(whole), cut_(std::move(cut)), lie_(std::move(lie)) {
  static_cast<CollectiveSpec&>(piece_) = whole;
  piece_.name = whole.name;
  piece_.level = whole.level;
  piece_.keepalive = lie_ ? lie_ : whole.keepalive;
  begin();
}

void Pieces::begin() {
  CutPiece cut = cut_[index_];
  piece_.count = cut.count;
  piece_.counts = std::move(cut.counts);
  piece_.input = part_of(whole_.input, cut.input);
  piece_.output = part_of(whole_.output, cut.output);
  if (lie_) lie_->begin(piece_);
}

bool Pieces::next() {
  if (lie_) lie_->end();
  if (++index_ == cut_.pieces()) return false;
  begin();
  return true;
}

}  // namespace farandole

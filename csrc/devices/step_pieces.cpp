#include "devices/step_pieces.h"

#include "fold/fold.h"
#include "schedule/slicing.h"

namespace farandole {

std::string title_of(const Operation& operation, uint32_t sequence) {
  std::string title = std::string(name_of(operation.kind)) + " #" + std::to_string(sequence);
  if (!operation.name.empty()) title += " '" + operation.name + "'";
  return title;
}

namespace {

constexpr uint64_t kPackBytes = 16;

/// Between two ranks this saves half of the copies. With more it saves less than it costs to make
/// two moves of one. Arrays must be aligned as buckets are, so that whole packs are folded.
bool own_stays(Collective kind, const Shape& shape, const StepArrays& arrays) {
  return kind == Collective::all_reduce && shape.size == 2 && arrays.input % kPackBytes == 0 &&
         arrays.output % kPackBytes == 0;
}

}  // namespace

StepPieces::StepPieces(const Operation& operation, const Shape& shape, const StepArrays& arrays,
                       size_t piece_bytes)
    : arrays_(&arrays), count_(operation.count) {
  const DType dtype = operation.input.dtype;
  const bool apart = !arrays.together.empty() || !arrays.updates.empty();
  step_ = {.kind = operation.kind,
           .shape = shape,
           .element = size_of(dtype),
           .piece_bytes = piece_bytes,
           .in_place = arrays.in_place,
           .apart = apart,
           .own_stays = own_stays(operation.kind, shape, arrays) && !apart,
           .updates = !arrays.updates.empty(),
           .tile = arrays.norm ? kEpilogueBytes / size_of(dtype) : 0};
  common_.input = arrays.input;
  common_.output = arrays.output;
  common_.folding = {.dtype = dtype, .op = operation.op};
  if (folds(operation.kind))
    common_.folding.scales = scales_for(dtype, operation.op, operation.prescale * arrays.prescale,
                                        operation.postscale, shape.size);
}

const CudaPiece& StepPieces::operator[](size_t index) {
  moves_ = piece_of(step_, index);
  if (step_.apart) farandole::lie_apart(moves_, arrays_->inputs, arrays_->outputs);
  piece_ = common_;
  piece_.in = moves_.in;
  piece_.out = moves_.out;
  piece_.first = moves_.first;
  piece_.count = moves_.count;
  piece_.folds_to = moves_.folds_to;
  piece_.fold_to = arrays_->output + moves_.fold_to;
  if (moves_.own_stays) {
    piece_.own_from = arrays_->input + moves_.own_from;
    piece_.own_to = arrays_->output + moves_.own_to;
  }
  if (arrays_->norm)
    add_norms();
  else
    add_updates();
  return piece_;
}

/// Adds, for each parameter, the elements that this rank has in the piece.
void StepPieces::add_updates() {
  updates_.clear();
  if (!step_.updates) return;
  const Slice mine = moves_.mine;
  const Slice part_here = part({mine.space, 0, count_}, step_.shape.size, step_.shape.rank);
  for (const StepUpdate& update : arrays_->updates) {
    const Slice here = clip(mine, {mine.space, update.whole.offset, update.whole.count});
    if (here.count == 0) continue;
    const auto behind = [&](uint64_t address, size_t begin) {
      return address == 0 ? 0 : address + (here.offset - begin) * step_.element;
    };
    updates_.push_back({.value = behind(update.value, update.whole.offset),
                        .gradient = (moves_.first + here.offset - mine.offset) * step_.element,
                        .count = here.count,
                        .state = {behind(update.state[0], part_here.offset),
                                  behind(update.state[1], part_here.offset)},
                        .kind = update.kind,
                        .factors = update.factors});
  }
  piece_.updates = updates_;
}

/// As add_updates(), for a norm. The piece begins with a tile of this rank's part.
void StepPieces::add_norms() {
  norms_.clear();
  const Slice mine = moves_.mine;
  for (const StepUpdate& update : arrays_->updates) {
    const Slice here = clip(mine, {mine.space, update.whole.offset, update.whole.count});
    if (here.count == 0) continue;
    const uint64_t begin = (here.offset - mine.offset) % step_.tile;
    norms_.push_back({.gradient = (moves_.first + here.offset - mine.offset) * step_.element,
                      .count = here.count,
                      .begin = begin,
                      .first_term = terms_});
    terms_ += tiles_of(begin, here.count, step_.tile);
  }
  piece_.norms = norms_;
  piece_.norm_terms = arrays_->norm->terms;
  piece_.norm_tile = step_.tile;
  piece_.norm_largest = arrays_->norm->largest;
}

CudaPiece StepPieces::whole() const {
  CudaPiece whole = common_;
  whole.count = count_;
  return whole;
}

CudaPiece StepPieces::stretch(size_t index) {
  const Slice here = stretch_of(step_, index);
  CudaPiece piece = step_.apart ? (*this)[index] : common_;
  piece.count = here.count;
  if (!step_.apart) {
    piece.input += here.offset * step_.element;
    piece.output += here.offset * step_.element;
  }
  return piece;
}

}  // namespace farandole

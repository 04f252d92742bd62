#include "group/pack.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/copy.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

bool alike(const Packable& a, const Packable& b) {
  return a.set == b.set && a.spec == b.spec && a.dtype == b.dtype;
}

bool in_place(Collective kind) {
  return kind == Collective::all_reduce || kind == Collective::broadcast;
}

}  // namespace

std::vector<std::vector<size_t>> plan_packs(std::span<const Packable> order,
                                            const PackLimits& limits) {
  struct Open {
    size_t operation;  // its index
    Packable like;
    size_t bytes;
  };
  std::vector<std::vector<size_t>> operations;
  std::vector<Open> open;  // the newest of each likeness; few
  for (size_t i = 0; i < order.size(); ++i) {
    const Packable& array = order[i];
    if (array.alone || limits.travels_alone(array.bytes)) {
      operations.push_back({i});
      continue;
    }
    auto pack = std::ranges::find_if(open, [&](const Open& p) { return alike(p.like, array); });
    if (pack == open.end()) pack = open.insert(pack, Open{operations.size(), array, 0});
    if (pack->bytes > 0 && pack->bytes + array.bytes > limits.together) {
      pack->operation = operations.size();
      pack->bytes = 0;
    }
    if (pack->operation == operations.size()) operations.emplace_back();
    operations[pack->operation].push_back(i);
    pack->bytes += array.bytes;
  }
  return operations;
}

Pack::Pack(Collective kind, int size, std::vector<Operand> operands)
    : kind_(kind), size_(size), operands_(std::move(operands)) {
  whole_.input.dtype = whole_.output.dtype = operands_.front().input.dtype;
  for (const Operand& operand : operands_) {
    whole_.input.count += operand.input.count;
    whole_.output.count += operand.output.count;
  }
}

Shape Pack::shape_of(const Operand& operand) const {
  Shape shape;
  shape.size = size_;
  shape.count = operand.input.count;
  return shape;
}

std::shared_ptr<const void> Pack::kept_with(std::shared_ptr<const void> other) const {
  using Kept = std::tuple<std::shared_ptr<std::byte>, std::shared_ptr<std::byte>,
                          std::shared_ptr<const void>>;
  return std::make_shared<const Kept>(sent_, arrived_, std::move(other));
}

std::vector<size_t> Pack::counts() const {
  std::vector<size_t> counts;
  if (kind_ == Collective::reduce_scatter) counts.resize(static_cast<size_t>(size_));
  for (size_t r = 0; r < counts.size(); ++r)
    for (const Operand& operand : operands_)
      counts[r] += share_of(kind_, shape_of(operand), static_cast<int>(r)).count;
  return counts;
}

/// Pieces are whole arrays, or what lies `by_owner` the arrays' parts of the first owner, then
/// those of the next.
size_t Pack::pieces_of(Collective by_owner) const {
  return operands_.size() * (kind_ == by_owner ? static_cast<size_t>(size_) : 1);
}

Buffer Pack::input_piece(size_t index) const {
  const size_t owner = index / operands_.size();
  const Operand& operand = operands_[index % operands_.size()];
  if (kind_ != Collective::reduce_scatter) return operand.input;
  const Slice part = share_of(kind_, shape_of(operand), static_cast<int>(owner));
  const DType dtype = operand.input.dtype;
  return {operand.input.data + part.offset * size_of(dtype), part.count, dtype};
}

Buffer Pack::output_piece(size_t index) const {
  const size_t owner = index / operands_.size();
  const Operand& operand = operands_[index % operands_.size()];
  if (kind_ != Collective::all_gather) return operand.output;
  return {operand.output.data + owner * operand.input.bytes(), operand.input.count,
          operand.input.dtype};
}

std::vector<Buffer> Pack::inputs() const {
  std::vector<Buffer> all(pieces_of(Collective::reduce_scatter));
  for (size_t i = 0; i < all.size(); ++i) all[i] = input_piece(i);
  return all;
}

std::vector<Buffer> Pack::outputs() const {
  std::vector<Buffer> all(pieces_of(Collective::all_gather));
  for (size_t i = 0; i < all.size(); ++i) all[i] = output_piece(i);
  return all;
}

/// copy(piece, bytes that those before it took) gives the bytes of each that is still to come.
template <typename Copy>
bool Pack::copy_pieces(size_t pieces, size_t& budget, const Copy& copy) {
  for (; copied_ < pieces && budget > 0; ++copied_) {
    const size_t bytes = copy(copied_, at_);
    at_ += bytes;
    budget -= std::min(budget, bytes);
  }
  return copied_ == pieces;
}

void Pack::reserve(BufferPool& pool) {
  if (sent_) return;
  sent_ = pool.borrow(whole_.input.bytes());
  arrived_ = in_place(kind_) ? sent_ : pool.borrow(whole_.output.bytes());
  whole_.input.data = sent_.get();
  whole_.output.data = arrived_.get();
}

bool Pack::fill(size_t& budget) {
  const auto copy_in = [&](size_t piece, size_t at) {
    const Buffer from = input_piece(piece);
    copy_bytes(sent_.get() + at, from.data, from.bytes());
    return from.bytes();
  };
  if (!copy_pieces(pieces_of(Collective::reduce_scatter), budget, copy_in)) return false;
  copied_ = at_ = 0;
  return true;
}

bool Pack::unpack(size_t& budget) {
  return copy_pieces(pieces_of(Collective::all_gather), budget, [&](size_t piece, size_t at) {
    const Buffer to = output_piece(piece);
    copy_bytes(to.data, arrived_.get() + at, to.bytes());
    return to.bytes();
  });
}

void Pack::unpack_all() {
  size_t budget = ~size_t{0};
  unpack(budget);
}

bool PackGate::is_open() {
  if (filled_) return true;
  if (!arrays_->is_open()) return false;
  size_t budget = ~size_t{0};
  return filled_ = pack_->fill(budget);
}

}  // namespace farandole

#include "cuda/library/move_tables.h"

#include <vector>

#include "cuda/plans.h"

namespace farandole::cuda {

MoveTables::MoveTables(const std::shared_ptr<const DeviceContext>& context)
    : here_(context, kTables * kMovesOfTable * sizeof(Piece)),
      there_(allocate_device(context, kTables * kMovesOfTable * sizeof(Piece), Sharing::none)) {}

std::optional<Pieces> MoveTables::put(const StreamRef& stream, std::span<const Move> moves,
                                      uint32_t width, const CompletionCount& completions) {
  Table& table = tables_[next_];
  if (table.state == State::under_way ||
      (table.state == State::ends && !completions.reached(table.number)))
    return std::nullopt;
  const DevicePointer offset = offset_of(next_);
  next_ = (next_ + 1) % kTables;
  table.state = State::under_way;
  const std::span<Piece> pieces(reinterpret_cast<Piece*>(here_.host() + offset), moves.size());
  for (size_t i = 0; i < moves.size(); ++i)
    pieces[i] = {.from = at_address(moves[i].from),
                 .to = at_address(moves[i].to),
                 .count = moves[i].bytes / width};
  const DevicePointer lies = there_->address() + offset;
  const Pieces parameters = pieces_of(pieces, static_cast<const Piece*>(at_address(lies)), Scale{});
  stream.copy(lies, here_.address() + offset, pieces.size_bytes());
  return parameters;
}

void MoveTables::end(uint32_t number) {
  for (Table& table : tables_)
    if (table.state == State::under_way) table = {State::ends, number};
}

}  // namespace farandole::cuda

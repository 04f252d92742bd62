#include "cuda/exchange/move_tables.h"

#include <vector>

#include "cuda/plans.h"

namespace farandole::cuda {

MoveTables::MoveTables(const std::shared_ptr<const DeviceContext>& context)
    : here_(context, kTables * kMovesOfTable * sizeof(Piece)),
      there_(allocate_device(context, kTables * kMovesOfTable * sizeof(Piece), Sharing::none)) {}

std::optional<Pieces> MoveTables::put(const StreamRef& stream, const Backlog& backlog,
                                      std::span<const Move> moves, uint32_t width,
                                      const CompletionCount& completions) {
  Table& table = tables_[next_];
  if (!is_free(table, completions)) return std::nullopt;
  const DevicePointer offset = offset_of(next_);
  next_ = (next_ + 1) % kTables;
  table = {.backlog = &backlog, .mark = backlog.next_mark(), .number = std::nullopt};
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

/// Frees at once the tables that have been read, since numbers wrap.
void MoveTables::end(uint32_t number, const CompletionCount& completions) {
  for (Table& table : tables_)
    if (is_free(table, completions))
      table = {};
    else if (!table.number)
      table.number = number;
}

bool MoveTables::has_room(const CompletionCount& completions) const {
  for (size_t i = 0; i < kTables / 2; ++i)
    if (!is_free(tables_[(next_ + i) % kTables], completions)) return false;
  return true;
}

bool MoveTables::is_free(const Table& table, const CompletionCount& completions) {
  return table.backlog == nullptr || table.backlog->reached(table.mark) ||
         (table.number && completions.reached(*table.number));
}

}  // namespace farandole::cuda

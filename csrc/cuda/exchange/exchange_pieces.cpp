// Runs one piece of an exchange: moves, folds, updates.
#include <algorithm>
#include <array>
#include <bit>
#include <string>
#include <utility>
#include <vector>

#include "cuda/exchange/exchange.h"

namespace farandole::cuda {
namespace {

/// Arrays of at most so many bytes travel through NCCL as one; larger ones are not worth two
/// copies.
constexpr uint64_t kPackedBytes = 1 << 20;
/// Rounds up. The padding between two arrays is reduced, too, and never read.
constexpr uint64_t whole_packs(uint64_t bytes) { return (bytes + 15) / 16 * 16; }
/// The driver copies so many moves faster than a table of them is brought to the device.
constexpr size_t kFewMoves = 4;

/// Of the widest elements that divide all moves.
DType widest_of(std::span<const Move> moves) {
  uint64_t bits = 8;
  for (const Move& one : moves) bits |= one.to | one.from | one.bytes;
  return kOfWidth.at(static_cast<size_t>(std::countr_zero(bits)));
}

}  // namespace

void Exchange::run(const CudaPiece& piece) {
  const DeviceContext::Use all_calls(*context_);
  move_in(piece);
  meet(piece.strand);
  if (piece.count > 0) fold(piece);
  update(piece);
  norm(piece);
  if (piece.folds_to == kFoldsToOutput) move_out(piece);
  meet(piece.strand);
  if (piece.folds_to != kFoldsToOutput) move_out(piece);
  note(piece.strand);
}

void Exchange::move_in(const CudaPiece& piece) {
  const DevicePointer own = bucket_of(rank_, piece.strand);
  std::vector<Move> moves;
  for (const CudaMove& one : piece.in)
    moves.push_back({own + one.to, piece.input + one.from, one.bytes});
  move(piece.strand, moves);
}

void Exchange::move_out(const CudaPiece& piece) {
  std::vector<Move> moves;
  for (const CudaMove& one : piece.out) {
    const DevicePointer bucket = bucket_of(static_cast<uint32_t>(one.rank), piece.strand);
    moves.push_back({piece.output + one.to, bucket + one.from, one.bytes});
  }
  move(piece.strand, moves);
}

/// Many by kernels, in the widest elements that divide them all; few by the driver's copies, those
/// of an exchange without a bucket, and those of a graph, in which a table would have to last. A
/// factor, the last one of `as`, takes kernels.
void Exchange::move(int32_t strand, std::span<const Move> moves, const Folding& as) {
  const StreamRef& stream = stream_of(strand);
  const bool scales = !as.scales.finish.is_identity();
  while (moves.size() > kFewMoves && tables_ && !captured_) {
    const auto some = moves.first(std::min<size_t>(moves.size(), kMovesOfTable));
    const DType dtype = scales ? as.dtype : widest_of(some);
    const Backlog& backlog = strands_.at(static_cast<size_t>(strand)).backlog;
    auto pieces =
        tables_->put(stream, backlog, some, static_cast<uint32_t>(size_of(dtype)), completions_);
    if (!pieces) break;
    pieces->scaling = scaling_of(as.scales.finish);
    kernel(kernel_name("copy", dtype))
        .launch(
            stream,
            {.blocks = blocks_for_chunks(pieces->chunks, multiprocessors()), .threads = kThreads},
            *pieces);
    moves = moves.subspan(some.size());
  }
  for (const Move& one : moves)
    if (scales)
      scale(stream, one, as);
    else
      stream.copy(one.to, one.from, one.bytes);
}

/// As a fold of one source.
void Exchange::scale(const StreamRef& stream, const Move& one, const Folding& as) {
  const void* const from = at_address(one.from);
  void* const to = at_address(one.to);
  const Fold job = fold_of({&from, 1}, {&to, 1}, 0, one.bytes / size_of(as.dtype), as);
  const uint32_t blocks = blocks_for(Work::alone, one.bytes, {.processors = multiprocessors()});
  kernel(kernel_name("fold", as.dtype))
      .launch(stream, {.blocks = blocks, .threads = kThreads}, job);
}

uint64_t Exchange::scratch_bytes() const {
  return norm_scratch(most_lasting_blocks(multiprocessors()), kThreads) * sizeof(double);
}

/// Terms of this rank's part, to where the host will look for them.
void Exchange::norm(const CudaPiece& piece) {
  if (piece.norms.empty()) return;
  const DevicePointer scratch =
      scratch_->address() + static_cast<uint64_t>(piece.strand) * scratch_bytes();
  const DevicePointer bucket = bucket_of(rank_, piece.strand);
  const DType dtype = piece.folding.dtype;
  for (auto rest = piece.norms; !rest.empty();) {
    const auto some = rest.first(std::min<size_t>(rest.size(), kMostNormPieces));
    rest = rest.subspan(some.size());
    std::vector<NormPiece> pieces;
    uint64_t bytes = 0;
    for (const CudaNormStretch& one : some) {
      pieces.push_back(
          {.gradient = at_address(bucket + one.gradient), .count = one.count, .begin = one.begin});
      bytes += one.count * size_of(dtype);
    }
    const DevicePointer made = piece.norm_terms + some.front().first_term * sizeof(double);
    const Norms job =
        norms_of(pieces, piece.norm_tile, piece.norm_largest,
                 static_cast<double*>(at_address(made)), static_cast<double*>(at_address(scratch)));
    kernel(kernel_name("norms", dtype))
        .launch(stream_of(piece.strand),
                {.blocks = blocks_for(Work::lasting, bytes, {.processors = multiprocessors()}),
                 .threads = kThreads},
                job);
  }
}

void Exchange::fold(const CudaPiece& piece) {
  const Folding& folding = piece.folding;
  std::array<const void*, kMostRanks> sources{};
  std::array<void*, kMostRanks> buckets{};
  for (uint32_t r = 0; r < size_; ++r)
    sources[r] = buckets[r] = at_address(bucket_of(r, piece.strand));
  const uint64_t before = piece.first * size_of(folding.dtype);  // of the part, in each bucket
  if (piece.own_from != 0) sources[rank_] = at_address(piece.own_from - before);
  if (piece.own_to != 0) buckets[rank_] = at_address(piece.own_to - before);
  std::span<void* const> to = std::span(buckets).first(size_);
  if (piece.folds_to >= 0) to = to.subspan(static_cast<size_t>(piece.folds_to), 1);
  Fold job = fold_of(std::span(sources).first(size_), to, piece.first, piece.count, folding);
  if (piece.folds_to == kFoldsToOutput) {
    job.destination_count = 1;
    job.destinations[0] = at_address(piece.fold_to);
  }
  const bool links =
      std::ranges::any_of(devices_, [&](const DeviceUuid& d) { return d != devices_[rank_]; });
  const uint32_t blocks =
      blocks_for(links ? Work::links : Work::alone, piece.count * size_of(folding.dtype),
                 {.processors = multiprocessors(), .link_blocks = link_blocks_});
  kernel(kernel_name("fold", folding.dtype))
      .launch(stream_of(piece.strand), {.blocks = blocks, .threads = kThreads}, job);
}

/// New values of this rank's part, in its own bucket and then in all.
void Exchange::update(const CudaPiece& piece) {
  if (piece.updates.empty()) return;
  const DevicePointer bucket = bucket_of(rank_, piece.strand);
  std::vector<UpdatePiece> pieces;
  for (const CudaUpdate& one : piece.updates)
    pieces.push_back({.value = at_address(one.value),
                      .shared = at_address(bucket + one.gradient),
                      .gradient = at_address(bucket + one.gradient),
                      .state = {at_address(one.state[0]), at_address(one.state[1])},
                      .count = one.count,
                      .kind = one.kind,
                      .factors = one.factors});
  const DType dtype = piece.folding.dtype;
  for (std::span<const UpdatePiece> rest = pieces; !rest.empty();) {
    const auto some = rest.first(std::min<size_t>(rest.size(), kMostUpdates));
    rest = rest.subspan(some.size());
    const Updates job = updates_of(some);
    kernel(kernel_name("update", dtype))
        .launch(stream_of(piece.strand),
                {.blocks = blocks_for_chunks(job.chunks, multiprocessors()), .threads = kThreads},
                job);
  }
  // This rank alone has read that part of the others' buckets.
  const uint64_t at = piece.first * size_of(dtype), bytes = piece.count * size_of(dtype);
  for (uint32_t i = 1; i < size_ && bytes > 0; ++i) {
    const uint32_t r = (rank_ + i) % size_;
    stream_of(piece.strand).copy(bucket_of(r, piece.strand) + at, bucket + at, bytes);
  }
}

// ---- by NCCL ----

/// Memory that is given up for more is kept: to free it would wait for the device.
DevicePointer Exchange::pack_of(uint64_t bytes) {
  if (packs_.empty() || packs_.back()->bytes() < bytes) {
    const uint64_t before = packs_.empty() ? 0 : packs_.back()->bytes();
    packs_.push_back(allocate_device(context_, std::max(bytes, 2 * before), Sharing::none));
    strands_[0].stream.fill(packs_.back()->address(), 0, packs_.back()->bytes());
  }
  return packs_.back()->address();
}

/// The choice of arrays to pack depends on kinds, counts and dtype alone: all ranks choose alike.
void Exchange::run_nccl(NcclPlan plan) {
  const size_t element = size_of(plan.dtype);
  std::vector<CudaNcclCall> calls, small;
  for (const CudaNcclCall& call : plan.calls) {
    const bool is_small = call.what == kNcclAllReduce && call.count * element <= kPackedBytes;
    (is_small ? small : calls).push_back(call);
  }
  if (small.size() == 1) calls.push_back(std::exchange(small, {}).front());
  unpack_as_ = {.dtype = plan.dtype, .scales = {.leaf = {}, .finish = {.factor = plan.finish}}};
  for (const CudaNcclCall& call : calls) {
    const bool has_result = call.what != kNcclReduce || call.peer == static_cast<int32_t>(rank_);
    if (plan.finish != 1 && has_result)
      unpack_.push_back({call.output, call.output, call.count * element});
  }
  if (!small.empty()) calls.push_back(pack(small, element));
  plan.calls = std::move(calls);
  nccl_->run(strands_[0].stream, plan);
}

/// Brings small arrays together, and has them brought back.
CudaNcclCall Exchange::pack(std::span<const CudaNcclCall> small, size_t element) {
  uint64_t bytes = 0;
  for (const CudaNcclCall& call : small) bytes += whole_packs(call.count * element);
  const DevicePointer begin = pack_of(bytes);
  std::vector<Move> in;
  DevicePointer at = begin;
  for (const CudaNcclCall& call : small) {
    in.push_back({at, call.input, call.count * element});
    unpack_.push_back({call.output, at, call.count * element});
    at += whole_packs(call.count * element);
  }
  move(0, in);
  return {kNcclAllReduce, 0, begin, begin, bytes / element};
}

}  // namespace farandole::cuda

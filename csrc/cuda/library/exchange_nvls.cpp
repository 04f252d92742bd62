// Runs one piece of an exchange that the switch between the devices folds: the steps of
// exchange_pieces.cpp, in a bucket that all devices have at one address.
#include <array>

#include "cuda/library/exchange.h"

namespace farandole::cuda {
namespace {

constexpr uint64_t kPackBytes = 16;

}  // namespace

NvlsBucket& Exchange::open_nvls() {
  if (no_nvls_) throw Error(*no_nvls_);
  return nvls_.emplace(context_, rank_, size_, strand_bytes_, nvls_kernels_);
}

void Exchange::run_nvls(const CudaPiece& piece) {
  const DeviceContext::Use all_calls(*context_);
  const DevicePointer bucket = nvls_->own(piece.strand);
  move_in(piece, bucket);
  scale_leaves(piece, bucket);
  meet(piece.strand);
  if (piece.count > 0) fold_by_switch(piece);
  meet(piece.strand);
  move_out(piece, bucket);
  note(piece.strand);
}

/// The switch takes elements as they are: where they are scaled first, they are folded alone.
void Exchange::scale_leaves(const CudaPiece& piece, DevicePointer bucket) {
  Folding folding = folding_of(piece);
  folding.scales.finish = {};
  if (folding.scales.leaf.is_identity()) return;
  uint64_t bytes = 0;
  for (const CudaMove& one : std::span(piece.in, piece.ins)) bytes += one.bytes;
  const std::array<const void*, 1> from{at_address(bucket)};
  const std::array<void*, 1> to{at_address(bucket)};
  const TwoShot job{.peers = {},
                    .fold = fold_of(from, to, 0, bytes / size_of(folding.dtype), folding)};
  kernel(kernel_name("two_shot", folding.dtype))
      .launch(stream_of(piece.strand),
              {.blocks = blocks_for(Work::alone, bytes, {.processors = multiprocessors()}),
               .threads = kThreads},
              job);
}

/// In whole packs: behind the last element of all there is room, and nobody looks at it.
void Exchange::fold_by_switch(const CudaPiece& piece) {
  const Folding folding = folding_of(piece);
  const uint64_t element = size_of(folding.dtype), bytes = piece.count * element;
  const NvlsFold job{.packs = (bytes + kPackBytes - 1) / kPackBytes,
                     .formula = row(folding.op).formula,
                     .finish = scaling_of(folding.scales.finish),
                     .all = at_address(nvls_->all(piece.strand) + piece.first * element),
                     .abort = abort_word()};
  nvls_->kernel(folding.dtype)
      .launch(stream_of(piece.strand),
              {.blocks = blocks_for(Work::lasting, bytes, {.processors = multiprocessors()}),
               .threads = kThreads},
              job);
}

}  // namespace farandole::cuda

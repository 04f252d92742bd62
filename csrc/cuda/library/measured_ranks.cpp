#include "cuda/library/measured_ranks.h"

#include <algorithm>
#include <barrier>
#include <exception>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/fixed_text.h"
#include "base/relax.h"
#include "cuda/library/kernel_image.h"

namespace farandole::cuda {
namespace {

constexpr int kBatchesOfRanks = 5;

}  // namespace

MeasuredRanks::Rank::Rank(const MeasuredDevice& device, const CudaMeasurement& asked,
                          const CudaExchangeShape& shape)
    : input(device.array(asked.bytes, static_cast<DType>(asked.dtype), kMeasuredNumber)),
      output(device.array(asked.bytes, static_cast<DType>(asked.dtype), 0)),
      exchange(device.context(), shape) {
  exchange.open_bucket(kernel_image());
}

MeasuredRanks::Rank::~Rank() {
  if (moments) exchange.give_back(std::move(moments));
}

MeasuredRanks::MeasuredRanks(MeasuredDevice& device, const CudaMeasurement& asked)
    : device_(device),
      asked_(asked),
      dtype_(static_cast<DType>(asked.dtype)),
      gate_(device.context(), sizeof(uint32_t)),
      has_gate_(device.stream().try_wait(gate_.address(), 0)) {
  const auto size = static_cast<uint32_t>(asked.ranks);
  for (uint32_t r = 0; r < size; ++r)
    ranks_.emplace_back(device, asked,
                        CudaExchangeShape{.device = asked.device,
                                          .rank = static_cast<int32_t>(r),
                                          .size = asked.ranks,
                                          .doorbell = doorbell_.get(),
                                          .spins = asked.what == kMeasuredTwoShot ? 0 : 1,
                                          .captured = 0,
                                          .bucket_bytes = asked.piece_bytes});
  for (uint32_t r = 0; r < size; ++r)
    for (uint32_t other = 0; other < size; ++other)
      if (other != r)
        ranks_[r].exchange.map(other, ranks_[other].exchange.share(), device.multiprocessors());
}

/// In a thread for each; throws what the first of them has thrown.
void MeasuredRanks::all_ranks(const std::function<void(uint32_t)>& act) {
  std::vector<std::exception_ptr> thrown(ranks_.size());
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < ranks_.size(); ++r)
    threads.emplace_back([&, r] {
      try {
        act(r);
      } catch (...) {
        thrown[r] = std::current_exception();
        for (Rank& rank : ranks_) rank.exchange.drain();  // those who wait for this one
        open_gate();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& one : thrown)
    if (one) std::rethrow_exception(one);
}

void MeasuredRanks::open_gate() {
  std::atomic_ref(*reinterpret_cast<uint32_t*>(gate_.host()))
      .store(closed_at_, std::memory_order_release);
}

uint64_t MeasuredRanks::piece_bytes() const {
  if (spins()) return asked_.bytes;
  return asked_.what == kMeasuredLanes ? ranks_[0].exchange.lane_room(true).piece_bytes
                                       : asked_.piece_bytes;
}

/// An all-reduce of a rank's arrays, behind the device's stream.
void MeasuredRanks::launch(uint32_t at) {
  Rank& rank = ranks_[at];
  auto moments = rank.exchange.moments(device_.stream());
  const uint64_t most = piece_bytes(), pieces = (asked_.bytes + most - 1) / most;
  CudaPiece piece{};
  piece.input = rank.input.at();
  piece.output = rank.output.at();
  piece.dtype = asked_.dtype;
  piece.op = static_cast<int32_t>(ReduceOp::sum);
  piece.folds_to = kFoldsToAllBuckets;
  piece.leaf_factor = piece.finish_factor = 1;
  piece.leaf_divide = piece.finish_divide = 1;
  rank.exchange.begin(*moments, asked_.what == kMeasuredTwoShot ? pieces : 1);
  for (uint64_t k = 0; k < pieces; ++k)
    run(at, k * most, std::min(most, asked_.bytes - k * most),
        static_cast<int32_t>(k % kCudaStrands), piece);
  rank.number = rank.exchange.end(*moments);
  if (rank.moments) rank.exchange.give_back(std::move(rank.moments));
  rank.moments = std::move(moments);
}

/// A piece of it.
void MeasuredRanks::run(uint32_t at, uint64_t begin, uint64_t bytes, int32_t strand,
                        CudaPiece piece) {
  Exchange& exchange = ranks_[at].exchange;
  const uint64_t elements = bytes / size_of(dtype_);
  if (asked_.what == kMeasuredTwoShot) {
    const auto own = static_cast<int32_t>(at);
    piece.first = elements * at / ranks_.size();
    piece.count = elements * (at + 1) / ranks_.size() - piece.first;
    uint64_t first = 0, moved = bytes;
    if (ranks_.size() == 2) {  // the own part stays (devices/step_pieces.cpp)
      const uint64_t element = size_of(dtype_);
      piece.own_from = piece.input + begin + piece.first * element;
      piece.own_to = piece.output + begin + piece.first * element;
      first = at == 0 ? piece.count * element : 0;
      moved = bytes - piece.count * element;
    }
    const CudaMove in{begin + first, first, moved, own}, out{first, begin + first, moved, own};
    piece.strand = strand;
    piece.in = &in;
    piece.out = &out;
    piece.ins = piece.outs = 1;
    return exchange.run(piece);
  }
  piece.input += begin;
  piece.output += begin;
  piece.count = elements;
  if (spins()) return exchange.spin(piece, true);
  CudaLanes lanes{};
  copy_cut("halving_doubling", lanes.planner);
  lanes.collective = static_cast<int32_t>(Collective::all_reduce);
  lanes.lanes = static_cast<int32_t>(exchange.lane_room(true).lanes);
  lanes.segments = 1;
  lanes.count = elements;
  exchange.run_lanes(lanes, piece, true);
}

/// A stream takes no endless number of calls (Backlog).
int MeasuredRanks::rounds_behind_gate() const {
  constexpr uint64_t kCalls = 700, kOfOne = 8;  // of a piece, and of all the rest
  const uint64_t pieces = (asked_.bytes + piece_bytes() - 1) / piece_bytes();
  return static_cast<int>(std::clamp<uint64_t>(kCalls / (kOfOne * (pieces + 1)), 1,
                                               static_cast<uint64_t>(asked_.rounds)));
}

/// All rounds are in the streams when the gate opens, so launches are no part of what is measured.
double MeasuredRanks::batch() {
  try {
    return try_batch(rounds_behind_gate());
  } catch (const Error& error) {
    const std::string late = whom_others_wait_for();
    for (Rank& rank : ranks_) rank.exchange.drain();  // so that their streams come to an end
    throw Error(error.code(), error.verdict() + late);
  }
}

/// As the ranks' flags tell it, for people.
std::string MeasuredRanks::whom_others_wait_for() {
  RankBits late = 0;
  for (int looks = 0; looks < 3; ++looks) {  // the first one only asks
    for (Rank& rank : ranks_) late |= rank.exchange.look_for_late().value_or(0);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::string text;
  for (uint32_t r = 0; r < ranks_.size(); ++r)
    if ((late >> r & 1) != 0) text += " " + std::to_string(r);
  return text.empty() ? "; no rank is waited for" : "; not reached by ranks" + text;
}

double MeasuredRanks::try_batch(int rounds) {
  ++closed_at_;
  launched_.store(0);
  if (has_gate_) device_.stream().wait(gate_.address(), closed_at_);
  return device_.seconds_of([&] {
    all_ranks([&](uint32_t r) {
      for (int i = 0; i < rounds; ++i) launch(r);
      if (++launched_ == ranks_.size()) open_gate();
    });
    for (Rank& rank : ranks_)
      rank.exchange.complete_before(*rank.moments, device_.stream().handle());
  }) / rounds;
}

double MeasuredRanks::device_seconds() {
  double best = batch();
  for (int i = 0; i < kBatchesOfRanks; ++i) best = std::min(best, batch());
  return best;
}

double MeasuredRanks::host_seconds() {
  std::barrier together(static_cast<std::ptrdiff_t>(ranks_.size()));
  std::vector<double> took;
  all_ranks([&](uint32_t r) {
    for (int i = 0; i < asked_.rounds; ++i) {
      together.arrive_and_wait();
      try {
        const TimePoint begin = now();
        launch(r);
        while (!ranks_[r].exchange.is_complete(ranks_[r].number)) relax();
        if (r == 0) took.push_back(seconds(now() - begin));
      } catch (...) {
        together.arrive_and_drop();
        throw;
      }
    }
  });
  std::ranges::nth_element(took, took.begin() + static_cast<std::ptrdiff_t>(took.size() / 2));
  return took[took.size() / 2];
}

bool MeasuredRanks::are_right() const {
  const float sum = kMeasuredNumber * static_cast<float>(ranks_.size());
  return std::ranges::all_of(
      ranks_, [&](const Rank& rank) { return device_.is_full_of(rank.output, dtype_, sum); });
}

}  // namespace farandole::cuda

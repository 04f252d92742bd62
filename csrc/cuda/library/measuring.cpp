#include "cuda/library/measuring.h"

#include <string>
#include <vector>

#include "cuda/library/guarded.h"
#include "cuda/library/measured_device.h"
#include "cuda/library/measured_ranks.h"
#include "cuda/plans.h"

namespace farandole::cuda {
namespace {

void measure_copy(MeasuredDevice& device, CudaMeasurement& m) {
  const auto dtype = static_cast<DType>(m.dtype);
  const MeasuredArray from = device.array(m.bytes, dtype, kMeasuredNumber);
  const MeasuredArray to = device.array(m.bytes, dtype, 0);
  m.moved = 2 * m.bytes;
  m.device_seconds =
      device.best_round(m.rounds, [&] { device.stream().copy(to.at(), from.at(), m.bytes); });
  m.right = device.is_full_of(to, dtype, kMeasuredNumber);
}

/// Arrays of equal length into a bucket, or out of it.
void measure_bucket(MeasuredDevice& device, CudaMeasurement& m) {
  const bool gathers = m.what == kMeasuredGather;
  const auto dtype = static_cast<DType>(m.dtype), of_bucket = static_cast<DType>(m.bucket_dtype);
  const auto parts = static_cast<uint64_t>(m.parts);
  const uint64_t count = m.bytes / size_of(dtype) / parts;
  const MeasuredArray arrays =
      device.array(count * parts * size_of(dtype), dtype, gathers ? kMeasuredNumber : 0);
  const MeasuredArray bucket =
      device.array(count * parts * size_of(of_bucket), of_bucket, gathers ? 0 : kMeasuredNumber);
  const PinnedMemory here(device.context(), parts * sizeof(Piece));
  const MeasuredArray table = device.array(parts * sizeof(Piece), DType::float32, 0);
  const std::span<Piece> pieces(reinterpret_cast<Piece*>(here.host()), parts);
  for (uint64_t i = 0; i < parts; ++i) {
    void* const one = at_address(arrays.at() + i * count * size_of(dtype));
    void* const place = at_address(bucket.at() + i * count * size_of(of_bucket));
    pieces[i] = {.from = gathers ? one : place, .to = gathers ? place : one, .count = count};
  }
  const Pieces job = pieces_of(pieces, static_cast<const Piece*>(at_address(table.at())), Scale{});
  device.stream().copy(table.at(), here.address(), table.bytes);
  const DeviceFunction kernel = device.function(gathers ? kernel_name("gather", dtype, of_bucket)
                                                        : kernel_name("scatter", of_bucket, dtype));
  const LaunchShape shape{.blocks = blocks_for_chunks(job.chunks, device.multiprocessors()),
                          .threads = kThreads};
  m.moved = arrays.bytes + bucket.bytes;
  m.device_seconds =
      device.best_round(m.rounds, [&] { kernel.launch(device.stream(), shape, job); });
  m.right = gathers ? device.is_full_of(bucket, of_bucket, kMeasuredNumber)
                    : device.is_full_of(arrays, dtype, kMeasuredNumber);
}

/// By the kernel of steps.
void measure_fold(MeasuredDevice& device, CudaMeasurement& m) {
  const auto dtype = static_cast<DType>(m.dtype);
  const auto size = static_cast<size_t>(m.ranks);
  std::vector<MeasuredArray> inputs;
  std::vector<const void*> sources;
  for (size_t i = 0; i < size; ++i) {
    inputs.push_back(device.array(m.bytes, dtype, kMeasuredNumber));
    sources.push_back(at_address(inputs.back().at()));
  }
  const MeasuredArray output = device.array(m.bytes, dtype, 0);
  void* const destination = at_address(output.at());
  const Fold job =
      fold_of(sources, {&destination, 1}, 0, m.bytes / size_of(dtype), {.dtype = dtype});
  const DeviceFunction kernel = device.function(kernel_name("fold", dtype));
  const Room room{.processors = device.multiprocessors()};
  const LaunchShape shape{.blocks = blocks_for(Work::alone, m.bytes, room), .threads = kThreads};
  m.moved = (size + 1) * m.bytes;
  m.device_seconds =
      device.best_round(m.rounds, [&] { kernel.launch(device.stream(), shape, job); });
  m.right = device.is_full_of(output, dtype, kMeasuredNumber * static_cast<float>(size));
}

/// The least that all ranks read and write. In a one-shot each rank reads its input and all slots
/// of its mailbox, and writes to every mailbox and its output. Steps copy in, fold (each rank its
/// part of all, to all), and copy out; of two ranks each copies the other one's part alone. Lanes
/// send all but a rank's part, twice: each element is read, written to a slot, read there and
/// written. Half of them are folded with an element that is read besides.
uint64_t moved_by_ranks(const CudaMeasurement& m) {
  const auto size = static_cast<uint64_t>(m.ranks);
  if (m.what == kMeasuredOneShot) return (2 * size + 2) * size * m.bytes;
  if (m.what == kMeasuredLanes) return 9 * (size - 1) * m.bytes;
  return (size == 2 ? 4 : 6) * size * m.bytes;
}

void measure_ranks(MeasuredDevice& device, CudaMeasurement& m) {
  m.moved = moved_by_ranks(m);
  MeasuredRanks ranks(device, m);
  m.device_seconds = ranks.device_seconds();
  m.host_seconds = ranks.host_seconds();
  m.right = ranks.are_right();
}

void check(const CudaMeasurement& m) {
  const bool whole = m.bytes > 0 && m.bytes % sizeof(uint32_t) == 0 && m.rounds > 0;
  const bool bucket = m.what == kMeasuredGather || m.what == kMeasuredScatter;
  const bool ranks = m.what >= kMeasuredFold;
  if (!whole || (bucket && (m.parts < 1 || m.bytes / sizeof(uint64_t) < uint64_t(m.parts))) ||
      (ranks && (m.ranks < 1 || m.ranks > static_cast<int32_t>(kMostRanks))) ||
      ((m.what == kMeasuredTwoShot || m.what == kMeasuredLanes) && m.piece_bytes == 0))
    throw Error(ErrorCode::invalid_argument, "there is nothing to measure");
}

}  // namespace

int32_t measure(CudaMeasurement* measurement, CudaFailure* failure) {
  return guarded(failure, [&] {
    check(*measurement);
    MeasuredDevice device(measurement->device);
    switch (measurement->what) {
      case kMeasuredCopy:
        measure_copy(device, *measurement);
        break;
      case kMeasuredGather:
      case kMeasuredScatter:
        measure_bucket(device, *measurement);
        break;
      case kMeasuredFold:
        measure_fold(device, *measurement);
        break;
      case kMeasuredTwoShot:
      case kMeasuredOneShot:
      case kMeasuredLanes:
        measure_ranks(device, *measurement);
        break;
      default:
        throw Error(ErrorCode::invalid_argument, "nothing is measured by this number");
    }
    return 1;
  });
}

}  // namespace farandole::cuda

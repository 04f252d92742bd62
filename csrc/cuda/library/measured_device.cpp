#include "cuda/library/measured_device.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <thread>

#include "base/clock.h"
#include "cuda/library/kernel_image.h"

namespace farandole::cuda {
namespace {

constexpr int kBatches = 5;
constexpr std::chrono::seconds kPatience{5};
constexpr std::chrono::microseconds kBetweenLooks{20};  // does not matter: events have the times
constexpr size_t kWord = sizeof(uint32_t);

/// The number as it fills words of memory.
uint32_t word_of(DType dtype, float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (dtype == DType::float32) return bits;
  if (dtype == DType::bfloat16) return (bits >> 16) * 0x10001;
  throw Error(ErrorCode::invalid_argument, "float32 and bfloat16 are measured");
}

const void* image_or_throw() {
  if (kernel_image() == nullptr)
    throw Error(ErrorCode::device,
                "this build of farandole has no kernels: it had no compiler for them");
  return kernel_image();
}

}  // namespace

MeasuredDevice::MeasuredDevice(int ordinal)
    : context_(DeviceContext::retain(Driver::of_process(), ordinal)),
      module_(DeviceModule::load(context_, image_or_throw())),
      begin_(context_, Timing::on),
      end_(context_, Timing::on),
      stream_(context_) {}

uint32_t MeasuredDevice::multiprocessors() const {
  return static_cast<uint32_t>(context_->device().multiprocessors);
}

MeasuredArray MeasuredDevice::array(uint64_t bytes, DType dtype, float value) const {
  MeasuredArray made{allocate_device(context_, bytes, Sharing::none), bytes};
  stream_.fill_words(made.at(), word_of(dtype, value), bytes / kWord);
  return made;
}

bool MeasuredDevice::is_full_of(const MeasuredArray& array, DType dtype, float value) const {
  const PinnedMemory here(context_, array.bytes);
  stream_.copy(here.address(), array.at(), array.bytes);
  stream_.synchronize();
  const auto* const words = reinterpret_cast<const uint32_t*>(here.host());
  return std::all_of(words, words + array.bytes / kWord,
                     [wanted = word_of(dtype, value)](uint32_t word) { return word == wanted; });
}

double MeasuredDevice::seconds_of(const std::function<void()>& launch) {
  begin_.record(stream_);
  launch();
  end_.record(stream_);
  for (const Deadline deadline = Deadline::after(kPatience); !end_.complete();
       std::this_thread::sleep_for(kBetweenLooks))
    if (deadline.passed(now()))
      throw Error(ErrorCode::device, "the device has not come to the end of what is measured in " +
                                         std::to_string(kPatience.count()) + " s");
  return end_.milliseconds_since(begin_) / 1e3;
}

double MeasuredDevice::best_round(int rounds, const std::function<void()>& round) {
  const auto batch = [&](int count) {
    return seconds_of([&] {
             for (int i = 0; i < count; ++i) round();
           }) /
           count;
  };
  double best = batch(1);
  for (int i = 0; i < kBatches; ++i) best = std::min(best, batch(rounds));
  return best;
}

}  // namespace farandole::cuda

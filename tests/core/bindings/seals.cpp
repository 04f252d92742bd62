// Measures the cost of sealing messages (base/seal.h).
#include <pybind11/stl.h>

#include <ctime>
#include <span>
#include <utility>
#include <vector>

#include "base/seal.h"
#include "base/wire.h"
#include "core/bindings/bind.h"

namespace farandole {
namespace {

double processor_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// This thread's processor time per message: to seal it at the sender, to open it at the receiver.
std::pair<double, double> seconds_to_seal(size_t bytes, size_t messages) {
  Sealer here(Key{});
  Opener there(Key{});
  const std::vector<std::byte> frame = framed(std::vector<std::byte>(bytes));
  std::vector<std::vector<std::byte>> sent(messages, frame);
  for (std::vector<std::byte>& each : sent) each.reserve(frame.size() + Seals::kBytes);
  const double begin = processor_seconds();
  for (std::vector<std::byte>& each : sent) here.close(each);
  const double closed = processor_seconds();
  size_t opened = 0;
  for (std::vector<std::byte>& each : sent)
    opened += there.opens(std::span(each).subspan(sizeof(uint32_t))) ? 1U : 0U;
  const double end = processor_seconds();
  if (opened != messages) throw Error(ErrorCode::internal, "a seal does not open");
  const auto count = static_cast<double>(messages);
  return {(closed - begin) / count, (end - closed) / count};
}

}  // namespace

void bind_seals(py::module_& testing) {
  testing.def("seconds_to_seal", &seconds_to_seal, py::arg("bytes"), py::arg("messages"),
              "Of this thread's processor time: to seal a message, and to open it.");
}

}  // namespace farandole

// ll (low latency): for the smallest operations. A cache line carries 56 bytes of data and the
// operation's flag, so one transit between two cores brings both; no rank waits for anything else.
//
// A page has two sets of lines, used in turn: when operation k+2 overwrites the lines of k, every
// peer has started k+1, and so has finished reading k.
#include <algorithm>
#include <cstring>

#include "backends/paths.h"
#include "base/own_lines.h"
#include "fold/fold.h"

namespace farandole {
namespace {

size_t lines_for(size_t bytes) {
  return std::max<size_t>(1, (bytes + kLinePayload - 1) / kLinePayload);
}

/// The compiler knows the length of a whole line: a few moves, no call.
void copy_payload(std::byte* to, const std::byte* from, size_t bytes) {
  if (bytes == kLinePayload)
    std::memcpy(to, from, kLinePayload);
  else if (bytes > 0)
    std::memcpy(to, from, bytes);
}

class Ll : public DirectPath {
 public:
  explicit Ll(const StreamMemory& memory)
      : memory_(memory),
        arrived_(static_cast<size_t>(memory.size()) * kLines * kLinePayload),
        inputs_(static_cast<size_t>(memory.size())) {}

  void start(const Operation& operation) override {
    what_.start(operation, memory_);
    scales_ = scales_for(operation.input.dtype, operation.op, operation.prescale,
                         operation.postscale, memory_.size());
    peer_ = 0;
    line_ = 0;
    Line* lines = memory_.mine().lines[memory_.sequence() % 2];
    const std::byte* from = operation.input.data;
    size_t left = shown_bytes(memory_.rank);
    const size_t n = lines_for(left);
    own_lines(reinterpret_cast<std::byte*>(lines), n * sizeof(Line));
    for (size_t i = 0; i < n; ++i) {
      const size_t take = std::min(left, kLinePayload);
      copy_payload(lines[i].payload, from, take);
      lines[i].flag.store(memory_.ticket, std::memory_order_release);  // partner: poll
      from += take;
      left -= take;
    }
  }

  Progress poll(TimePoint) override {
    for (; peer_ < memory_.size(); ++peer_, line_ = 0)
      if (!arrived(peer_)) return Progress::idle;
    what_.finish(inputs_, scales_, what_.operation().output.data);
    return Progress::finished;
  }

  std::vector<int> lacking() const override {
    return all_but(memory_, [&](int r) {
      const Line* lines = memory_.page(r).lines[memory_.sequence() % 2];
      const Line& last = lines[lines_for(shown_bytes(r)) - 1];
      return last.flag.load(std::memory_order_acquire) == memory_.ticket;
    });
  }

 private:
  size_t shown_bytes(int r) const { return what_.is_read(r) ? what_.input_bytes(r) : 0; }

  bool arrived(int r) {
    const auto index = static_cast<size_t>(r);
    if (r == memory_.rank) {
      inputs_[index] = what_.operation().input.data;
      return true;
    }
    std::byte* to = arrived_.data() + index * kLines * kLinePayload;
    inputs_[index] = to;
    const size_t bytes = shown_bytes(r);
    const Line* lines = memory_.page(r).lines[memory_.sequence() % 2];
    for (const size_t n = lines_for(bytes); line_ < n; ++line_) {
      if (lines[line_].flag.load(std::memory_order_acquire) != memory_.ticket) return false;
      const size_t at = line_ * kLinePayload;
      if (bytes > at)
        copy_payload(to + at, lines[line_].payload, std::min(bytes - at, kLinePayload));
    }
    return true;
  }

  const StreamMemory& memory_;
  DirectOperation what_;
  Scales scales_;
  std::vector<std::byte> arrived_;
  std::vector<const std::byte*> inputs_;
  int peer_ = 0;     // lines of peers before it have been copied
  size_t line_ = 0;  // and this many of its own
};

}  // namespace

constinit extern const PathRow kLl{
    .name = "ll",
    .make = make_path<Ll>,
    .most_bytes = kLines * kLinePayload,
    .agrees_by = AgreesBy::in_data,
    .usual = {.start = 0.5e-6, .byte = 1 / 25e9},
    // Everybody's lines are copied out whole before they are looked at.
    .traffic = [](Collective kind, double size) {
      return kind == Collective::broadcast || kind == Collective::scatter ? 2 : 1 + size;
    }};

}  // namespace farandole

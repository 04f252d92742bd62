// Ranks that agree on operations by messages, over channels whose bytes are damaged on their way.
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>

#include "damage.h"
#include "stream/message_agreement.h"

namespace farandole::fuzz {
namespace {

class Pipe {
 public:
  std::deque<std::byte> bytes;
};

class PipeChannel : public Channel {
 public:
  PipeChannel(Pipe& out, Pipe& in, FuzzedDataProvider& input) : out_(out), in_(in), input_(input) {}
  size_t write(std::span<const std::byte> bytes) override {
    const Bytes sent = damaged({bytes.begin(), bytes.end()}, input_);
    out_.bytes.insert(out_.bytes.end(), sent.begin(), sent.end());
    return bytes.size();
  }
  bool drained() override { return true; }
  bool copies() const override { return true; }
  std::span<const std::byte> peek(size_t at_least) override {
    peeked_.assign(in_.bytes.begin(), in_.bytes.end());
    return peeked_.size() < at_least ? std::span<const std::byte>() : peeked_;
  }
  void consume(size_t count) override {
    in_.bytes.erase(in_.bytes.begin(), in_.bytes.begin() + static_cast<ptrdiff_t>(count));
  }

 private:
  Pipe& out_;
  Pipe& in_;
  FuzzedDataProvider& input_;
  Bytes peeked_;
};

class Ready : public Connecting {
 public:
  explicit Ready(std::unique_ptr<Channel> channel) : channel_(std::move(channel)) {}
  std::vector<std::unique_ptr<Channel>> poll(TimePoint) override {
    std::vector<std::unique_ptr<Channel>> all;
    all.push_back(std::move(channel_));
    return all;
  }

 private:
  std::unique_ptr<Channel> channel_;
};

/// Whose answers are the input's.
class AnyBoard : public ProgressBoard {
 public:
  explicit AnyBoard(FuzzedDataProvider& input) : input_(input) {}
  void show(uint64_t, const StreamProgress&) override {}
  void forget(uint64_t) override {}
  void ask(uint64_t, uint64_t, int) override {}
  StreamAnswer told(uint64_t, int) const override {
    if (input_.ConsumeBool()) return {};
    return {StreamProgress{input_.ConsumeIntegral<uint32_t>(), 0, {input_.ConsumeIntegral<int>()}},
            input_.ConsumeBool()};
  }
  bool has_finished(int) const override { return false; }

 private:
  FuzzedDataProvider& input_;
};

class Ranks {
 public:
  explicit Ranks(FuzzedDataProvider& input)
      : input_(input), size_(input.ConsumeIntegralInRange(2, 5)), board_(input) {
    for (int r = 0; r < size_; ++r) {
      auto memory = std::make_unique<StreamMemory>();
      memory->rank = r;
      for (int m = 0; m < size_; ++m) memory->members.push_back(m);
      const Connect connect = [this, r](int peer, int) {
        return std::make_unique<Ready>(
            std::make_unique<PipeChannel>(pipes_[{r, peer}], pipes_[{peer, r}], input_));
      };
      agreements_.push_back(std::make_unique<MessageAgreement>(*memory, connect, 1, 0, board_));
      memories_.push_back(std::move(memory));
    }
  }

  /// As by ranks that have refused a message, and are not told of the end yet.
  void go_on() {
    for (const auto& agreement : agreements_) refused([&] { agreement->compare(); });
  }

  void run() {
    for (uint32_t sequence = 1; sequence < 4; ++sequence) {
      const bool alike = input_.ConsumeBool();
      data_.resize(input_.ConsumeIntegralInRange<size_t>(0, 100));
      for (int r = 0; r < size_; ++r)
        of(r).post(uint64_t{sequence} << 32 | static_cast<uint64_t>(alike ? 1 : r), data_);
      std::vector<Posts> found(agreements_.size(), Posts::waiting);
      if (!all([&](size_t r) {
            if (found[r] == Posts::waiting) found[r] = agreements_[r]->compare();
            return found[r] != Posts::waiting;
          }))
        return;
      if (!std::ranges::all_of(found, [&](Posts p) { return p == found[0]; })) return;
      if (found[0] == Posts::different && !describe(sequence)) return;
      for (int r = 0; r < size_; ++r) of(r).complete(sequence);
    }
  }

 private:
  MessageAgreement& of(int rank) { return *agreements_[static_cast<size_t>(rank)]; }

  bool describe(uint32_t sequence) {
    for (int r = 0; r < size_; ++r) {
      Descriptor mine;
      std::memset(static_cast<void*>(&mine), 0, sizeof mine);
      mine.count = sequence;
      mine.arrays = input_.ConsumeIntegralInRange<uint64_t>(0, 3);
      const std::vector<BundledArray> arrays(mine.bundled());
      of(r).describe(mine, arrays);
    }
    std::vector<bool> told(agreements_.size());
    return all([&](size_t r) {
      if (told[r]) return true;
      const auto shown = agreements_[r]->described();
      if (!shown) return false;
      disagreement(*shown, memories_[r]->members);
      told[r] = true;
      return true;
    });
  }

  /// Asks every rank until all have what they wait for; false: messages were lost.
  template <typename Ask>
  bool all(Ask ask) {
    for (int turn = 0; turn < 20; ++turn) {
      bool done = true;
      for (size_t r = 0; r < agreements_.size(); ++r) done &= ask(r);
      if (done) return true;
    }
    for (int r = 0; r < size_; ++r)
      for (int m = 0; m < size_; ++m)
        for (const int member : of(r).holdups_of(m))
          if (member < 0 || member >= size_) __builtin_trap();
    return false;
  }

  FuzzedDataProvider& input_;
  const int size_;
  AnyBoard board_;
  Bytes data_ = Bytes(100);  // of an operation, which agreements refer to
  std::map<std::pair<int, int>, Pipe> pipes_;
  std::vector<std::unique_ptr<StreamMemory>> memories_;
  std::vector<std::unique_ptr<MessageAgreement>> agreements_;
};

}  // namespace
}  // namespace farandole::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace farandole::fuzz;
  FuzzedDataProvider input(data, size);
  Ranks ranks(input);
  if (refused([&] { ranks.run(); })) ranks.go_on();
  return 0;
}

#include "transport/chaos.h"

#include <algorithm>
#include <deque>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace farandole {
namespace {

/// Something held back for a random number of polls.
class Delay {
 public:
  void start(std::mt19937_64& random, unsigned longest) { left_ = random() % (longest + 1ULL); }
  bool over() {
    if (left_ > 0) --left_;
    return left_ == 0;
  }

 private:
  uint64_t left_ = 0;
};

class ChaosChannel : public Channel {
 public:
  ChaosChannel(std::unique_ptr<Channel> inner, const ChaosPlan& plan, uint64_t seed, int peer)
      : inner_(std::move(inner)),
        plan_(plan),
        peer_(peer),
        copies_(inner_->copies() && seed % 2 == 0),
        random_(seed) {}

  // Taken bytes go out at a later poll. Half of the channels leave them where they are: a caller
  // that changes them before drained() sends the change.
  size_t write(std::span<const std::byte> bytes) override {
    push();
    if (taken_ >= plan_.cut_at) cut();
    const size_t most =
        std::min<uint64_t>({bytes.size(), plan_.longest_write, plan_.cut_at - taken_});
    const size_t count = random_() % (most + 1);
    if (count == 0) return 0;
    if (held_.empty()) sending_.start(random_, plan_.longest_delay);
    held_.push_back(hold(bytes.first(count)));
    taken_ += count;
    return count;
  }

  bool drained() override {
    push();
    return held_.empty() && inner_->drained();
  }

  bool copies() const override { return copies_; }
  bool refers() override {
    push();
    return !copies_ && (!held_.empty() || inner_->refers());
  }

  std::span<const std::byte> peek(size_t at_least) override {
    push();
    if (taken_ >= plan_.cut_at) cut();
    const std::span<const std::byte> arrived = inner_->peek(at_least);
    if (arrived.empty()) return {};
    if (shown_ < at_least) {
      if (!showing_.over()) return {};
      showing_.start(random_, plan_.longest_delay);
      shown_ = std::max(at_least, random_() % (plan_.longest_read + 1));
    }
    return arrived.first(std::min(arrived.size(), shown_));
  }

  void consume(size_t count) override {
    inner_->consume(count);
    shown_ -= std::min(shown_, count);
  }

  bool is_sealed() const override { return inner_->is_sealed(); }
  Seals* seals() override { return inner_->seals(); }

  PlaceRule place_rule() const override { return inner_->place_rule(); }
  void offer(std::byte* place, size_t count) override { inner_->offer(place, count); }
  Held let_go() override { return inner_->let_go(); }

  // Behind what is held back only, and not at once, and not all of it.
  std::optional<std::span<std::byte>> place_for(std::span<const std::byte> bytes) override {
    push();
    if (taken_ >= plan_.cut_at) cut();
    if (!held_.empty() || !sending_.over()) return std::nullopt;
    const auto place = inner_->place_for(bytes);
    if (!place || place->empty()) return place;
    sending_.start(random_, plan_.longest_delay);
    const size_t most =
        std::min<uint64_t>({place->size(), plan_.longest_write, plan_.cut_at - taken_});
    return place->first(1 + random_() % most);
  }

  void delivered(size_t count) override {
    taken_ += count;
    inner_->delivered(count);
  }

 private:
  struct Kept {
    std::vector<std::byte> copy;
    std::span<const std::byte> left;
  };
  Kept hold(std::span<const std::byte> bytes) const {
    if (!copies_) return {{}, bytes};
    Kept held{{bytes.begin(), bytes.end()}, {}};
    held.left = held.copy;
    return held;
  }

  void push() const {
    if (held_.empty() || !sending_.over()) return;
    std::span<const std::byte>& first = held_.front().left;
    first = first.subspan(inner_->write(first));
    if (first.empty()) {
      given_.push_back(std::move(held_.front()));
      held_.pop_front();
    }
    if (!inner_->refers()) given_.clear();
    sending_.start(random_, plan_.longest_delay);
  }

  [[noreturn]] void cut() const {
    Context where;
    where.peer = peer_;
    where.evidence = "cut by the fault plan after " + std::to_string(taken_) + " bytes";
    throw Error(ErrorCode::link, "connection to rank " + std::to_string(peer_) + " was cut", where);
  }

  std::unique_ptr<Channel> inner_;
  ChaosPlan plan_;
  int peer_;
  bool copies_;
  // drained() moves held bytes on: for its caller nothing changes but the answer.
  mutable std::mt19937_64 random_;
  mutable std::deque<Kept> held_, given_;  // what goes out later; what the channel may refer to
  mutable Delay sending_;
  Delay showing_;
  size_t shown_ = 0;
  uint64_t taken_ = 0;
};

class ChaosConnecting : public Connecting {
 public:
  ChaosConnecting(std::unique_ptr<Connecting> inner, const ChaosPlan& plan, uint64_t seed, int peer)
      : inner_(std::move(inner)), plan_(plan), random_(seed), peer_(peer) {
    delay_.start(random_, plan.longest_delay);
  }

  std::vector<std::unique_ptr<Channel>> poll(TimePoint now) override {
    if (!delay_.over()) return {};
    std::vector<std::unique_ptr<Channel>> channels = inner_->poll(now);
    for (auto& channel : channels)
      channel = std::make_unique<ChaosChannel>(std::move(channel), plan_, random_(), peer_);
    return channels;
  }

 private:
  std::unique_ptr<Connecting> inner_;
  ChaosPlan plan_;
  std::mt19937_64 random_;
  int peer_;
  Delay delay_;
};

class Chaos : public Transport {
 public:
  Chaos(std::unique_ptr<Transport> inner, ChaosPlan plan)
      : inner_(std::move(inner)), plan_(plan), random_(plan.seed) {}

  std::string_view name() const override { return "chaos"; }
  std::vector<std::byte> address() const override { return inner_->address(); }
  bool reaches(const PeerInfo& peer) const override { return inner_->reaches(peer); }
  std::span<const int> wake_fds() const override { return inner_->wake_fds(); }
  void before_park() override { inner_->before_park(); }
  void woken() override { inner_->woken(); }
  bool has_to_be_asked() const override { return inner_->has_to_be_asked(); }
  void lose(int rank) override { inner_->lose(rank); }
  void leave() override { inner_->leave(); }
  void close_descriptors() override { inner_->close_descriptors(); }
  std::unique_ptr<Connecting> connect(const PeerInfo& peer, uint64_t stream_key,
                                      int lanes) override {
    return std::make_unique<ChaosConnecting>(inner_->connect(peer, stream_key, lanes), plan_,
                                             random_(), peer.rank);
  }

 private:
  std::unique_ptr<Transport> inner_;
  ChaosPlan plan_;
  std::mt19937_64 random_;
};

}  // namespace

std::unique_ptr<Transport> chaos_transport(std::unique_ptr<Transport> inner, ChaosPlan plan) {
  return std::make_unique<Chaos>(std::move(inner), plan);
}

}  // namespace farandole

#include "transport/inproc.h"

#include <utility>
#include <vector>

#include "base/byte_ring.h"
#include "transport/ready_channels.h"

namespace farandole {

struct InprocHub::Pipe {
  explicit Pipe(size_t bytes) : data(bytes) {}
  RingControl control;
  std::vector<std::byte> data;
};

std::shared_ptr<InprocHub::Pipe> InprocHub::meet(const Key& key) {
  const std::lock_guard lock(mutex_);
  if (const auto first = waiting_.find(key); first != waiting_.end()) {
    std::shared_ptr<Pipe> pipe = std::move(first->second);
    waiting_.erase(first);
    return pipe;
  }
  return waiting_[key] = std::make_shared<Pipe>(ring_bytes_);
}

namespace {

class InprocChannel : public Channel {
 public:
  InprocChannel(std::shared_ptr<InprocHub::Pipe> out, std::shared_ptr<InprocHub::Pipe> in)
      : out_(std::move(out)),
        in_(std::move(in)),
        writer_(out_->control, out_->data),
        reader_(in_->control, in_->data) {}

  size_t write(std::span<const std::byte> bytes) override { return writer_.write(bytes); }
  bool drained() override { return true; }  // what was taken was copied
  bool copies() const override { return true; }
  std::span<const std::byte> peek(size_t at_least) override { return reader_.peek(at_least); }
  void consume(size_t count) override { reader_.consume(count); }

 private:
  std::shared_ptr<InprocHub::Pipe> out_, in_;
  RingWriter writer_;
  RingReader reader_;
};

class Inproc : public Transport {
 public:
  Inproc(std::shared_ptr<InprocHub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}

  std::string_view name() const override { return "inproc"; }
  bool reaches(const PeerInfo&) const override { return true; }

  // The ring waits for the peer, so there is nothing to wait for here.
  std::unique_ptr<Connecting> connect(const PeerInfo& peer, uint64_t stream_key,
                                      int lanes) override {
    std::vector<std::unique_ptr<Channel>> channels;
    for (int lane = 0; lane < lanes; ++lane)
      channels.push_back(
          std::make_unique<InprocChannel>(hub_->meet({stream_key, rank_, peer.rank, lane}),
                                          hub_->meet({stream_key, peer.rank, rank_, lane})));
    return std::make_unique<ReadyChannels>(std::move(channels));
  }

 private:
  std::shared_ptr<InprocHub> hub_;
  int rank_;
};

}  // namespace

std::unique_ptr<Transport> inproc_transport(std::shared_ptr<InprocHub> hub, int rank) {
  return std::make_unique<Inproc>(std::move(hub), rank);
}

}  // namespace farandole

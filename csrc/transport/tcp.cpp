#include "transport/tcp.h"

#include <algorithm>
#include <utility>

#include "transport/ready_channels.h"
#include "transport/tcp_channel.h"

namespace farandole {
namespace {

class Tcp : public Transport {
 public:
  Tcp(const std::shared_ptr<Segment>& segment, int rank, std::string host,
      MayHaveGone may_have_gone, std::shared_ptr<TcpDoor> door, Wire wire)
      : rank_(rank),
        ranks_(segment->ranks()),
        host_(std::move(host)),
        anywhere_(door != nullptr),
        shared_(std::make_shared<TcpShared>(
            door ? std::move(door) : std::make_shared<TcpDoor>(segment, rank),
            std::move(may_have_gone), wire)),
        wake_fd_(shared_->wakes.fd()) {}

  std::string_view name() const override { return "tcp"; }
  std::vector<std::byte> address() const override { return shared_->door->addresses(); }
  bool reaches(const PeerInfo& peer) const override {
    return (anywhere_ || peer.host == host_) && peer.rank >= 0 && peer.rank < ranks_ &&
           peer.rank != rank_;
  }

  // A channel connects itself, so there is nothing to wait for here.
  std::unique_ptr<Connecting> connect(const PeerInfo& peer, uint64_t stream_key,
                                      int lanes) override {
    std::vector<std::unique_ptr<Channel>> channels;
    for (int lane = 0; lane < lanes; ++lane) {
      const TcpLane name{std::min(rank_, peer.rank), std::max(rank_, peer.rank), stream_key, lane};
      channels.push_back(std::make_unique<TcpChannel>(shared_, name, peer.rank));
    }
    return std::make_unique<ReadyChannels>(std::move(channels));
  }

  std::span<const int> wake_fds() const override { return {&wake_fd_, 1}; }
  void before_park() override { shared_->wakes.watch(); }
  void woken() override { silence(shared_->door->news()); }
  void close_descriptors() override {
    shared_->wakes.close_descriptors();
    shared_->door->close_descriptors();
  }

 private:
  int rank_, ranks_;
  std::string host_;
  bool anywhere_;
  std::shared_ptr<TcpShared> shared_;
  int wake_fd_;
};

}  // namespace

std::unique_ptr<Transport> tcp_transport(const std::shared_ptr<Segment>& segment, int rank,
                                         std::string host, MayHaveGone may_have_gone,
                                         std::shared_ptr<TcpDoor> door, Wire wire) {
  return std::make_unique<Tcp>(segment, rank, std::move(host), std::move(may_have_gone),
                               std::move(door), wire);
}

}  // namespace farandole

#include "transport/mpi.h"

#include <string>
#include <utility>

#include "transport/mpi_channel.h"
#include "transport/ready_channels.h"

namespace farandole {
namespace {

class Mpi : public Transport {
 public:
  explicit Mpi(std::shared_ptr<MpiPort> port) : port_(std::move(port)) {}

  std::string_view name() const override { return "mpi"; }
  bool reaches(const PeerInfo& peer) const override {
    return peer.rank >= 0 && peer.rank < port_->size() && peer.rank != port_->rank();
  }

  // MPI keeps what comes too early, so there is nothing to wait for here.
  std::unique_ptr<Connecting> connect(const PeerInfo& peer, uint64_t stream_key,
                                      int lanes) override {
    std::vector<std::unique_ptr<Channel>> channels;
    for (int lane = 0; lane < lanes; ++lane)
      channels.push_back(std::make_unique<MpiChannel>(port_, peer.rank, stream_key, lane));
    return std::make_unique<ReadyChannels>(std::move(channels));
  }

  // MPI may still hold what other channels have sent, and moves it only when it is called.
  void before_park() override { port_->progress_all(); }
  bool has_to_be_asked() const override { return port_->expects(); }
  void lose(int rank) override { port_->abandon("rank " + std::to_string(rank) + " has died"); }
  void leave() override { port_->close(); }

 private:
  std::shared_ptr<MpiPort> port_;
};

}  // namespace

std::unique_ptr<Transport> mpi_transport(std::shared_ptr<MpiPort> port) {
  return std::make_unique<Mpi>(std::move(port));
}

}  // namespace farandole

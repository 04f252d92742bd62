// A channel over MPI. Bytes are copied into messages and out of them: MPI refers to no memory of
// its users, who may take theirs back at any failure.
#pragma once

#include <memory>

#include "transport/channel.h"
#include "transport/mpi_port.h"

namespace farandole {

class MpiChannel : public Channel {
 public:
  MpiChannel(std::shared_ptr<MpiPort> port, int peer, uint64_t stream_key, int lane)
      : port_(std::move(port)), pipe_(port_->open(peer, stream_key, lane)) {}
  ~MpiChannel() override { port_->shut(*pipe_); }

  size_t write(std::span<const std::byte> bytes) override { return port_->write(pipe_, bytes); }
  bool drained() const override { return port_->drained(*pipe_); }
  bool copies() const override { return true; }
  std::span<const std::byte> peek(size_t at_least) override {
    return port_->peek(*pipe_, at_least);
  }
  void consume(size_t count) override { port_->consume(pipe_, count); }

 private:
  std::shared_ptr<MpiPort> port_;
  std::shared_ptr<MpiPipe> pipe_;
};

}  // namespace farandole

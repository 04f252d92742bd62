// A channel over MPI. Short transfers are copied into frames and out of them; long ones go straight
// from memory to memory, where the receiver has said to.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "transport/channel.h"
#include "transport/mpi_port.h"

namespace farandole {

class MpiChannel : public Channel {
 public:
  MpiChannel(std::shared_ptr<MpiPort> port, int peer, uint64_t stream_key, int lane)
      : port_(std::move(port)), peer_(peer), pipe_(port_->open(peer, stream_key, lane)) {}
  ~MpiChannel() override { port_->shut(pipe_); }

  size_t write(std::span<const std::byte> bytes) override { return port_->write(pipe_, bytes); }
  bool drained() override { return port_->drained(*pipe_); }
  bool copies() const override { return true; }
  bool refers() override { return port_->refers(*pipe_); }
  std::span<const std::byte> peek(size_t at_least) override { return port_->peek(pipe_, at_least); }
  void consume(size_t count) override { port_->consume(pipe_, count); }

  bool is_sealed() const override { return true; }
  Seals* seals() override {
    if (!seals_) {
      const auto& [stream, lane] = pipe_->key;
      seals_.emplace(port_->keys_for(peer_, "messages of stream " + std::to_string(stream) +
                                                ", lane " + std::to_string(lane)));
    }
    return &*seals_;
  }

  PlaceRule place_rule() const override { return {.shortest = MpiPort::kShortestPlaced}; }
  void offer(std::byte* place, size_t count) override { port_->offer(pipe_, place, count); }
  std::optional<std::span<std::byte>> place_for(std::span<const std::byte> bytes) override {
    if (!port_->takes(*pipe_, bytes.size())) return std::nullopt;
    return std::span<std::byte>();
  }
  Held let_go() override { return port_->let_go(pipe_); }

 private:
  std::shared_ptr<MpiPort> port_;
  const int peer_;
  std::shared_ptr<MpiPipe> pipe_;
  std::optional<Seals> seals_;  // where it carries messages
};

}  // namespace farandole

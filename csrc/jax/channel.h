// The calls of JAX's programs in one world: a stream of their own, in one order.
#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "jax/flight.h"

namespace farandole {

class JaxChannel {
 public:
  /// On every rank, at any time; waits for nobody.
  explicit JaxChannel(std::shared_ptr<Group> group);

  const std::shared_ptr<Group>& group() const { return group_; }

  /// Any thread. Checks the call and its place in the order; throws what is wrong. A call out of
  /// order fails the group: what the other ranks would reduce it with is not known.
  std::shared_ptr<Flight> launch(JaxCall call);

  /// A new order begins: whatever position comes next is its first.
  void begin_anew();
  void note(const Error& error);
  std::optional<Error> last_error() const;

 private:
  void take_turn(const JaxCall& call);

  std::shared_ptr<Group> group_;
  std::shared_ptr<Stream> stream_;
  Loans loans_;
  std::mutex launching_;  // held while a call takes its turn and goes out; guards next_
  std::optional<uint32_t> next_;
  mutable std::mutex error_mutex_;  // guards last_error_
  std::optional<Error> last_error_;
};

}  // namespace farandole

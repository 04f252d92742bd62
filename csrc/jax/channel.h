// The calls of JAX's programs in one world: one order on this rank for all of them, and for the
// world and each process set a stream of its own.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "jax/fused_call.h"

namespace farandole {

class JaxChannel {
 public:
  /// Process sets by their ranks, as programs write them.
  using Sets = std::map<std::string, std::shared_ptr<Group>>;

  /// On every rank, at any time; waits for nobody.
  explicit JaxChannel(std::shared_ptr<Group> world);

  const std::shared_ptr<Group>& world() const { return world_; }

  /// Calls find these sets from now on, of all that this rank is in, and no others. Like the
  /// constructor.
  void know(const Sets& sets);

  /// Any thread. Checks the call and its place in the order; throws what is wrong. A call out of
  /// order fails its group: what the other ranks would reduce it with is not known.
  std::shared_ptr<FusedCall> launch(JaxCall call);

  /// A new order begins: whatever position comes next is its first.
  void begin_anew();
  void note(const Error& error);
  std::optional<Error> last_error() const;
  /// The same, unless a new order has begun since: later calls fail with it.
  std::optional<Error> failure() const;

 private:
  struct SetStream {
    std::shared_ptr<Group> group;
    std::shared_ptr<Stream> stream;
  };

  static SetStream open(const std::string& ranks, std::shared_ptr<Group> group);
  const SetStream& stream_for(const JaxCall& call) const;
  void take_turn(const JaxCall& call, Group& group);

  std::shared_ptr<Group> world_;
  std::mutex launching_;  // held while a call takes its turn and goes out; guards the next two
  std::map<std::string, SetStream> streams_;
  std::optional<uint32_t> next_;
  mutable std::mutex error_mutex_;  // guards the next two
  std::optional<Error> last_error_;
  bool failing_ = false;
};

}  // namespace farandole

// The errors that a caller can get. Every error has one verdict line, one evidence line, one advice
// line, and the same facts as fields.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace farandole {

enum class ErrorCode : uint8_t {
  invalid_argument,
  not_initialized,
  peer_lost,
  peer_hung,
  stalled,
  deadlock,
  mismatch,
  remote_error,
  early_exit,
  rendezvous,
  version_mismatch,
  authentication,
  link,
  resource,
  numerics,
  forked,
  membership_changed,
  aborted,
  internal,
  device,
};

/// One row per kind: the Python class it becomes, and the advice where the error brings none.
struct ErrorRow {
  ErrorCode code;
  std::string_view python_class;
  std::string_view also_is;  // a second, builtin base class in Python; may be empty
  std::string_view advice;
};

inline constexpr auto kErrors = std::to_array<ErrorRow>({
    {ErrorCode::invalid_argument, "InvalidArgument", "ValueError", "correct the argument"},
    {ErrorCode::not_initialized, "NotInitialized", "ValueError", "call init() first"},
    {ErrorCode::peer_lost, "PeerLost", "", "look at that rank's log for the cause, then restart"},
    {ErrorCode::peer_hung, "PeerHung", "", "continue or kill that process"},
    {ErrorCode::stalled, "Stalled", "", "find out why those ranks did not submit the operation"},
    {ErrorCode::deadlock, "Deadlock", "", "submit operations in the same order on every rank"},
    {ErrorCode::mismatch, "Mismatch", "", "make every rank submit the same operation"},
    {ErrorCode::remote_error, "RemoteError", "", "look at the error on the rank it came from"},
    {ErrorCode::early_exit, "EarlyExit", "",
     "give every rank the same number of steps, or drop the last uneven batch"},
    {ErrorCode::rendezvous, "RendezvousError", "", "check how the ranks were started"},
    {ErrorCode::version_mismatch, "VersionMismatch", "", "install one version on every rank"},
    {ErrorCode::authentication, "AuthError", "",
     "start all ranks as the same user, with the same secret"},
    {ErrorCode::link, "LinkError", "", "check the connection between the two ranks"},
    {ErrorCode::resource, "ResourceError", "", "free some of the resource or ask for less"},
    {ErrorCode::numerics, "NumericsError", "", "look at that rank's input"},
    {ErrorCode::forked, "ForkedEngine", "",
     "call init() in the child's own program, or start workers with spawn"},
    {ErrorCode::membership_changed, "MembershipChanged", "", "form a new group"},
    {ErrorCode::aborted, "Aborted", "", "look at the error that was given to abort()"},
    {ErrorCode::internal, "InternalError", "", "report this with the trace"},
    {ErrorCode::device, "DeviceError", "", "look at what nvidia-smi and the kernel's log show"},
});

constexpr const ErrorRow& row(ErrorCode code) { return kErrors[static_cast<size_t>(code)]; }

/// Values, and the ranks that gave each.
using RanksByValue = std::vector<std::pair<std::string, std::vector<int>>>;

/// The place of an error and the ranks involved; unknown facts stay at their defaults.
struct Context {
  int rank = -1;  // the guilty rank
  int peer = -1;
  int pid = 0;
  int signal = 0;
  std::string host;
  std::string operation;
  std::string tensor;
  uint64_t sequence = 0;
  int lane = -1;
  int step = -1;
  size_t bytes_done = 0;
  size_t bytes_total = 0;
  std::string field;     // Mismatch: what differs
  std::string evidence;  // what was seen, and by whom
  RanksByValue values;   // the ranks that gave or miss each value
};

class Error : public std::runtime_error {
 public:
  /// The texts become lines of printable characters.
  Error(ErrorCode code, const std::string& verdict, Context where = {},
        const std::string& advice = {});

  ErrorCode code() const noexcept { return code_; }
  const Context& where() const noexcept { return where_; }
  const std::string& verdict() const noexcept { return verdict_; }
  const std::string& advice() const noexcept { return advice_; }

 private:
  ErrorCode code_;
  std::string verdict_;
  Context where_;
  std::string advice_;
};

Error invalid_argument(const std::string& verdict);
/// The error of a call after shutdown().
Error left_world();

/// "0, 2-4" for {0, 2, 3, 4}.
std::string describe_ranks(const std::vector<int>& ranks);
/// "rank 0", "ranks 2-4".
std::string name_ranks(const std::vector<int>& ranks);
/// "float32 on rank 0; float64 on ranks 1-2"; an empty value is "none".
std::string describe_values(const RanksByValue& values);
/// The one rank that is unlike all others, where these are alike and several; else -1.
int odd_one(const RanksByValue& values);

}  // namespace farandole

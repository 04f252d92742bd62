#include "base/error.h"

#include "base/printable.h"

namespace farandole {

const std::array<ErrorRow, 19> kErrors{{
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
    {ErrorCode::authentication, "AuthError", "", "start all ranks as the same user"},
    {ErrorCode::link, "LinkError", "", "check the connection between the two ranks"},
    {ErrorCode::resource, "ResourceError", "", "free some of the resource or ask for less"},
    {ErrorCode::numerics, "NumericsError", "", "look at that rank's input"},
    {ErrorCode::forked, "ForkedEngine", "",
     "call init() in the child's own program, or start workers with spawn"},
    {ErrorCode::membership_changed, "MembershipChanged", "", "form a new group"},
    {ErrorCode::aborted, "Aborted", "", "look at the error that was given to abort()"},
    {ErrorCode::internal, "InternalError", "", "report this with the trace"},
}};

const ErrorRow& row(ErrorCode code) { return kErrors[static_cast<size_t>(code)]; }

namespace {
std::string full_text(ErrorCode code, const std::string& verdict, const Context& where,
                      const std::string& advice) {
  std::string text = printable(verdict);
  if (!where.evidence.empty()) text += "\n  evidence: " + printable(where.evidence);
  text += "\n  advice: " + (advice.empty() ? std::string(row(code).advice) : printable(advice));
  return text;
}
}  // namespace

Error::Error(ErrorCode code, const std::string& verdict, Context where, const std::string& advice)
    : std::runtime_error(full_text(code, verdict, where, advice)),
      code_(code),
      verdict_(printable(verdict)),
      where_(std::move(where)),
      advice_(advice.empty() ? std::string(row(code).advice) : printable(advice)) {
  where_.evidence = printable(where_.evidence);
}

std::string describe_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (!text.empty()) text += ", ";
    text += std::to_string(ranks[i]);
    if (last > i) text += "-" + std::to_string(ranks[last]);
    i = last + 1;
  }
  return text;
}

std::string name_ranks(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + describe_ranks(ranks);
}

std::string describe_values(const RanksByValue& values) {
  std::string text;
  for (const auto& [value, ranks] : values)
    text +=
        (text.empty() ? "" : "; ") + (value.empty() ? "none" : value) + " on " + name_ranks(ranks);
  return text;
}

}  // namespace farandole

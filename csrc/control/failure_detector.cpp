#include "control/failure_detector.h"

#include <cstring>
#include <string>

#include "base/fixed_text.h"

namespace farandole {
namespace {

// "value\x1f0,2\x1e…": who gave what, in one text.
std::string join_values(const Context& where) {
  std::string text;
  for (const auto& [value, ranks] : where.values) {
    text += value + '\x1f';
    for (int r : ranks) text += std::to_string(r) + ',';
    text += '\x1e';
  }
  return text;
}

std::vector<std::pair<std::string, std::vector<int>>> split_values(std::string_view text) {
  std::vector<std::pair<std::string, std::vector<int>>> values;
  while (!text.empty()) {
    const size_t length = text.find('\x1e');
    if (length == std::string_view::npos) break;  // cut to fit: its ranks may be too
    const std::string_view item = text.substr(0, length);
    text.remove_prefix(length + 1);
    const size_t middle = item.find('\x1f');
    if (middle == std::string_view::npos) continue;
    std::vector<int> ranks;
    for (const char* at = item.data() + middle + 1; at < item.data() + item.size();) {
      char* end = nullptr;
      ranks.push_back(static_cast<int>(std::strtol(at, &end, 10)));
      if (end == at) break;
      at = end + 1;
    }
    values.emplace_back(item.substr(0, middle), std::move(ranks));
  }
  return values;
}

}  // namespace

ErrorRecord encode(const Error& error) {
  const Context& c = error.where();
  ErrorRecord r{};
  r.code = static_cast<int32_t>(error.code());
  r.rank = c.rank;
  r.peer = c.peer;
  r.pid = c.pid;
  r.signal = c.signal;
  r.lane = c.lane;
  r.step = c.step;
  r.sequence = c.sequence;
  r.bytes_done = c.bytes_done;
  r.bytes_total = c.bytes_total;
  copy_cut(error.verdict(), r.verdict);
  copy_cut(c.evidence, r.evidence);
  copy_cut(error.advice(), r.advice);
  copy_cut(c.operation, r.operation);
  copy_cut(c.tensor, r.tensor);
  copy_cut(c.field, r.field);
  copy_cut(c.host, r.host);
  copy_cut(join_values(c), r.values);
  return r;
}

Error decode(const ErrorRecord& r) {
  Context c;
  c.rank = r.rank;
  c.peer = r.peer;
  c.pid = r.pid;
  c.signal = r.signal;
  c.lane = r.lane;
  c.step = r.step;
  c.sequence = r.sequence;
  c.bytes_done = r.bytes_done;
  c.bytes_total = r.bytes_total;
  c.evidence = text_in(r.evidence);
  c.operation = text_in(r.operation);
  c.tensor = text_in(r.tensor);
  c.field = text_in(r.field);
  c.host = text_in(r.host);
  c.values = split_values(text_in(r.values));
  const bool known = r.code >= 0 && static_cast<size_t>(r.code) < kErrors.size();
  const ErrorCode code = known ? static_cast<ErrorCode>(r.code) : ErrorCode::internal;
  return Error(code, text_in(r.verdict), std::move(c), text_in(r.advice));
}

void HostFailureDetector::report(const Error& error) {
  uint64_t alive = 0;
  const ErrorRecord record = encode(error);  // before, so that the record is soon complete
  if (!cell_.state.value.compare_exchange_strong(alive, 1)) return;  // somebody was first
  cell_.record = record;
  cell_.state.value.store(2, std::memory_order_seq_cst);  // partners: failed, verdict
}

std::optional<Error> HostFailureDetector::verdict() const {
  if (cell_.state.value.load(std::memory_order_acquire) != 2) return std::nullopt;
  return decode(cell_.record);
}

}  // namespace farandole
